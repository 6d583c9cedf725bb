import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_accel.strategies.fully_sharded import step_on_shards
from tests.ranks import run_ranks

OPTIMIZERS = [ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop]


def check_steps(rank, kind):
    mesh = init_device_mesh("cpu", (2,))
    start = [torch.randn(5, 3, dtype=torch.float64), torch.randn(1, dtype=torch.float64), torch.randn(4).double()]
    grads = [[torch.randn_like(one) for one in start] for _ in range(3)]
    options = {"lr": 0.1} | ({"momentum": 0.9} if kind is SGD else {})

    def trained(split, locally):
        parameters = [torch.nn.Parameter(split(one.clone())) for one in start]
        unused = torch.nn.Parameter(split(torch.ones(2)))
        optimizer = kind([{"params": [*parameters[:2], unused]}, {"params": parameters[2:], "lr": 0.01}], **options)
        if locally:
            step_on_shards(optimizer)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        for step in grads:

            def closure(step=step):
                optimizer.zero_grad()
                sum((a * split(b)).sum() for a, b in zip(parameters, step, strict=True)).backward()
                return 7.0

            assert optimizer.step(closure) == 7.0
            scheduler.step()
        return parameters, optimizer.state_dict()

    def split(tensor):
        return distribute_tensor(tensor, mesh, [Shard(0)])

    plain, plain_state = trained(lambda tensor: tensor, False)
    parts, parts_state = trained(split, True)
    assert plain_state["param_groups"] == parts_state["param_groups"]
    assert plain_state["state"].keys() == parts_state["state"].keys()
    for expected, actual in zip(plain, parts, strict=True):
        torch.testing.assert_close(actual.full_tensor(), expected, check_device=False)
    for number, state in plain_state["state"].items():
        for name, expected in state.items():
            actual = parts_state["state"][number][name]
            actual = actual.full_tensor() if hasattr(actual, "full_tensor") else actual
            torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_steps_on_parts_equal_steps_on_the_whole(kind):
    run_ranks(check_steps, kind)


def check_hooks(rank):
    mesh = init_device_mesh("cpu", (2,))
    parameter = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    optimizer = SGD([parameter], lr=1.0)
    step_on_shards(optimizer)
    seen = []

    def look(one, *_):
        seen.append(one.param_groups[0]["params"][0] is parameter)

    for register in (optimizer.register_step_pre_hook, register_optimizer_step_pre_hook):
        handle = register(look)
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        handle.remove()
    assert seen == [True, True]
    assert parameter.full_tensor().tolist() == [-1] * 4


def test_hooks_see_the_parameters():
    run_ranks(check_hooks)


class Normalised(SGD):
    """Moves by the gradient over its norm, which no part knows alone."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.div_(parameter.grad.norm())
        return super().step(closure)


def test_other_optimizers_are_left_alone():
    optimizer = Normalised([torch.nn.Parameter(torch.ones(2))])
    before = optimizer.step
    step_on_shards(optimizer)
    assert optimizer.step == before
