"""Training for int8 beside other options of the Trainer."""

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.nn.functional import cross_entropy, linear
from torch.utils.data import DataLoader

from lightning_accel import AmpPrecision
from lightning_accel.callbacks import ExactResume, Quantization
from lightning_accel.compress.quantization.fake_quant import DECAY
from lightning_accel.compress.quantization.layers import round_input, round_weight
from tests.callbacks.deployment.test_quantization import ROWS, Convert
from tests.ranks import run_ranks


class Net(L.LightningModule):
    """Knows nothing of us, and can be compiled."""

    def __init__(self, norm=True):
        super().__init__()
        torch.manual_seed(3)
        norm = nn.BatchNorm1d(16) if norm else nn.Identity()
        self.net = nn.Sequential(nn.Linear(6, 16), norm, nn.ReLU(), nn.Linear(16, 3))

    def training_step(self, batch, batch_idx):
        return cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", cross_entropy(self.net(batch[0]), batch[1]), batch_size=len(batch[0]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.5)


@pytest.fixture
def converted(monkeypatch):
    found = Convert()
    found.figures = None
    monkeypatch.setattr("lightning_accel.callbacks.deployment.quantization.quantize", found)
    return found


def fit(module, callbacks, folder, max_epochs=2, ckpt_path=None, shuffle=False, batch_size=8, **options):
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=max_epochs, logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=callbacks, default_root_dir=folder,
        enable_checkpointing=any(isinstance(one, ModelCheckpoint) for one in callbacks), **options,
    )  # fmt: skip
    loader = DataLoader(ROWS, batch_size, shuffle=shuffle)
    trainer.fit(module, loader, DataLoader(ROWS, 16), ckpt_path=ckpt_path)
    return trainer


def weights(module):
    return {name.replace("_orig_mod.", ""): value.detach().clone() for name, value in module.state_dict().items()}


def by_hand(steps_from, num_batches, accumulate=1, clip=None, dtype=None):
    """Weights, and ranges of both layers: a loop over the rows in their order."""
    module = Net(norm=False)
    layers, ranges = [module.net[0], module.net[3]], [None, None]
    optimizer = module.configure_optimizers()
    batches = [batch for _ in range(4) for batch in DataLoader(ROWS, 8)][:num_batches]
    for number, (x, target) in enumerate(batches):
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            for index, layer in enumerate(layers):
                if number // accumulate >= steps_from:
                    low, high = x.min().item(), x.max().item()
                    old = ranges[index] or (low, high)
                    rounded = round_input(x, *torch.tensor(old))
                    ranges[index] = tuple(
                        DECAY * before + (1 - DECAY) * now for before, now in zip(old, (low, high), strict=True)
                    )
                    out = linear(rounded, round_weight(layer.weight), layer.bias)
                else:
                    out = layer(x)
                x = out.relu() if index == 0 else out
            (cross_entropy(x, target) / accumulate).backward()
        if (number + 1) % accumulate == 0:
            if clip is not None:
                nn.utils.clip_grad_norm_(module.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return weights(module), ranges


@pytest.mark.sampled(default=2)
@pytest.mark.parametrize(
    ("options", "same"),
    [({}, {}), ({"accumulate_grad_batches": 3}, {"accumulate": 3}), ({"gradient_clip_val": 0.1}, {"clip": 0.1}),
     ({"precision": "bf16-mixed"}, {"dtype": torch.bfloat16}),
     ({"plugins": [AmpPrecision("bf16")]}, {"dtype": torch.bfloat16}),
     ({"accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "plugins": [AmpPrecision("bf16")]},
      {"accumulate": 2, "clip": 0.1, "dtype": torch.bfloat16})],
)  # fmt: skip
def test_training_is_that_of_a_loop(tmp_path, converted, options, same):
    """Whose int8 begins in the middle of the run, counted in steps of the optimizer."""
    module, quantization = Net(norm=False), Quantization("qat", begin=0.5)
    fit(module, [quantization], tmp_path, **options)
    expected, ranges = by_hand(6 // same.get("accumulate", 1), 12, **same)
    torch.testing.assert_close(weights(module), expected, rtol=1e-5, atol=1e-5)
    for layer, both in zip(quantization._training.layers.values(), ranges, strict=True):
        assert layer.range.tolist() == pytest.approx(both, rel=1e-5)
    unrounded, _ = by_hand(99, 12, **same)
    assert not torch.allclose(weights(module)["net.3.weight"], unrounded["net.3.weight"], rtol=1e-4)


def test_steps_that_fp16_skips_leave_ranges_finite(tmp_path, converted):
    module, quantization = Net(), Quantization("qat", begin=0)
    trainer = fit(module, [quantization], tmp_path, plugins=[AmpPrecision("fp16", init_scale=2.0**22)], max_epochs=4)
    assert trainer.precision_plugin.skipped_steps > 0
    assert all(layer.range.isfinite().all() for layer in quantization._training.layers.values())
    assert all(value.isfinite().all() for value in module.state_dict().values())


COMPILED = {
    "a submodule": lambda module: setattr(module, "net", torch.compile(module.net, backend="aot_eager")),
    "a layer": lambda module: module.net.__setitem__(0, torch.compile(module.net[0], backend="aot_eager")),
    "in place": lambda module: module.net.compile(backend="eager"),
    "all": lambda module: torch.compile(module, backend="eager"),
}


@pytest.mark.sampled(slow=2)
@pytest.mark.slow
@pytest.mark.parametrize("what", ["all", "a submodule", "a layer", "in place"])
@pytest.mark.filterwarnings("ignore::UserWarning:torch")  # of Dynamo, which Lightning's steps are broken up by
def test_compiled_modules_train_and_convert_as_eager_ones(tmp_path, converted, what):
    found = []
    for change in (COMPILED[what], lambda module: None):
        torch._dynamo.reset()
        module, quantization = Net(), Quantization("qat", begin=0.5, exclude=["net.0"], module="net")
        compiled = change(module)
        fit(module if compiled is None else compiled, [quantization], tmp_path)
        (converted_module, _, _, options) = converted.calls[-1]
        found.append((weights(module), options["ranges"], converted.figures))
        assert type(converted_module) is nn.Sequential  # eager, whose figures are compared with those of compiled forms
        assert list(converted_module.state_dict()) == list(Net().net.state_dict())
        assert options["exclude"] == ["0"]
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)
    assert list(found[0][1]) == ["3"]


class SaveAt(L.Callback):
    def __init__(self, folder, step):
        self.folder, self.step = folder, step

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.step and not (self.folder / "kept.ckpt").exists():
            trainer.save_checkpoint(self.folder / "kept.ckpt")


def keeper(folder, step):
    return ModelCheckpoint(folder, "kept", every_n_train_steps=step, save_top_k=-1)


@pytest.mark.sampled(default=1, slow=4)
@pytest.mark.parametrize(
    ("saver", "step"),  # of 6 an epoch: before int8 begins, and in it
    [(keeper, 8), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((keeper, 2), (SaveAt, 8), (SaveAt, 4)))],
)
@pytest.mark.parametrize("options", [{}, {"precision": "bf16-mixed", "accumulate_grad_batches": 2, "max_epochs": 4}])
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks:UserWarning")
def test_a_run_killed_within_an_epoch_goes_on_bit_equally(tmp_path, converted, saver, step, options):
    folder = tmp_path / "kept"

    class Kill(L.Callback):
        def on_train_batch_start(self, trainer, *_):
            if (folder / "kept.ckpt").exists():
                raise KeyboardInterrupt

    def run(more, **resume):
        torch.manual_seed(0 if not resume else 5)
        module, quantization = Net(), Quantization("qat", begin=0.3)
        module.net.insert(3, nn.Dropout(0.2))
        fit(
            module,
            [*more, quantization, ExactResume()],
            tmp_path,
            shuffle=True,
            **{"max_epochs": 2} | options,
            **resume,
        )
        return weights(module), converted.calls[-1][3]["ranges"]

    whole = run([])
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        run([saver(folder, step), Kill()])
    resumed = run([], ckpt_path=folder / "kept.ckpt")
    assert resumed[1] == whole[1]
    torch.testing.assert_close(resumed[0], whole[0], rtol=0, atol=0)


def check_processes_agree(rank, folder, name):
    import lightning_accel.callbacks.deployment.quantization as own

    module, kept, own.quantize = Net(norm=False), own.quantize, Convert()
    own.quantize.figures = None
    try:
        quantization = Quantization("qat", begin=0.3)
        options = OPTIONS_OF_RANKS[name]
        fit(module, [quantization], folder, batch_size=4, devices=2, strategy="ddp", **options)
    finally:
        own.quantize = kept
    return weights(module), {name: layer.range.tolist() for name, layer in quantization._training.layers.items()}


OPTIONS_OF_RANKS = {
    "accumulation": {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5},
    "bf16": {"plugins": [AmpPrecision("bf16")]},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS_OF_RANKS)
def test_processes_have_the_same_weights_and_ranges(tmp_path, name):
    first, second = run_ranks(check_processes_agree, tmp_path, name)
    assert first[1] == second[1]
    torch.testing.assert_close(first[0], second[0], rtol=0, atol=0)


def test_layers_outside_of_what_is_deployed_stay_as_they_were(tmp_path, converted):
    class Two(Net):
        def __init__(self):
            super().__init__()
            self.network = nn.Linear(3, 3)

        def training_step(self, batch, batch_idx):
            return cross_entropy(self.network(self.net(batch[0])), batch[1])

    quantization = Quantization("qat", begin=0, module="net")
    fit(Two(), [quantization], tmp_path, max_epochs=1)
    assert list(quantization._training.layers) == ["net.0", "net.3"]


def test_early_stopping_that_does_not_wait_for_the_rounding_is_warned_of(converted, tmp_path):
    with pytest.warns(UserWarning, match=r"may end the run before Quantization\(mode='qat'\) begins to round weights"):
        fit(Net(), [Quantization("qat"), EarlyStopping("val/loss")], tmp_path)
