"""Operations that allocate and do not compute."""

import resource

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_accel.planning.live_memory import LiveMemory
from lightning_accel.planning.simulated_tensors import SimulatedTensors


@pytest.fixture
def simulated():
    memory = LiveMemory()
    memory.seen = []
    with (
        memory.seeing_resizes(),
        SimulatedTensors(memory, lambda func, called, result: memory.seen.append(func.name())),
    ):
        yield memory


def test_a_step_of_a_large_layer_takes_no_memory(simulated):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    layer = nn.Linear(20_000, 20_000)  # 1.6 GB, and as much for the gradient and each state
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.empty(64, 20_000)).square().sum().backward()
    optimizer.step()
    assert layer.weight[torch.arange(20_000) < 3].shape == (3, 20_000)
    assert simulated.peak > 6.4e9
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kilobytes


def test_bytes_are_those_of_what_is_alive(simulated):
    x = torch.empty(10, 6)
    y = x.t()[2:4] + 1
    assert simulated.bytes["other"] == (60 + 20) * 4
    simulated.kind = "more"
    x.untyped_storage().resize_(0)
    z = torch.relu(y)
    del y
    assert {kind: size for kind, size in simulated.bytes.items() if size} == {"more": z.numel() * 4}
    assert simulated.peak == (60 + 20) * 4


def test_what_changes_its_kind_does_so_at_the_peak_too(simulated):
    x = torch.empty(8)
    y = x + 1
    del y
    simulated.add(x.untyped_storage(), kind="gradients")
    assert simulated.at_peak["gradients"] == simulated.at_peak["other"] == 32
    simulated.reset_peak()
    assert simulated.peak == 32


def test_integers_of_floats_are_drawn_and_those_of_integers_computed(simulated):
    tokens = torch.tensor([3, 1, 1, 2])
    weight = torch.empty(5, 7)
    scores = F.embedding(tokens, weight) @ torch.empty(7, 40)
    values, chosen = scores.topk(3)
    assert values.shape == chosen.shape == (4, 3)
    assert chosen.min() >= 0
    assert chosen.max() < 40
    assert len(chosen.unique()) > 3  # not the first of each row, as zeros would have it
    assert tokens.bincount().tolist() == [0, 2, 1, 1]
    assert (tokens * 2).sum().item() == 14


def test_sizes_that_depend_on_values(simulated):
    tokens = torch.tensor([3, 0, 0, 2])
    x = F.embedding(tokens, torch.empty(5, 7))
    kept = tokens != 0
    assert x[kept].shape == (2, 7)
    assert x[kept, 1:3].shape == (2, 2)
    assert torch.masked_select(x, kept.unsqueeze(1)).shape == (14,)
    assert x.repeat_interleave(torch.tensor([1, 0, 2, 1]), dim=0).shape == (4, 7)
    assert 0 < len((x > 0.5).nonzero()) < x.numel()
    x[kept] = 0.0
    assert x.split([1, 3])[1].shape == (3, 7)


def test_numbers_that_the_host_reads_are_finite(simulated):
    loss = (torch.empty(3, 4) @ torch.empty(4, 2)).mean()
    assert loss.item() == loss.tolist() == loss.detach().numpy() == 1.0
    assert loss.isfinite()
    assert not loss.isnan()
    assert torch.empty(300, 1000).isfinite().any() in (True, False)


def test_parts_of_a_tensor_share_its_storage(simulated):
    x = torch.empty(4, 6)
    parts = [*torch.ops.aten.unsafe_split.Tensor(x, 2, 1), torch.ops.aten._unsafe_view.default(x, [24]), x.view(2, 12)]
    assert {part.untyped_storage()._cdata for part in parts} == {x.untyped_storage()._cdata}
    assert parts[1].storage_offset() == 2


def test_sizes_of_operations_that_look_alike(simulated):
    assert (torch.empty(4, 6) + 1).stride() == (6, 1)
    assert (torch.empty(6, 4).t() + 1).stride() == (1, 4)
    large = 2**22 + 1
    assert torch.full((large,), 1).dtype == torch.int64
    assert torch.full((large,), 1.0).dtype == torch.float32
    assert torch.full((large,), True).dtype == torch.bool


def test_arguments_that_are_written_come_back(simulated):
    norm = nn.BatchNorm1d(3)
    mean = norm.running_mean
    norm(torch.empty(5, 3))
    assert norm.running_mean is mean
    out = torch.empty(2, 2)
    assert torch.mm(torch.empty(2, 3), torch.empty(3, 2), out=out) is out
    x = torch.empty(3)
    assert x.add_(1) is x
    torch._foreach_add_([x, x], 1.0)


def test_data_are_computed(simulated):
    data = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert ((data - data.mean(0)) / 2).tolist() == [[-0.5, -0.5], [0.5, 0.5]]
    assert torch.bucketize(torch.empty(100), data.flatten()).max() == 0  # of numbers that are drawn from [0, 1)
    assert data.add_(torch.empty(2, 2)).sum().item() == 1.0  # from here on they mean nothing


def test_weights_that_were_loaded_count_as_simulated():
    layer = nn.Linear(2, 2)
    memory = LiveMemory()
    mode = SimulatedTensors(memory, lambda *called: None)
    mode.take(layer)
    with mode:
        assert memory.is_simulated(layer(torch.tensor([[1.0, 2.0]])).untyped_storage())
