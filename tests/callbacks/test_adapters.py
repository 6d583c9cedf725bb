"""Adapters in modules that know nothing of them, of transformers and others, in runs of one process and of several."""

import sys
import warnings
from functools import partial

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_accel import AmpPrecision, Bfloat16Precision, Distillation, ExactResume, Export, Pruning, Quantization
from lightning_accel.callbacks import (
    CompressionReport,
    LowRankAdapters,
    MemorySavings,
    OneShotPruning,
    RestoringEarlyStopping,
    SemiStructuredSparsity,
)
from lightning_accel.callbacks.adapters import _require_whole_experts
from lightning_accel.compress import load_adapted, load_compressed, merge_adapters_
from lightning_accel.compress.adapters import adapter_parameters, frozen_names, has_adapters
from lightning_accel.models import Experts, MoELanguageModel
from lightning_accel.strategies import DataParallelStrategy, FullyShardedStrategy
from tests.ranks import run_ranks
from tests.resumption import StopAfterWriting, StopAt, assert_same_end, ended, newest, run_until_stopped
from tests.tolerance import ADAM_EPS, CLOSE

pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

pytestmark = [
    pytest.mark.usefixtures("eager"),
    pytest.mark.filterwarnings("ignore:.*(directory .* not empty|treespec|ckpt_path)"),
]
BASES = ["float", "nf4"]
ROWS = torch.randn(24, 6, generator=torch.Generator().manual_seed(1))
DATA = TensorDataset(ROWS, ROWS.sum(dim=1).gt(0).long() + ROWS[:, 0].gt(0).long())


class Net(L.LightningModule):
    """Two blocks with dropout, a norm and a head; equal weights in all processes and starts, but for ``seed``."""

    def __init__(self, seed=0, lr=0.02):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.start = nn.Linear(6, 8)
            blocks = (nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Dropout(0.3), nn.Linear(12, 8)) for _ in range(2))
            self.blocks = nn.Sequential(*blocks)
            self.norm = nn.LayerNorm(8)
            self.head = nn.Linear(8, 3)
        self.lr = lr

    def forward(self, x):
        return self.head(self.norm(self.blocks(self.start(x))))

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", F.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr, eps=ADAM_EPS)  # frozen ones among them


class Still(Net):
    """Draws nothing in training, so that one process equals two."""

    def __init__(self, **options):
        super().__init__(**options)
        for block in self.blocks:
            block[2].p = 0


def trainer(*callbacks, **options):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "accelerator": "cpu", "devices": 1, "max_epochs": 2}
    return L.Trainer(**quiet | options, callbacks=list(callbacks))


def loader(batch_size=8, shuffle=False):
    return DataLoader(DATA, batch_size=batch_size, shuffle=shuffle)


def fit(module, *callbacks, ckpt_path=None, batch_size=8, shuffle=False, **options):
    run = trainer(*callbacks, **options)
    run.fit(module, loader(batch_size, shuffle), loader(), ckpt_path=ckpt_path)
    return run


def state(module):
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def random_adapters(module):
    for value in adapter_parameters(module).values():
        nn.init.normal_(value, std=0.3)


@pytest.mark.sampled(default=1)
@pytest.mark.parametrize("base", BASES)
def test_only_adapters_train_and_checkpoints_hold_only_them(tmp_path, base):
    module, keeper, before = Net(), ModelCheckpoint(tmp_path, monitor="val/loss"), state(Net())
    stopping = RestoringEarlyStopping("val/loss", patience=9)
    adapters = partial(LowRankAdapters, train="norm", base=base)
    run = fit(module, adapters(3), keeper, stopping, enable_checkpointing=True)
    trained = {name for name, value in module.named_parameters() if value.requires_grad}
    assert trained == {*adapter_parameters(module), "norm.weight", "norm.bias"}
    assert len(trained) == 2 * 5 + 2, "five layers; the head has none"
    for name, layer in Net().named_modules():
        if isinstance(layer, nn.Linear):
            own = module.get_submodule(name)
            kept = getattr(own, "base_layer", own)
            assert kept.bias.equal(layer.bias)
            assert kept.weight.equal(layer.weight) or (base == "nf4" and kept is not own)
    assert all(value.count_nonzero() for name, value in adapter_parameters(module).items() if ".lora_B." in name)

    saved = torch.load(keeper.best_model_path, weights_only=True)
    assert set(saved["state_dict"]) == trained
    assert len(saved["optimizer_states"][0]["state"]) == len(trained)
    (figures,) = run.test(module, loader(), ckpt_path="best", verbose=False)
    assert figures["val/loss"] == pytest.approx(float(keeper.best_model_score), abs=1e-6)
    path = keeper.best_model_path
    assert trainer(adapters(3)).test(Net(), loader(), ckpt_path=path, verbose=False) == [figures]
    plain = load_adapted(Net().eval(), path)
    torch.testing.assert_close(plain(ROWS), module.eval()(ROWS), **CLOSE)
    assert list(plain.state_dict()) == list(before)
    other = "trained on other frozen weights.*LowRankAdapters"
    with pytest.raises(ValueError, match=other):
        load_adapted(Net(seed=1), path)
    with pytest.raises(ValueError, match=other):
        trainer(adapters(3)).test(Net(seed=1), loader(), ckpt_path=path)
    with pytest.raises(ValueError, match=r"written by LowRankAdapters with .*'rank': 3.*'rank': 4"):
        trainer(adapters(4)).test(Net(), loader(), ckpt_path=path)
    with pytest.raises(ValueError, match=r"has adapters of another LowRankAdapters.*merge_adapters_"):
        fit(module, adapters(4))


@pytest.mark.sampled(slow=2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("base", "format"),
    [
        ("nf4", "pt2"),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in [("float", "pt2"), ("float", "onnx"), ("nf4", "onnx")]),
    ],
)
def test_what_is_exported_is_merged(tmp_path, base, format):
    module, export = Net(), Export(format, tmp_path / f"model.{format}", compare=False)
    report = CompressionReport(compiled=False, seconds=0.01)
    more = [report] if format == "onnx" else []
    fit(module, LowRankAdapters(3, base=base), export, *more, default_root_dir=tmp_path)
    assert has_adapters(module), "it goes on with them"
    adapted, model = module.eval()(ROWS), load_compressed(tmp_path / f"model.{format}")
    assert not torch.allclose(adapted, Net().eval()(ROWS), atol=1e-3)
    torch.testing.assert_close(model(ROWS), adapted.detach(), **CLOSE)
    for one in more:
        assert {row.kind for row in one.report.layers if row.name.startswith("blocks.0.0")} == {"Linear"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("base", BASES)
def test_what_is_quantized_is_merged(tmp_path, base, uncompiled):
    module, quantization = Net(), Quantization(mode="dynamic", backend="onnxruntime", seconds=0.01)
    fit(module, LowRankAdapters(3, base=base), quantization, default_root_dir=tmp_path)
    expected = module.eval()(ROWS)
    error = (quantization.result.run(ROWS) - expected).norm() / expected.norm()
    assert error < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("base", BASES)
def test_averages_and_resumption(tmp_path, base):
    """Averages of what is frozen are what it is, to the bit, and a stopped run ends like one that was not."""

    def run(folder, io, ckpt_path=None):
        callbacks = [LowRankAdapters(3, base=base, dropout=0.2), ExactResume(), EMAWeightAveraging(decay=0.9)]
        keeper = ModelCheckpoint(folder, every_n_train_steps=2, save_last=True, save_top_k=0)
        files = {"enable_checkpointing": True, "plugins": [io], "default_root_dir": folder, "log_every_n_steps": 1}
        logger = L.pytorch.loggers.CSVLogger(folder, version="resumed" if ckpt_path else "first")
        torch.manual_seed(1 if ckpt_path is None else 2)
        return fit(Net(), *callbacks, keeper, shuffle=True, ckpt_path=ckpt_path, logger=logger, **files)

    whole = run(tmp_path / "whole", StopAfterWriting())
    trainer(LowRankAdapters(3, base=base, dropout=0.2)).validate(fresh := Net(), loader(), verbose=False)
    found, frozen = state(whole.lightning_module), frozen_names(fresh)
    assert all(value.equal(found[name]) for name, value in state(fresh).items() if name in frozen)
    assert not any(value.equal(found[name]) for name, value in state(fresh).items() if name not in frozen)
    folder = tmp_path / "stopped"
    run_until_stopped(lambda: run(folder, StopAfterWriting(2)))
    resumed = run(folder, StopAfterWriting(), newest(folder))
    assert_same_end(ended(resumed, folder), ended(whole, tmp_path / "whole"))


# ---- pruned and smaller networks


def llama():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))


class Decoder(L.LightningModule):
    def __init__(self, lr=0.02):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.model = llama()
        self.lr = lr

    def training_step(self, batch, batch_idx):
        loss = self.model(batch[0], labels=batch[0], use_cache=False).loss
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        scores = self.model(batch[0], use_cache=False).logits
        self.log("val/loss", F.cross_entropy(scores[:, :-1].flatten(0, 1), batch[0][:, 1:].flatten()))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


TOKENS = (torch.arange(8) + 3 * torch.arange(12).unsqueeze(1)) % 20


def fit_tokens(module, *callbacks, **options):
    run, rows = trainer(*callbacks, **options), DataLoader(TensorDataset(TOKENS), batch_size=4)
    run.fit(module, rows, rows)
    return float(run.callback_metrics["val/loss"])


@pytest.mark.slow
@pytest.mark.parametrize("base", ["float", pytest.param("nf4", marks=pytest.mark.slow)])
def test_recovery_after_width_is_removed(tmp_path, base):
    """One line adapts the checkpoint of a fit that has removed channels."""
    keeper, last = ModelCheckpoint(tmp_path, save_last=True, save_top_k=0), tmp_path / "last.ckpt"
    removal = Pruning(0.5, structure="width", schedule="one_shot", begin=17)
    narrow = fit_tokens(Decoder(), removal, keeper, max_epochs=6, enable_checkpointing=True)
    rows = DataLoader(TensorDataset(TOKENS), batch_size=4)
    adapters, module = LowRankAdapters(2, train="*norm*", base=base, checkpoint=last), Decoder(lr=0.05)
    (before,) = trainer(adapters).validate(module, rows, verbose=False)
    assert module.model.model.layers[0].self_attn.q_proj.base_layer.in_features == 8
    assert before["val/loss"] == pytest.approx(narrow, rel=1e-5 if base == "float" else 0.05)
    assert fit_tokens(module, adapters, max_epochs=8) < 0.5 * before["val/loss"]


@pytest.mark.slow
def test_the_teacher_is_the_module_before_its_adapters(tmp_path):
    keeper, distillation = ModelCheckpoint(tmp_path, save_last=True, save_top_k=0), Distillation("initial")
    fit(Net(), LowRankAdapters(3), distillation, keeper, enable_checkpointing=True)
    resumed = Distillation("initial")
    run = fit(Net(), LowRankAdapters(3), resumed, max_epochs=3, ckpt_path=tmp_path / "last.ckpt")
    assert run.callback_metrics["train/distillation_loss"] > 0
    for teacher in (distillation._teacher.module, resumed._teacher.module):
        assert all(value.equal(teacher.state_dict()[name]) for name, value in state(Net()).items())


@pytest.mark.slow
@pytest.mark.parametrize("base", ["float", pytest.param("nf4", marks=pytest.mark.slow)])
def test_zeros_of_an_earlier_fit_stay(tmp_path, base):
    keeper = ModelCheckpoint(tmp_path, save_last=True, save_top_k=0)
    fit(Net(), OneShotPruning(0.5), keeper, enable_checkpointing=True)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    module = Net()
    fit(module, LowRankAdapters(3, base=base, checkpoint=tmp_path / "last.ckpt"))
    adapted = module.eval()(ROWS).detach()
    plain = merge_adapters_(module)
    torch.testing.assert_close(plain(ROWS), adapted, **CLOSE)
    for name in ("start.weight", "blocks.1.3.weight"):
        zeros = saved[name].eq(0)
        assert 0.4 < zeros.float().mean() < 0.6
        value = plain.state_dict()[name]
        assert value[zeros].eq(0).all()
        assert not value.equal(saved[name])


# ---- several processes


def whole_state(module):
    """Weights of this process, gathered; layers that a pipeline keeps elsewhere are left out."""
    found = {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in state(module).items()}
    return {name: value.clone() for name, value in found.items() if not value.is_meta}


def check_trained(rank, strategy, base, folder):
    module = Still(seed=rank)  # the first process's weights count
    keeper = ModelCheckpoint(folder, "{step}", every_n_train_steps=3, save_top_k=-1)
    run = trainer(LowRankAdapters(3, base=base), keeper, strategy=strategy, devices=2, enable_checkpointing=True)
    replicas = 1 if strategy == "accel_pipeline" else 2
    sampler = DistributedSampler(DATA, replicas, rank % replicas, shuffle=False)  # Lightning's would shuffle
    rows = DataLoader(DATA, batch_size=8 // replicas, sampler=sampler)
    torch.manual_seed(5)
    run.fit(module, rows, rows)
    split = {name for name, value in module.named_parameters() if isinstance(value, DTensor)}
    assert ("blocks.0.0.base_layer.weight" in split) == (strategy == "accel_fsdp2" and base == "float")
    return whole_state(module)


@pytest.mark.sampled(slow=3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "base"),
    [("accel_ddp", "nf4"), ("accel_fsdp2", "float"), ("accel_fsdp2", "nf4"), ("accel_pipeline", "float"),
     *(pytest.param(*one, marks=pytest.mark.slow) for one in [("accel_ddp", "float"), ("ddp", "nf4")])],
)  # fmt: skip
def test_processes_train_as_one(tmp_path, strategy, base):
    keeper = ModelCheckpoint(tmp_path / "one", "{step}", every_n_train_steps=3, save_top_k=-1)
    torch.manual_seed(5)
    one = fit(Still(), LowRankAdapters(3, base=base), keeper, enable_checkpointing=True)
    expected = state(one.lightning_module)
    parts = run_ranks(check_trained, strategy, base, tmp_path / "two")
    assert {name for part in parts for name in part} == set(expected)
    for part in parts:
        torch.testing.assert_close(part, {name: expected[name] for name in part}, **CLOSE)
    whole, two = (torch.load(tmp_path / kind / "step=6.ckpt", weights_only=True) for kind in ("one", "two"))
    assert whole["state_dict"].keys() == two["state_dict"].keys() == adapter_parameters(one.lightning_module).keys()
    resumed = fit(Still(), LowRankAdapters(3, base=base), max_epochs=2, ckpt_path=tmp_path / "two" / "step=3.ckpt")
    torch.testing.assert_close(state(resumed.lightning_module), expected, **CLOSE)


def check_resumed(rank, folder, base, strategy):
    def run(place, *more, ckpt_path=None):
        keeper = ModelCheckpoint(place, every_n_train_steps=1, save_last=True, save_top_k=0)
        logger = L.pytorch.loggers.CSVLogger(place, version="resumed" if ckpt_path else "first")
        files = {"enable_checkpointing": True, "default_root_dir": place, "log_every_n_steps": 1}
        processes = {"strategy": strategy, "devices": 2, "batch_size": 4, "shuffle": True}
        adapters = LowRankAdapters(3, base=base, dropout=0.2)
        torch.manual_seed(1 if ckpt_path is None else 2)
        return fit(
            Net(), adapters, ExactResume(), *more, keeper, ckpt_path=ckpt_path, logger=logger, **files, **processes
        )

    whole = ended(run(folder / "whole"), folder / "whole")
    run_until_stopped(lambda: run(folder / "stopped", StopAt("on_train_batch_start", 5)))
    resumed = run(folder / "stopped", ckpt_path=newest(folder / "stopped"))
    assert resumed.global_step == 6
    assert_same_end(ended(resumed, folder / "stopped"), whole)


@pytest.mark.sampled(slow=2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "base"),
    [("accel_ddp", "nf4"),
     *(pytest.param("accel_fsdp2", base, marks=pytest.mark.slow) for base in BASES)],
)  # fmt: skip
def test_processes_that_are_stopped_go_on_to_the_bit(tmp_path, strategy, base):
    """Weights, optimizers and every figure logged; tests/test_recovery.py kills such runs."""
    run_ranks(check_resumed, tmp_path, base, strategy)


def check_mixed(rank, strategy):
    warnings.simplefilter("ignore")
    torch.manual_seed(5)
    module, rows = Still(), DataLoader(DATA, batch_size=4, sampler=DistributedSampler(DATA, 2, rank, shuffle=False))
    run = trainer(LowRankAdapters(3, base="nf4"), strategy=strategy, devices=2, precision="bf16-mixed")
    run.fit(module, rows, rows)
    return {name: value for name, value in whole_state(module).items() if ".lora_" in name}


@pytest.mark.slow
def test_four_bits_under_autocast_and_shards():
    sharded, _ = run_ranks(check_mixed, "accel_fsdp2")
    whole, _ = run_ranks(check_mixed, "accel_ddp")
    torch.testing.assert_close(sharded, whole, rtol=0, atol=0.01)  # weights are rounded to bfloat16 when gathered


def check_export(rank, folder, base):
    module, export = Still(), Export("pt2", folder / "model.pt2", compare=False)
    warnings.simplefilter("ignore")
    fit(module, LowRankAdapters(3, base=base), export, strategy="accel_fsdp2", devices=2, default_root_dir=folder)
    return {name: value for name, value in whole_state(module).items() if ".lora_" in name}


@pytest.mark.slow
@pytest.mark.parametrize("base", BASES)
def test_what_is_exported_of_shards_is_merged(tmp_path, base):
    trained, _ = run_ranks(check_export, tmp_path, base)
    module = Still()
    trainer(LowRankAdapters(3, base=base)).validate(module, loader(), verbose=False)
    module.load_state_dict(trained, strict=False)
    torch.testing.assert_close(load_compressed(tmp_path / "model.pt2")(ROWS), module.eval()(ROWS).detach(), **CLOSE)


# ---- precisions, other modules and the command line


PRECISIONS = {
    "bf16-true": {"precision": "bf16-true"},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "64-true": {"precision": "64-true"},
    "AmpPrecision": {"plugins": [AmpPrecision("bf16")]},
    "Bfloat16Precision": {"plugins": [Bfloat16Precision()]},
}


@pytest.mark.sampled(slow=2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "base"),
    [
        pytest.param(precision, base, marks=[pytest.mark.weekly] if (row + column) % 2 else [])
        for row, precision in enumerate(PRECISIONS)
        for column, base in enumerate(BASES)
    ],
)
def test_precisions(tmp_path, base, precision):
    module, export = Still(), Export("pt2", tmp_path / "model.pt2", compare=False)
    fit(module, LowRankAdapters(3, base=base), export, max_epochs=4, default_root_dir=tmp_path, **PRECISIONS[precision])
    before, after = Still().eval(), merge_adapters_(module.float()).eval()
    assert F.cross_entropy(after(ROWS), DATA.tensors[1]) < 0.98 * F.cross_entropy(before(ROWS), DATA.tensors[1])
    file = load_compressed(tmp_path / "model.pt2")
    torch.testing.assert_close(file(ROWS), after(ROWS).detach(), rtol=0.02, atol=0.02)


TEXT = (torch.arange(7) + torch.arange(12).unsqueeze(1)) % 11


def fit_experts(include, rows, **strategy):
    torch.manual_seed(0)
    module = MoELanguageModel(11, dim=16, num_layers=2, attention={"num_heads": 2}, experts=Experts(4, hidden_dim=6))
    trainer(LowRankAdapters(2, include=include), max_epochs=1, **strategy).fit(module, rows)
    return module


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
@pytest.mark.parametrize("strategy", [{}, pytest.param({"strategy": "accel_dp", "devices": 2}, marks=pytest.mark.slow)])
def test_a_mixture_of_experts(strategy):
    rows = DataLoader(TEXT, batch_size=4)
    module = fit_experts(["*.experts"], rows, **strategy)
    trained = [name for name, value in module.named_parameters() if value.requires_grad]
    assert len(trained) == 2 * 2 * 2, "two stacked weights in each of two layers"
    assert all(".experts." in name for name in trained)
    with pytest.raises(TypeError, match=r"adapters of experts need .* 'accel_fsdp2', or leave experts out of include"):
        _require_whole_experts(module, FullyShardedStrategy(expert_parallel_size="all"))
    assert not has_adapters(merge_adapters_(module))
    module = fit_experts(None, rows, **strategy)
    trained = [name for name, value in module.named_parameters() if value.requires_grad]
    assert all(".attention." in name for name in trained)
    assert len(trained) == 2 * 2 * 2
    _require_whole_experts(module, FullyShardedStrategy(expert_parallel_size="all"))


def check_experts(rank, strategy, include):
    warnings.simplefilter("ignore")
    replicas = 1 if strategy == "accel_pipeline" else 2
    sampler = DistributedSampler(TEXT, replicas, rank % replicas, shuffle=False)
    rows = DataLoader(TEXT, batch_size=4 // replicas, sampler=sampler)
    return whole_state(fit_experts(include, rows, strategy=strategy, devices=2))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
@pytest.mark.parametrize(
    ("strategy", "include"),
    [("accel_fsdp2", "*.experts"), ("accel_expert_parallel", None), ("accel_pipeline", "*.experts")],
)
def test_processes_train_experts_as_one(strategy, include):
    expected = state(fit_experts(include, DataLoader(TEXT, batch_size=4)))
    for part in run_ranks(check_experts, strategy, include):
        own = {name: value for name, value in part.items() if ".lora_" in name}
        assert own
        torch.testing.assert_close(own, {name: expected[name] for name in own}, **CLOSE)


def test_recomputed_activations():
    module = Still()
    fit(module, LowRankAdapters(3), MemorySavings(activation_checkpointing=True), max_epochs=1)
    fit(plain := Still(), LowRankAdapters(3), max_epochs=1)
    torch.manual_seed(1)
    assert all(value.count_nonzero() for name, value in adapter_parameters(plain).items() if "lora_B" in name)
    assert all(value.count_nonzero() for name, value in adapter_parameters(module).items() if "lora_B" in name)


class ReentrantBlocks(Net):
    def forward(self, x):
        return self.head(checkpoint(self.blocks, self.start(x), use_reentrant=True))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_adapters_without_gradients_are_refused_in_the_first_step():
    with pytest.raises(ValueError, match=r"no adapter of ReentrantBlocks got a gradient.*use_reentrant=False"):
        fit(ReentrantBlocks(), LowRankAdapters(3, include="blocks", train="head"))


class OwnGroups(Net):
    def __init__(self):
        super().__init__()
        self.groups = [*self.parameters()]

    def configure_optimizers(self):
        return torch.optim.SGD(self.groups, lr=0.1)


class Made(Net):
    def __init__(self):
        L.LightningModule.__init__(self)

    def setup(self, stage):
        Net.__init__(self)


REFUSED = {
    "a copy before": (
        [EMAWeightAveraging(), LowRankAdapters()],
        ValueError,
        "EMAWeightAveraging stands before LowRank",
    ),
    "an export before": (
        [Export(), LowRankAdapters()],
        ValueError,
        "Export stands before LowRankAdapters.*put LowRank",
    ),
    "Pruning": ([LowRankAdapters(), Pruning(0.5)], TypeError, "Pruning changes weights that LowRankAdapters freezes"),
    "one shot": ([LowRankAdapters(), OneShotPruning(0.5)], TypeError, "OneShotPruning changes weights.*earlier fit"),
    "2:4": ([LowRankAdapters(), SemiStructuredSparsity()], TypeError, "SemiStructuredSparsity changes weights"),
    "QAT": ([LowRankAdapters(), Quantization(mode="qat")], TypeError, "Quantization changes weights.*another mode"),
    "a misspelt layer": ([LowRankAdapters(include="q_proj")], ValueError, "include has 'q_proj'.*start, blocks"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_before_training(tmp_path, name):
    callbacks, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        fit(module := Net(), *callbacks, default_root_dir=tmp_path)
    assert state(module).keys() == state(Net()).keys()


def test_modules_that_hide_what_trains_are_refused():
    with pytest.raises(ValueError, match=r"optimizers of OwnGroups leave out start.lora_A.*self.parameters\(\)"):
        fit(OwnGroups(), LowRankAdapters())
    with pytest.raises(ValueError, match=r"Made has no linear layer to adapt.*__init__ or configure_model"):
        fit(Made(), LowRankAdapters())


def test_strategies_that_split_weights_themselves_are_refused():
    for strategy, base in ((ModelParallelStrategy(), "float"), (DataParallelStrategy(), "nf4")):
        with pytest.raises(TypeError, match=f"not work under {type(strategy).__name__}.*'accel_fsdp2'"):
            LowRankAdapters(base=base)._require_strategy(strategy)


def test_a_checkpoint_of_a_run_without_adapters(tmp_path):
    fit(Net(), ModelCheckpoint(tmp_path, save_last=True, save_top_k=0), enable_checkpointing=True)
    with pytest.raises(ValueError, match=r"by a run without adapters.*LowRankAdapters\(checkpoint="):
        fit(Net(), LowRankAdapters(), ckpt_path=tmp_path / "last.ckpt")


@pytest.mark.parametrize("package", ["peft", "bitsandbytes"])
def test_a_missing_package_is_named_with_its_extra(monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError, match=rf'{package} is needed.*"lightning_accel\[adapters\]"'):
        fit(Net(), LowRankAdapters(base="nf4"))


@pytest.mark.slow
def test_one_line_of_a_config(command, run_folder):
    options = "--model Classifier --data DigitsDataModule --model.optimizer=SGD --model.optimizer.lr 0.1"
    quiet = "--trainer.max_steps 2 --trainer.limit_val_batches 1 --trainer.accelerator cpu --run_report false"
    callback = '{"class_path": "LowRankAdapters", "init_args": {"rank": 2, "base": "nf4", "train": ["*.bias"]}}'
    found = command("fit", *options.split(), *quiet.split(), "--trainer.callbacks+", callback)
    assert found.status == 0, found.err
    (path,) = run_folder.rglob("*.ckpt")
    names = torch.load(path, weights_only=True)["state_dict"]
    assert any(".lora_B." in name for name in names)
    assert not any(name.endswith("base_layer.weight") for name in names)
    config = next(run_folder.rglob("config_fit.yaml"))
    tested = command("test", "--config", config, "--ckpt_path", "best")
    assert tested.status == 0, tested.err
