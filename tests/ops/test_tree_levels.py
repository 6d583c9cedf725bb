import pytest
import torch

from lightning_accel.ops.native import KERNELS
from lightning_accel.ops.tree_levels import plan_levels

FORESTS = {
    "no node": [],
    "single nodes": [-1, -1, -1],
    "a chain": [3, 0, -1, 2],
    "a star": [2, 2, -1, 2, 2],
    "trees of several depths": [5, -1, 1, 0, -1, 1, 0, 6, 4, 6, 2],
}


@pytest.fixture(params=["kernel", "formula"])
def execution(request):
    if request.param == "kernel":
        request.getfixturevalue("native")
        yield
    else:
        with KERNELS.switched_off():
            yield


@pytest.mark.parametrize("name", FORESTS)
def test_levels_hold_nodes_of_one_distance_from_their_roots(name, execution):
    parent = FORESTS[name]
    distance = []
    for node in range(len(parent)):
        steps = 0
        while (node := parent[node]) >= 0:
            steps += 1
        distance.append(steps)
    levels = plan_levels(torch.tensor(parent, dtype=torch.int64))
    nodes = [part.tolist() for part in levels.order.split(levels.sizes)] if parent else []
    expected = [[node for node, steps in enumerate(distance) if steps == one] for one in sorted(set(distance))[::-1]]
    assert nodes == expected
    assert levels.roots.tolist() == [node for node, above in enumerate(parent) if above < 0]
    slots = levels.parents.split(levels.sizes[:-1]) if parent else ()
    for below, own, above in zip(nodes, slots, nodes[1:], strict=False):
        assert [above[slot] for slot in own.tolist()] == [parent[node] for node in below]
    for one in (levels.order, levels.roots, levels.parents):
        assert one.dtype == torch.int64


@pytest.mark.parametrize(
    ("parent", "message"),
    [
        ([-1, 2, 1, 0], r"2 nodes do not, node 1 among them.*cycle"),
        ([1, 2, 0, 0, -1], "4 nodes do not, node 0"),
        ([-1, 0, 1, 3], "1 nodes do not, node 3"),
        ([-1, 0, 4, 0], "node 2 has 4"),
        ([-1, 0, 1, -2], "node 3 has -2"),
    ],
)
def test_what_is_no_forest_is_refused(parent, message, execution):
    with pytest.raises(ValueError, match=message):
        plan_levels(torch.tensor(parent))


def test_parents_may_lie_apart_in_memory(execution):
    parent = torch.tensor(FORESTS["trees of several depths"])
    apart = torch.stack([parent, parent + 7], 1)[:, 0]
    assert plan_levels(apart).order.tolist() == plan_levels(parent).order.tolist()
