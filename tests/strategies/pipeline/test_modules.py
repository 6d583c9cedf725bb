"""Modules that a pipeline finds hard, and those that it refuses."""

import re
from collections import defaultdict
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import CatMetric

from lightning_accel.models import Experts, MoELanguageModel
from lightning_accel.nn import DynamicRNN
from lightning_accel.strategies import PipelineStrategy
from lightning_accel.strategies.gradients import average_, broadcast_overflow_
from lightning_accel.strategies.pipeline.chain import Chain, find_layers, stage_sizes
from lightning_accel.strategies.pipeline.message import flat_specs, pack, unpack
from lightning_accel.strategies.pipeline.stage import StageRun
from tests.ranks import run_ranks
from tests.strategies import trained as any_strategy
from tests.strategies.pipeline.test_strategy import ADAMW, Plain, load, loader, make_trainer, tokens, trained


class Declared(Plain):
    """Declares its layers, and does what it likes between them."""

    def __init__(self, forward="plain"):
        super().__init__()
        self.layers = self.net
        del self.net
        self.way = forward
        self.scale = nn.Parameter(torch.ones(7))
        self.all_losses = CatMetric()

    def pipeline_layers(self):
        return list(self.layers)

    def forward(self, x):
        one, two, three, four = self.layers
        match self.way:
            case "plain":
                return four(three(two(one(x))))
            case "shared":  # a parameter of no layer, used on the first stage and on the last
                return four(three(two(one(x)) * self.scale)) * self.scale.mean()
            case "skip":  # over several layers
                first = one(x)
                return four(three(two(first))) + first[:, :3].detach() + first[:, 3:6]
            case "in_place":
                x = two(one(x))
                x += 1
                return four(three(x))
            case "twice":
                return four(three(two(one(one(x)[:, :6]))))
            case "again":
                return four(three(two(one(four(three(two(one(x)))).repeat(1, 2)))))
            case "never":
                return two(one(x))[:, :3]
            case "detached":
                return four(three(two(one(x)).detach()))
            case "frozen":
                one.requires_grad_(False)
                return four(three(two(one(x))))

    def on_validation_epoch_end(self):
        if self.all_losses.update_called:
            self.log("val/worst", self.all_losses.compute().max())
            self.all_losses.reset()


class OnePass(Declared):
    def validation_step(self, batch, batch_idx):
        x, target = batch
        losses = F.cross_entropy(self(x), target, reduction="none")
        self.all_losses.update(losses)
        self.log("val/loss", losses.mean())


class Tied(Plain):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 6, bias=False), nn.Linear(6, 3))
        self.net[2].weight = nn.Parameter(self.net[2].weight)
        self.net[0] = nn.Linear(6, 6, bias=False)
        self.net[2] = nn.Linear(6, 6, bias=False)
        self.net[2].weight = self.net[0].weight


class Manual(Plain):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class Unclear(Plain):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 3))


MAKE = {"tied": Tied, "manual": Manual, "unclear": Unclear, "one_pass": OnePass}


def make(way):
    torch.manual_seed(3)
    return MAKE[way]() if way in MAKE else Declared(way)


def check(rank, folder, way, strategy, options):
    return trained(folder, PipelineStrategy(**strategy), make(way), **options)


@pytest.mark.sampled(slow=4)
@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    ["shared", "tied", "one_pass", *(pytest.param(way, marks=pytest.mark.slow) for way in ("skip", "twice", "frozen"))],
)
def test_equals_one_process(tmp_path, way):
    options = {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2 if way == "tied" else 1}
    one = trained(tmp_path, module=make(way), **options)
    for result in run_ranks(check, tmp_path, way, {}, options):
        assert result["logged"] == pytest.approx(one["logged"], abs=1e-5)
        torch.testing.assert_close(result["seen"], one["seen"], rtol=0, atol=1e-5)
    whole, pipeline = load(tmp_path, "one"), load(tmp_path, "pipeline")
    torch.testing.assert_close(pipeline["state_dict"], whole["state_dict"], rtol=0, atol=1e-5)
    torch.testing.assert_close(pipeline["optimizer_states"], whole["optimizer_states"], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_stage_may_learn_nothing(tmp_path):
    """Its gradients are zero, where one process has none."""
    one = trained(tmp_path, module=make("detached"))
    for result in run_ranks(check, tmp_path, "detached", {}, {}):
        torch.testing.assert_close(result["seen"], one["seen"], rtol=0, atol=1e-2)


def check_refused(rank, folder, way, strategy):
    with pytest.raises((RuntimeError, TypeError, ValueError)) as caught:
        trained(folder, PipelineStrategy(**strategy), make(way))
    return str(caught.value)


@pytest.mark.parametrize(
    ("way", "strategy", "said"),
    [
        ("in_place", {}, "layer 1 of the pipeline was changed in place"),
        ("again", {}, "was called out of order, or again after a layer of a later stage"),
        ("never", {"split": (3, 1)}, "without calling any layer of a later stage"),
        ("manual", {}, "automatic_optimization=False"),
        ("unclear", {}, "Give it a method pipeline_layers"),
        ("plain", {"split": (5, 1)}, r"split must give 2 stages one layer or more each, 4 in all; got \[5, 1\]"),
        ("plain", {"data_parallel_size": 2}, "2 processes for data_parallel_size=2"),
    ],
)
def test_refused_on_all_ranks(tmp_path, way, strategy, said):
    for message in run_ranks(check_refused, tmp_path, way, strategy):
        assert re.search(said, message)


def check_mixed(rank, folder, precision):
    options = {"plugins": [MixedPrecision("16-mixed", "cpu")]} if precision == "16" else {"precision": "bf16-mixed"}
    return trained(folder, PipelineStrategy(), gradient_clip_val=0.5, **options)


@pytest.mark.slow
@pytest.mark.parametrize("precision", [pytest.param("16", marks=pytest.mark.slow), "bf16"])
def test_mixed_precision_follows_one_process(tmp_path, precision):
    options = {"plugins": [MixedPrecision("16-mixed", "cpu")]} if precision == "16" else {"precision": "bf16-mixed"}
    one = trained(tmp_path, gradient_clip_val=0.5, **options)
    for result in run_ranks(check_mixed, tmp_path, precision):
        torch.testing.assert_close(result["seen"], one["seen"], rtol=0, atol=0.02)
    whole, pipeline = load(tmp_path, "one"), load(tmp_path, "pipeline")
    torch.testing.assert_close(pipeline["state_dict"], whole["state_dict"], rtol=0, atol=0.02)
    assert pipeline.get("MixedPrecision") == whole.get("MixedPrecision")


def check_overflow(rank, folder):
    torch.manual_seed(3)
    module = Plain()
    hook = lambda grad: grad * (float("inf") if module.global_step == 2 else 1)  # noqa: E731
    handle = (module.net[0][0] if rank == 0 else nn.Linear(1, 1)).weight.register_hook(hook)
    trained(
        folder, PipelineStrategy(), module, plugins=[MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))]
    )
    handle.remove()
    return module.trainer.precision_plugin.scaler.get_scale()


@pytest.mark.slow
def test_overflow_on_one_stage_skips_the_step_on_all(tmp_path):
    first, second = run_ranks(check_overflow, tmp_path)
    assert first == second == 2**15


def check_overflow_of_other_layouts(rank):
    conv = nn.Conv2d(3, 4, 3, bias=False).to(memory_format=torch.channels_last)
    conv(torch.randn(2, 3, 5, 6).to(memory_format=torch.channels_last)).sum().backward()
    nothing, expected = nn.Parameter(torch.empty(0, 2)), conv.weight.grad.clone()
    nothing.grad = torch.empty(0, 2)
    broadcast_overflow_([nothing, conv.weight], torch.device("cpu"), None)
    torch.testing.assert_close(conv.weight.grad, expected, rtol=0, atol=0)
    if rank == 1:
        conv.weight.grad[2, 1, 0, 1] = float("inf")
    broadcast_overflow_([nothing, conv.weight], torch.device("cpu"), None)
    return int((~conv.weight.grad.isfinite()).sum())


def test_overflow_spreads_to_gradients_in_any_layout():
    assert run_ranks(check_overflow_of_other_layouts) == [1, 2]


def check_average(rank):
    used, unused, wide = (
        nn.Parameter(torch.zeros(3)),
        nn.Parameter(torch.zeros(2)),
        nn.Parameter(torch.zeros(1).double()),
    )
    used.grad, wide.grad = torch.full((3,), 1.0 + rank), torch.full((1,), 4.0 * rank).double()
    if rank:
        unused.grad = torch.tensor([6.0, 8.0])
    average_([used, unused, wide], None, 2)
    return [one.grad.tolist() for one in (used, unused, wide)]


def test_gradients_of_pipelines_are_averaged():
    assert run_ranks(check_average) == [[[1.5] * 3, [3.0, 4.0], [2.0]]] * 2


def check_graphs(rank):
    """Batches of graphs have no shape, so that none may run by the plan of an earlier one."""
    states = []
    keep = LambdaCallback(on_train_end=lambda run, _: states.append(run.strategy.lightning_module_state_dict()))
    any_strategy.fit("graphs", strategy=PipelineStrategy(), devices=2, callbacks=[keep], max_steps=4)
    return states[0]


@pytest.mark.slow
def test_graphs_of_unequal_sizes_train_as_in_one_process():
    expected = any_strategy.fit("graphs", max_steps=4).lightning_module.state_dict()
    actual, _ = run_ranks(check_graphs)
    torch.testing.assert_close(actual, {**expected}, rtol=0, atol=1e-5)


def check_memory(rank, folder):
    module = make("plain")
    trained(folder, PipelineStrategy(), module)
    (optimizer,) = module.trainer.optimizers
    held = [name for name, parameter in module.named_parameters() if not parameter.is_meta]
    return held, len(optimizer.state)


@pytest.mark.slow
def test_a_rank_holds_its_own_layers(tmp_path):
    (first, num_first), (second, num_second) = run_ranks(check_memory, tmp_path)
    names = [name for name, _ in make("plain").named_parameters()]
    assert sorted([*first, *second]) == sorted([*names, "scale"])  # what no layer holds is on both
    assert (num_first, num_second) == (len(first) - 1, len(second) - 1)  # and has no state here, for it has no gradient


def language_model(**options):
    torch.manual_seed(3)
    sizes = {
        "dim": 8,
        "num_layers": 2,
        "attention": {"num_heads": 4, "num_key_value_heads": 2, "separate_documents": True},
        "tie_embeddings": True,
        "experts": Experts(4, hidden_dim=8, balance_weight=0.5),
    }
    return MoELanguageModel(vocab_size=11, **sizes, optimizer=ADAMW, **options)


def check_generation_is_refused(rank, folder):
    with pytest.raises(RuntimeError, match="no generation token by token"):
        make_trainer(folder, PipelineStrategy()).predict(language_model(), tokens())


def test_generation_is_refused(tmp_path):
    run_ranks(check_generation_is_refused, tmp_path)


def check_language_model(rank, folder, options):
    return trained(folder, PipelineStrategy(), language_model(**options), tokens())


@pytest.mark.slow
def test_activation_checkpointing(tmp_path):
    options = {"activation_checkpointing": True}
    trained(tmp_path, module=language_model(**options), data=tokens())
    run_ranks(check_language_model, tmp_path, options)
    whole, pipeline = load(tmp_path, "one"), load(tmp_path, "pipeline")
    torch.testing.assert_close(pipeline["state_dict"], whole["state_dict"], rtol=0, atol=1e-5)


def consumed_twice(x, layers):
    first = layers[0](x)
    return layers[2](layers[1](first)) + first.mean(dim=1, keepdim=True) * first.shape[0]


def three_stages(needed):
    layers, x = [nn.Linear(4, 4) for _ in range(3)], torch.randn(5, 4)
    chain, message = Chain(layers, [1, 1, 1]), None
    for stage in range(3):
        run = StageRun(chain, stage, needed, message, torch.device("cpu"))
        message = run.run(lambda: consumed_twice(x, layers))
    return message, run.needed_here, consumed_twice(x, layers)


def test_what_is_needed_late_is_found_in_the_first_run_and_travels():
    result, needed, expected = three_stages(None)
    torch.testing.assert_close(result, expected)
    assert needed == {(0, 0)}
    result, _, expected = three_stages(needed)
    torch.testing.assert_close(result, expected)


def test_what_went_into_the_next_layer_alone_does_not_travel():
    layers, x = [nn.Linear(4, 4) for _ in range(5)], torch.randn(3, 4)
    chain, needed, lengths = Chain(layers, [2, 2, 1]), None, []
    for _ in range(2):
        message = None
        for stage in range(3):
            run = StageRun(chain, stage, needed, message, torch.device("cpu"))
            message = run.run(lambda: nn.Sequential(*layers)(x))
            lengths += [len(message.flat[0])] if stage < 2 else []
        needed = run.needed_here
    assert needed == set()
    assert lengths == [2 * 12, 4 * 12, 12, 12]  # all in the first run, which finds out


def drawn_like(x, layers):
    first = layers[0](x)
    last = layers[2](layers[1](first))
    torch.rand_like(first)
    return last + torch.rand(5, 4)


def test_draws_in_the_shape_of_what_is_elsewhere_advance_the_generators():
    layers, x = [nn.Linear(4, 4) for _ in range(3)], torch.randn(5, 4)
    chain, needed = Chain(layers, [1, 1, 1]), None
    torch.manual_seed(1)
    expected = drawn_like(x, layers)
    for _ in range(2):  # the second time, what nobody needs does not travel
        message = None
        for stage in range(3):
            torch.manual_seed(1)
            run = StageRun(chain, stage, needed, message, torch.device("cpu"))
            message = run.run(lambda: drawn_like(x, layers))
        torch.testing.assert_close(message, expected)
        needed = run.needed_here if needed is None else needed
    assert needed == {(0, 0)}


def test_what_did_not_travel_is_not_made_up():
    with pytest.raises(RuntimeError, match="needs an output of an earlier layer that it did not need"):
        three_stages(set())


def test_messages_arrive_as_they_left():
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    y = torch.randn(4, requires_grad=True)
    others = [torch.tensor(2**62 + 1), torch.tensor([True, False, True]), torch.randn(3).bfloat16(), torch.empty(0)]
    sent = [others[0], x, others[1], y, *others[2:]]
    parts, flat = pack(sent, torch.device("cpu"))
    assert [(len(one), one.dtype) for one in flat] == [tuple(one) for one in flat_specs(parts)]
    received = [one.detach().requires_grad_() for one in flat]
    _, (a, got_x, b, got_y, *rest) = unpack(parts, received)
    torch.testing.assert_close([a, got_x, b, got_y, *rest], sent, rtol=0, atol=0)
    (got_x.sum() * 2).backward()
    torch.testing.assert_close(received[0].grad, torch.full((6,), 2.0, dtype=torch.float64))
    assert not received[1].grad.any()
    assert not received[2].grad.any()


def test_a_message_of_no_tensors_is_on_the_device_of_the_stage():
    parts, (flat,) = pack([], torch.device("meta"))
    assert (parts, flat.device.type, [(len(flat), flat.dtype)]) == ([], "meta", [tuple(flat_specs([])[0])])


@pytest.mark.gpu
def test_messages_keep_what_is_on_the_cpu_there():
    """Such as lengths, which ``pack_padded_sequence`` takes on the CPU alone."""
    device = torch.device("cuda")
    sent = [torch.randn(3, device=device, requires_grad=True), torch.tensor([2, 3]), torch.randn(2, requires_grad=True)]
    parts, flat = pack(sent, device)
    assert {one.device.type for one in flat} == {"cuda"}
    received = [one.detach().requires_grad_() for one in flat]
    _, tensors = unpack(parts, received)
    assert [one.device for one in tensors] == [one.device for one in sent]
    torch.testing.assert_close(tensors, sent, rtol=0, atol=0)
    (tensors[0].sum() + tensors[2].sum().to(device) * 2).backward()
    assert received[0].grad.tolist() == [1, 1, 1, 2, 2]


def test_stages_are_balanced():
    costs = [3, 1, 4, 1, 5, 9, 2, 6]
    sizes = stage_sizes(costs, 3)
    assert (sum(sizes), len(sizes)) == (8, 3)
    parts = torch.tensor(costs).split(sizes)
    best = min(max(sum(costs[:i]), sum(costs[i:j]), sum(costs[j:])) for i in range(1, 7) for j in range(i + 1, 8))
    assert max(int(part.sum()) for part in parts) == best


@dataclass
class Padded:
    x: Tensor  # (B, T, 6), of another T in each batch
    source: str = "a file"


class Nested(Plain):
    def training_step(self, batch, batch_idx):
        record, named = batch
        return super().training_step((record.x, named[0]), batch_idx)

    def forward(self, x):
        return super().forward(x).mean(dim=1)


def nested_batches():
    draw = torch.Generator().manual_seed(7)
    pairs = [(torch.randn(8, t, 6, generator=draw), torch.randint(3, (8,), generator=draw)) for t in (2, 5, 2, 3, 5)]
    return DataLoader([(Padded(x), defaultdict(list, {0: target})) for x, target in pairs], batch_size=None)


def check_nested(rank, folder):
    torch.manual_seed(3)
    return trained(folder, PipelineStrategy(), Nested(), nested_batches(), limit_val_batches=0)


@pytest.mark.slow
def test_batches_may_be_nested_and_of_other_lengths(tmp_path):
    torch.manual_seed(3)
    one = trained(tmp_path, module=Nested(), data=nested_batches(), limit_val_batches=0)
    assert len(one["seen"]) == 5
    for result in run_ranks(check_nested, tmp_path):
        torch.testing.assert_close(result["seen"], one["seen"], rtol=0, atol=1e-5)


def check_hooks(rank, folder):
    module, calls = Plain(), []
    for number in (0, 3):
        module.net[number].register_forward_hook(lambda *_, number=number: calls.append(number))
    trained(folder, PipelineStrategy(num_micro_batches=4), module, limit_train_batches=3, limit_val_batches=0)
    return calls


@pytest.mark.slow
def test_hooks_of_layers_run_on_the_stage_that_holds_them(tmp_path):
    assert run_ranks(check_hooks, tmp_path) == [[0] * 12, [3] * 12]


def check_two_modules(rank, folder):
    trainer, module = make_trainer(folder, PipelineStrategy()), Plain()
    trainer.fit(module, loader(), loader())
    tested = trainer.validate(module, loader(), verbose=False)
    other = Plain()
    other.load_state_dict(load(folder, "one")["state_dict"])
    return tested, trainer.validate(other, loader(), verbose=False)


@pytest.mark.slow
def test_a_trainer_takes_a_module_again_and_another(tmp_path):
    one = trained(tmp_path)["logged"]
    (first, other), (second, _) = run_ranks(check_two_modules, tmp_path)
    assert first == second
    assert other[0] == pytest.approx({name: one[name] for name in other[0]}, abs=1e-5)


def test_what_is_indivisible_is_not_cut():
    whole = nn.Sequential(DynamicRNN(2, 3, 4), nn.Linear(3, 1))
    assert find_layers(whole, 2) == list(whole)
    with pytest.raises(TypeError, match="ModuleDict does not tell which layers form its pipeline"):
        find_layers(nn.ModuleDict({"rnn": DynamicRNN(2, 3, 4)}), 2)
