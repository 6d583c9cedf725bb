"""Training with 2:4 sparse weights. On CPUs a function without torchao's kernel chooses what is kept."""

import copy
import itertools
from types import SimpleNamespace

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_accel.callbacks import ExactResume, Pruning, Quantization, RestoringEarlyStopping, SemiStructuredSparsity
from lightning_accel.callbacks.pruning import semi_structured
from lightning_accel.strategies import FullyShardedStrategy

RATE = 0.1
SPARSE = ["net.0", "net.2"]


class Net(L.LightningModule):
    """Two layers that can be sparse, and a head."""

    def __init__(self):
        super().__init__()
        self.net = nn.ModuleDict({"0": nn.Linear(8, 16), "2": nn.Linear(16, 12, bias=False), "head": nn.Linear(12, 4)})
        self.losses = []
        self.momentum = 0.9

    def forward(self, x):
        return self.net["head"](torch.tanh(self.net["2"](torch.tanh(self.net["0"](x)))))

    def training_step(self, batch, _):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, _):
        self.log("loss", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=RATE, momentum=self.momentum)


def batches():
    x = torch.randn(40, 8, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x[:, :4].argmax(dim=1)), 8)


def fit(model, *callbacks, ckpt_path=None, **options):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    defaults = {"max_epochs": 2, "precision": "bf16-mixed", "enable_checkpointing": False}
    trainer = L.Trainer(callbacks=list(callbacks), **(quiet | defaults | options))
    trainer.fit(model, batches(), ckpt_path=ckpt_path)
    return trainer


def net():
    torch.manual_seed(0)
    return Net()


def keep(weight):
    """Return the two largest of four consecutive inputs, and zeros."""
    groups = weight.detach().reshape(-1, 4)
    kept = torch.zeros_like(groups).scatter_(1, groups.abs().topk(2).indices, 1)
    return weight.detach() * kept.view_as(weight)


class Keep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        return keep(weight)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


@pytest.fixture
def kernel(monkeypatch):
    use_no_kernel(monkeypatch)


def use_no_kernel(monkeypatch, multiple=4):
    """Have layers take part whose sizes are multiples of a number, on a CPU."""
    monkeypatch.setattr(semi_structured, "sparsify", Keep.apply)
    monkeypatch.setattr(semi_structured, "why_not_semi_structured", lambda device: "")
    monkeypatch.setattr(semi_structured, "_MULTIPLE", multiple)


def is_sparse(weight):
    return bool(((weight.view(-1, 4) != 0).sum(1) <= 2).all())


def test_trains_as_a_loop_with_dense_weights_beside_it_does(kernel):
    model, expected = net(), net()
    fit(model, SemiStructuredSparsity())
    weights, moments, losses = dict(expected.named_parameters()), {}, []
    for _ in range(2):
        for x, target in batches():
            used = {}
            for name, weight in weights.items():
                value = keep(weight.bfloat16()) if name.removesuffix(".weight") in SPARSE else weight.bfloat16()
                used[name] = value.detach().requires_grad_()
            hidden = torch.tanh(F.linear(x.bfloat16(), used["net.0.weight"], used["net.0.bias"]))
            hidden = torch.tanh(F.linear(hidden, used["net.2.weight"]))
            logits = F.linear(hidden, used["net.head.weight"], used["net.head.bias"])
            loss = F.cross_entropy(logits.float(), target)
            loss.backward()
            losses.append(loss.item())
            with torch.no_grad():
                for name, weight in weights.items():
                    moments[name] = 0.9 * moments.get(name, 0) + used[name].grad.float()
                    weight -= RATE * moments[name]
    torch.testing.assert_close(model.losses, losses)
    for name, weight in weights.items():
        end = weight * (keep(weight.bfloat16()) != 0) if name.removesuffix(".weight") in SPARSE else weight
        torch.testing.assert_close(model.state_dict()[name], end.detach())


class Watch(L.Callback):
    """Save both kinds of checkpoints after a step, with what the module returns."""

    def __init__(self, folder, step=3):
        self.folder, self.step = folder, step

    def on_train_batch_end(self, trainer, module, *_):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.folder / "weights.ckpt", weights_only=True)
            trainer.save_checkpoint(self.folder / "whole.ckpt")
            self.copied = copy.deepcopy(module).state_dict()
            self.live = module.state_dict(keep_vars=True)["net.0.weight"] is module.net["0"].weight
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                self.output = module(batches().dataset.tensors[0])


@pytest.mark.parametrize("kind", ["weights", "whole"])
def test_other_programs_load_the_weights_that_were_used(kernel, tmp_path, kind):
    watch = Watch(tmp_path)
    fit(net(), watch, SemiStructuredSparsity())
    model, state = Net(), torch.load(tmp_path / f"{kind}.ckpt", weights_only=True)["state_dict"]
    model.load_state_dict(state)
    assert [is_sparse(state[f"{name}.weight"]) for name in SPARSE] == [True, True]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(batches().dataset.tensors[0]), watch.output)
    assert watch.live
    assert all(torch.equal(value, watch.copied[name]) for name, value in state.items())


def test_layers_are_plain_after_the_fit(kernel):
    model = net()
    fit(model, SemiStructuredSparsity())
    for name in SPARSE:
        layer = model.get_submodule(name)
        assert type(layer) is nn.Linear
        assert is_sparse(layer.weight)
        assert model.state_dict()[f"{name}.weight"].data_ptr() == layer.weight.data_ptr()
    assert not is_sparse(model.net["head"].weight)


@pytest.mark.sampled(default=2)
@pytest.mark.parametrize("saved", ["between steps", "after the fit", "not at all"])
def test_a_run_that_goes_on_has_the_bits_of_one_that_was_not_interrupted(kernel, tmp_path, saved):
    expected, model, resumed = net(), net(), Net()
    expected.momentum = model.momentum = 0.9 if saved != "not at all" else 0.0  # another fit has another optimizer
    fit(expected, SemiStructuredSparsity())
    trainer = fit(model, SemiStructuredSparsity(), ExactResume(), Watch(tmp_path), max_epochs=1)
    if saved == "not at all":
        resumed, trainer.fit_loop.max_epochs = model, 2
        trainer.fit(model, batches())
    else:
        trainer.save_checkpoint(tmp_path / "end.ckpt")
        path = tmp_path / ("end.ckpt" if saved == "after the fit" else "whole.ckpt")
        fit(resumed, SemiStructuredSparsity(), ExactResume(), ckpt_path=path)
    assert resumed.losses == expected.losses[-len(resumed.losses) :]
    assert all(torch.equal(value, expected.state_dict()[name]) for name, value in resumed.state_dict().items())


def test_a_callback_starts_anew_with_another_module(kernel):
    sparsity, model, expected = SemiStructuredSparsity(), net(), net()
    fit(Net(), sparsity)
    for one, callback in (model, sparsity), (expected, SemiStructuredSparsity()):
        nn.init.zeros_(one.net["2"].weight)  # where dropped values could come back
        fit(one, callback)
    assert model.losses == expected.losses


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_layers_are_plain_after_an_error_and_the_checkpoint_goes_on(kernel, tmp_path):
    class Stops(Net):
        def training_step(self, batch, number):
            if len(self.losses) == 3 and not self.stopped:
                self.stopped = True
                raise RuntimeError("stop")
            return super().training_step(batch, number)

    expected, model = net(), net()
    model.__class__, model.stopped = Stops, False
    keeper = ModelCheckpoint(tmp_path, save_last=True, every_n_train_steps=1, save_on_exception=True)
    with pytest.raises(RuntimeError, match="stop"):
        fit(model, SemiStructuredSparsity(), ExactResume(), keeper, enable_checkpointing=True)
    assert [type(model.get_submodule(name)) for name in SPARSE] == [nn.Linear, nn.Linear]
    fit(expected, SemiStructuredSparsity())
    paths = sorted(tmp_path.glob("*.ckpt"))
    assert len(paths) == 2
    for path in paths:
        resumed = Net()
        fit(resumed, SemiStructuredSparsity(), ExactResume(), ckpt_path=path)
        assert resumed.losses == expected.losses[-len(resumed.losses) :], path


def test_the_best_weights_come_back(kernel):
    model = net()
    stopping = RestoringEarlyStopping("loss", patience=9)
    trainer = L.Trainer(
        max_epochs=2, callbacks=[stopping, SemiStructuredSparsity()], accelerator="cpu", precision="bf16-mixed",
        logger=False, enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, batches(), batches())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(model(batches().dataset.tensors[0]), batches().dataset.tensors[1])
    torch.testing.assert_close(loss.item(), trainer.callback_metrics["loss"].item(), rtol=1e-3, atol=0)
    assert is_sparse(model.net["0"].weight)


def test_layers_with_weights_of_their_own_that_train_take_part(kernel):
    class Subclass(nn.Linear):
        pass

    model = nn.ModuleDict({
        "wide": nn.Linear(8, 4), "narrow": nn.Linear(8, 6), "subclass": Subclass(8, 4), "frozen": nn.Linear(4, 4),
        "one": nn.Linear(4, 8), "same": nn.Linear(4, 8), "lm_head": nn.Linear(8, 8),
    })  # fmt: skip
    model["frozen"].requires_grad_(False)
    model["same"].weight = model["one"].weight
    found = semi_structured.find_sparsifiable
    assert [name for name, _ in found(model)] == ["wide"]
    assert [name for name, _ in found(model, [])] == ["wide", "lm_head"]
    assert [name for name, _ in found(model, ["wide"])] == ["lm_head"]
    assert semi_structured.why_not_sparsifiable(model, torch.device("cpu")) == ""
    assert "multiples of 4" in semi_structured.why_not_sparsifiable(nn.Linear(3, 4), torch.device("cpu"))


@pytest.mark.parametrize(
    ("callbacks", "options", "message"),
    [
        ([], {"precision": "32-true"}, "16 bits, bf16-mixed or .*; got precision='32-true'"),
        ([Pruning(0.5)], {}, "SemiStructuredSparsity and Pruning would each"),
        ([Quantization(mode="qat")], {}, "SemiStructuredSparsity and Quantization would each"),
        ([EMAWeightAveraging()], {}, "SemiStructuredSparsity and WeightAveraging would each"),
    ],
)
def test_what_cannot_work_is_refused_before_training(kernel, callbacks, options, message):
    model = net()
    with pytest.raises(ValueError, match=message):
        fit(model, SemiStructuredSparsity(), *callbacks, **options)
    assert not model.losses


def test_sharded_weights_are_refused(kernel):
    class Sharded(FullyShardedStrategy):
        root_device = torch.device("cpu")

    trainer = SimpleNamespace(strategy=object.__new__(Sharded))
    with pytest.raises(TypeError, match=r"a single device or DDP.*; got Sharded"):
        SemiStructuredSparsity().on_fit_start(trainer, net())


def test_exclude_names_something_and_leaves_something(kernel):
    with pytest.raises(ValueError, match="exclude has 'heads', which is no parameter, submodule or class in Net"):
        fit(net(), SemiStructuredSparsity("heads"))
    with pytest.raises(ValueError, match=r"no trained nn.Linear .* multiples of 4.*exclude=\['net'\]"):
        fit(net(), SemiStructuredSparsity("net"))


def test_devices_without_kernels_are_refused(monkeypatch):
    model = net()
    with pytest.raises(
        ValueError, match=r"8.0 or more; got a cpu device, .* no kernels.* use Pruning\(structure='2:4'\)"
    ):
        fit(model, SemiStructuredSparsity())
    assert not model.losses
    why_not, card = semi_structured.why_not_semi_structured, torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Card")
    assert why_not(card).endswith("got Card, which has 7.5")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    failures = dict.fromkeys(semi_structured.KERNELS, "return wrong products")
    monkeypatch.setattr(semi_structured, "failure_of_kernels", lambda device, name: failures[name])
    found = why_not(card)
    assert "kernels that work on Card; those of cuSPARSELt return wrong products; those of" in found
    failures["CUTLASS"] = ""
    assert why_not(card) == found  # they are tried once
    semi_structured.find_kernels.cache_clear()
    assert why_not(card) == ""
    assert semi_structured.find_kernels(card) == ("CUTLASS", "")
    semi_structured.find_kernels.cache_clear()


def keep_in_tiles(weight):
    """Return the largest of each 4 x 4, at most two in a row or a column of it."""
    kept = torch.zeros_like(weight)
    for i, j in itertools.product(range(0, weight.shape[0], 4), range(0, weight.shape[1], 4)):
        tile, rows, columns = weight[i : i + 4, j : j + 4].detach().abs().flatten(), [0] * 4, [0] * 4
        for place in tile.argsort(descending=True).tolist():
            row, column = divmod(place, 4)
            if rows[row] < 2 and columns[column] < 2:
                rows[row], columns[column] = rows[row] + 1, columns[column] + 1
                kept[i + row, j + column] = weight[i + row, j + column]
    return kept


@pytest.mark.slow
def test_kernels_are_tried_on_a_small_weight(monkeypatch):
    class Linear(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(weight)
            return wrong.get("forward", 1.0) * (x @ weight.T)

        @staticmethod
        def backward(ctx, gradient):
            return wrong.get("backward", 1.0) * (gradient @ ctx.saved_tensors[0]), None

    wrong, weights = {}, {}

    def sparsify(weight, kernels):
        return weights.setdefault("kept", keep_in_tiles(weight)) if "kept" not in wrong else wrong["kept"](weight)

    monkeypatch.setattr(semi_structured, "sparsify", sparsify)
    monkeypatch.setattr(semi_structured.F, "linear", Linear.apply)
    find = lambda: semi_structured.failure_of_kernels(torch.device("cpu"), "CUTLASS")  # noqa: E731
    assert find() == ""
    for side in ("forward", "backward"):
        wrong[side] = 1.5
        assert find() == "return wrong products"
        del wrong[side]
    wrong["kept"] = keep  # in rows alone
    assert find() == "keep other values than two of four"
    wrong["kept"] = lambda weight: weights["kept"].roll(4, 1)
    assert find() == "keep other values than two of four"

    def fail(weight):
        raise RuntimeError("CUDA error: architecture mismatch when calling `cusparseLtInit(&handle)`")

    wrong["kept"] = fail
    assert find().startswith("fail: RuntimeError: CUDA error: architecture mismatch")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernel_multiplies_by_the_kept_weights(dtype):
    if reason := semi_structured.why_not_semi_structured(torch.device("cuda")):
        pytest.skip(reason)
    layer = semi_structured.make_semi_sparse(nn.Linear(256, 384, device="cuda"), dtype)
    kept = layer.kept_weight()
    tiles = (kept != 0).view(96, 4, 64, 4)
    assert tiles.sum(1).max() <= 2
    assert tiles.sum(3).max() <= 2
    assert (kept != 0).float().mean() > 0.4  # a tile without a choice left has fewer than eight
    torch.testing.assert_close(kept + layer.dropped_weight(), layer.weight.detach(), rtol=0, atol=0)
    x = torch.randn(5, 7, 256, device="cuda", dtype=dtype, requires_grad=True)
    gradient = torch.randn(5, 7, 384, device="cuda", dtype=dtype)
    layer(x).backward(gradient)
    actual = x.grad, layer.weight.grad, layer.bias.grad
    x.grad = None
    dense = nn.Linear(256, 384, device="cuda", dtype=dtype)
    with torch.no_grad():
        dense.weight.copy_(kept)
        dense.bias.copy_(layer.bias)
    torch.testing.assert_close(layer(x), dense(x), rtol=2e-2, atol=2e-2)
    dense(x).backward(gradient)
    for one, other in zip(actual, (x.grad, dense.weight.grad, dense.bias.grad), strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=2e-2, atol=5e-2)
    semi_structured.make_dense(layer)
    assert torch.equal(layer.weight, kept)


@pytest.mark.gpu
def test_trains_on_a_gpu():
    if reason := semi_structured.why_not_semi_structured(torch.device("cuda")):
        pytest.skip(reason)

    class Wide(Net):
        def __init__(self):
            super().__init__()
            self.net = nn.ModuleDict({"0": nn.Linear(8, 256), "2": nn.Linear(256, 256), "head": nn.Linear(256, 4)})

    model = Wide()
    fit(model, SemiStructuredSparsity(), accelerator="cuda", max_epochs=20)
    assert sum(model.losses[-5:]) < 0.7 * sum(model.losses[:5])
    assert is_sparse(model.net["2"].weight)
