"""Settings of a run that make it faster, on modules and loaders that know nothing of them."""

import functools
import logging
import warnings

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader as GraphLoader
from torch_geometric.nn import GINConv, GPSConv, SAGEConv, global_add_pool

from lightning_accel._private.torch import compiled_call, dataset_of, plain_call, set_compiled_call
from lightning_accel.callbacks import ExactResume, Pruning, Speedups, speedups
from lightning_accel.callbacks.speedups import called_children
from lightning_accel.ops import attention, matmul
from lightning_accel.ops.matmul import multiplies_by_onednn, why_no_onednn_matmul
from lightning_accel.ops.native import KERNELS

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(does not have many workers|number of training batches|treespec|defined in the `Stream`|.grad attribute)"
)


class Net(L.LightningModule):
    """Record the settings that its steps meet."""

    def __init__(self):
        super().__init__()
        blocks = [nn.Sequential(nn.Conv2d(channels, 4, 3), nn.ReLU()) for channels in (3, 4)]
        self.features = nn.Sequential(*blocks)
        self.heads = nn.ModuleList([nn.Linear(4, 2)])
        self.losses, self.seen, self.met = [], [], {}

    def training_step(self, batch, batch_idx):
        x, y = batch
        features = self.features(x)
        loss = F.cross_entropy(self.heads[0](features.mean((2, 3))), y)
        self.losses.append(loss.item())
        self.seen += x[:, 0, 0, 0].tolist()
        self.met = {
            "threads": torch.get_num_threads(),
            "matmul_precision": torch.get_float32_matmul_precision(),
            "channels_last": features.is_contiguous(memory_format=torch.channels_last),
            "fused": self.optimizers().param_groups[0]["fused"],
            "workers": self.trainer.train_dataloader.num_workers,
            "flash": torch.backends.cuda.flash_sdp_enabled(),  # on the CPU, too
            "onednn": multiplies_by_onednn(),
            "persistent": self.trainer.train_dataloader.persistent_workers,
        }
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def samples(n=12):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, 3, 6, 6, generator=generator), torch.arange(n) % 2


def fit(loader=None, callbacks=(), checkpoint=None, kind=Net, **speedups):
    L.seed_everything(1, verbose=False)
    module = kind()
    if loader is None:
        loader = DataLoader(TensorDataset(*samples()), batch_size=4, shuffle=True)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet["enable_checkpointing"] = any(isinstance(one, ModelCheckpoint) for one in callbacks)
    callbacks = callbacks or [Speedups(**speedups)]
    trainer = L.Trainer(max_epochs=2, accelerator="cpu", callbacks=list(callbacks), **quiet)
    trainer.fit(module, loader, ckpt_path=checkpoint)
    return module


def test_settings_reach_the_steps_and_end_with_the_run():
    plain = fit()
    assert plain.met["threads"] == 1
    module = fit(
        threads=2, matmul_precision="high", channels_last=True, fused_optimizer=True, keep_freed_memory=True,
        attention="math",
    )  # fmt: skip
    assert module.met["threads"] == 2
    assert module.met["matmul_precision"] == "high"
    assert module.met["fused"]
    assert not module.met["flash"]
    assert plain.met["flash"]
    assert torch.backends.cuda.flash_sdp_enabled()
    assert module.met["channels_last"]
    assert not plain.met["channels_last"]
    assert torch.get_num_threads() == 1
    assert torch.get_float32_matmul_precision() == "highest"
    torch.testing.assert_close(torch.tensor(module.losses), torch.tensor(plain.losses), rtol=1e-5, atol=1e-6)


class Served(Net):
    """Record the settings that one sample meets after training."""

    def validation_step(self, batch, batch_idx):
        features = self.features(batch[0])
        self.met = {
            "threads": torch.get_num_threads(),
            "matmul_precision": torch.get_float32_matmul_precision(),
            "channels_last": features.is_contiguous(memory_format=torch.channels_last),
            "flash": torch.backends.cuda.flash_sdp_enabled(),
            "compiled": [compiled_call(block) for block in self.features],
        }
        return features

    test_step = predict_step = validation_step


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_settings_reach_what_follows_training(stage, monkeypatch):
    """Without a fit before, and what is compiled is not compiled by the next run again."""
    kept = []
    monkeypatch.setattr(speedups, "keep_freed_memory", lambda: kept.append(True))
    wrap = functools.partial
    monkeypatch.setattr(nn.Module, "compile", lambda self, **_: set_compiled_call(self, wrap(plain_call(self))))
    settings = {"channels_last": True, "attention": "math", "compile": "blocks", "keep_freed_memory": True}
    callback = Speedups(threads=2, matmul_precision="medium", **settings)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = L.Trainer(accelerator="cpu", callbacks=[callback], **quiet)
    module, loader = Served(), DataLoader(TensorDataset(*samples()), batch_size=4)
    run = getattr(trainer, stage)
    run(module, loader)
    compiled = module.met.pop("compiled")
    assert module.met == {"threads": 2, "matmul_precision": "medium", "channels_last": True, "flash": False}
    assert None not in compiled
    run(module, loader)
    assert module.met["compiled"] == compiled
    assert len(kept) == 2
    assert (torch.get_num_threads(), torch.get_float32_matmul_precision()) == (1, "highest")
    assert torch.backends.cuda.flash_sdp_enabled()


@pytest.mark.slow
def test_workers_load_each_item_once_an_epoch():
    plain, module = fit(), fit(num_workers=2)
    assert module.met["workers"] == 2
    assert module.met["persistent"]
    assert module.losses[:3] == plain.losses[:3]
    assert sorted(module.seen[12:]) == sorted(plain.seen[12:])  # in an order that workers that stay draw otherwise


def test_workers_can_be_taken_away_or_load_further_ahead():
    loader = DataLoader(TensorDataset(*samples()), batch_size=4, num_workers=1, persistent_workers=True, timeout=9)
    module = fit(loader, prefetch_factor=5)
    assert (module.met["workers"], loader.prefetch_factor, loader.timeout) == (1, 5, 9)
    module = fit(loader, num_workers=0)
    assert (module.met["workers"], loader.prefetch_factor, loader.timeout) == (0, None, 0)
    assert len(module.losses) == 6
    fit(loader, prefetch_factor=5)  # which a loader without workers has no use for
    assert loader.prefetch_factor is None


@pytest.mark.sampled(default=2)
@pytest.mark.filterwarnings("ignore:Checkpoint directory")
@pytest.mark.parametrize("first", [True, False])
def test_loaders_of_exact_resume_are_changed_too(tmp_path, first):
    """Both take the place of the strategy's method, in either order."""

    def resumed(checkpoint=None):
        callbacks = [Speedups(num_workers=1), ExactResume()]
        saving = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
        loader = DataLoader(TensorDataset(*samples()), batch_size=4, shuffle=True)
        return fit(loader, [*(callbacks if first else callbacks[::-1]), saving], checkpoint)

    whole = resumed()
    assert whole.met["workers"] == 1
    assert resumed(tmp_path / "step=1.ckpt").seen == whole.seen[4:]
    assert "process_dataloader" not in vars(whole.trainer.strategy)


def test_batches_that_are_fetched_at_once_train_alike():
    plain, module = fit(), fit(batched_fetch=True)
    assert module.losses == plain.losses
    assert module.seen == plain.seen
    assert isinstance(module.trainer.train_dataloader.dataset, TensorDataset)
    assert type(dataset_of(iter(module.trainer.train_dataloader))) is not TensorDataset


class Stream(IterableDataset):
    def __iter__(self):
        yield from zip(*samples(), strict=True)


def test_an_iterable_dataset_gets_no_workers_that_would_repeat_it():
    module = fit(DataLoader(Stream(), batch_size=4), num_workers=2)
    assert module.met["workers"] == 0
    assert len(module.losses) == 6


@pytest.mark.slow
@pytest.mark.parametrize("scope", [pytest.param("children", marks=pytest.mark.weekly), "blocks"])
def test_compiled_modules_train_alike_and_keep_their_names(compiler, scope):
    torch._dynamo.reset()
    plain, graphs = fit(), torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    module = fit(compile=scope)
    torch.testing.assert_close(torch.tensor(module.losses), torch.tensor(plain.losses), rtol=1e-4, atol=1e-5)
    assert list(module.state_dict()) == list(plain.state_dict())
    assert graphs["unique_graphs"] > before


def test_a_mode_and_dynamic_shapes_reach_torch_compile(monkeypatch):
    asked = []
    names = "mode", "dynamic"
    monkeypatch.setattr(nn.Module, "compile", lambda module, **given: asked.append(tuple(map(given.get, names))))
    fit(compile="blocks", compile_mode="reduce-overhead")
    fit(compile="children")
    fit(compile="children", compile_dynamic=True)
    assert asked == [("reduce-overhead", None)] * 2 + [(None, None)] * 2 + [(None, True)] * 2


class Encoder(Net):
    """torch's own layers, whose attention drops weights; fail at step ``fail_at``, or fit another before step 0."""

    def __init__(self, fail_at=None, inner=None, small=False):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.3)
        self.features = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        if small:
            self.features = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.3))
        self.fail_at, self.inner = fail_at, inner

    def training_step(self, batch, batch_idx):
        if self.global_step == 0 and self.inner is not None:
            self.inner()
        if self.global_step == self.fail_at:
            raise ArithmeticError("as planned")
        torch.manual_seed(self.global_step)
        loss = self.features(torch.ones(20, 8, 16)).square().sum()
        self.losses.append(loss.item())
        return loss


def drawn():
    torch.manual_seed(0)
    return F.dropout(torch.ones(5000), 0.5).tolist()


def test_dropouts_of_any_module_are_native_until_the_run_ends(vectors):
    torchs = drawn()
    plain, module, again = (fit(kind=Encoder, native_dropout=on).losses for on in (False, True, True))
    assert module == again
    assert all(one != other for one, other in zip(plain, module, strict=True))
    assert drawn() == torchs
    with pytest.raises(ArithmeticError):
        fit(kind=functools.partial(Encoder, fail_at=1), native_dropout=True, threads=2)
    assert drawn() == torchs
    assert torch.get_num_threads() == 1


def test_a_run_within_a_run_leaves_nothing_replaced(vectors):
    torchs, settings = drawn(), Speedups(native_dropout=True)
    for inner in (settings, Speedups(native_dropout=True)):
        within = functools.partial(fit, callbacks=[inner], kind=Encoder)
        fit(callbacks=[settings], kind=functools.partial(Encoder, inner=within))
        assert drawn() == torchs


def test_native_dropout_needs_a_kernel(vectors, monkeypatch):
    monkeypatch.setenv("LIGHTNING_ACCEL_NATIVE", "0")
    with (
        KERNELS.switched_off(),
        pytest.raises(RuntimeError, match=r"NATIVE=0 switches .* off\. .* leave native_dropout"),
    ):
        fit(native_dropout=True)


def test_onednn_multiplies_until_the_run_ends(vectors, monkeypatch):
    if reason := why_no_onednn_matmul():
        pytest.skip(reason)
    plain, module = fit(), fit(onednn_matmul=True)
    assert (plain.met["onednn"], module.met["onednn"], multiplies_by_onednn()) == (False, True, False)
    assert module.losses == plain.losses  # whose products are small
    monkeypatch.setattr(matmul, "missing_kernel", lambda: "a reason")
    with pytest.raises(RuntimeError, match=r"in place of MKL: a reason\. Leave onednn_matmul off"):
        fit(onednn_matmul=True)


class Attending(Net):
    def __init__(self):
        super().__init__()
        self.features = nn.MultiheadAttention(16, 2)

    def training_step(self, batch, batch_idx):
        x = torch.linspace(-1, 1, 480).view(10, 3, 16)
        out, _ = self.features(x, x, x)
        loss = out.square().sum()
        self.losses.append(loss.item())
        return loss


def test_attention_is_native_and_defers_weights_until_the_run_ends(vectors, monkeypatch):
    served, is_served = [], attention._is_served
    monkeypatch.setattr(attention, "_is_served", lambda *args: served.append(is_served(*args)) or served[-1])
    plain = fit(kind=Attending).losses
    assert fit(kind=Attending, attention="native").losses == plain  # weights are asked for
    assert not served
    module = fit(kind=Attending, attention="native", defer_attention_weights=True)
    assert served == [True] * len(plain)
    torch.testing.assert_close(torch.tensor(module.losses), torch.tensor(plain), rtol=1e-4, atol=1e-6)
    x = torch.ones(1, 1, 2, 4, requires_grad=True)
    F.scaled_dot_product_attention(x, x, x)
    assert len(served) == len(plain)
    assert "forward" not in vars(module.features)
    monkeypatch.setattr(attention, "missing_kernel", lambda: "a reason")
    with pytest.raises(RuntimeError, match=r"attention has no native kernel: a reason\. .* another attention"):
        fit(kind=Attending, attention="native")


class Classifying(Attending):
    """A network whose channels can be removed, with attention of both kinds."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, 0.1)
        self.example_input_array = torch.linspace(-1, 1, 480).view(10, 3, 16)

    def forward(self, x):
        return self.encoder(self.features(x, x, x)[0]).mean((0, 2))

    def training_step(self, batch, batch_idx):
        loss = self(self.example_input_array).square().sum()
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("loss", self(batch).square().sum(), batch_size=1)

    def val_dataloader(self):
        return DataLoader([self.example_input_array[:, 0]], batch_size=3)


@pytest.mark.sampled(default=1)
@pytest.mark.parametrize("structure", ["channel", "unstructured"])
def test_native_attention_trains_pruned_networks_in_any_order_of_callbacks(vectors, structure):
    def settings():
        pruning = Pruning(0.4, structure=structure, end=1.0)
        return [pruning, Speedups(attention="native", defer_attention_weights=True)]

    one, other = (fit(kind=Classifying, callbacks=settings()[::step]) for step in (1, -1))
    assert one.losses == other.losses
    kept = sum(int(parameter.count_nonzero()) for parameter in one.encoder.parameters())
    assert kept < 0.9 * sum(parameter.numel() for parameter in Classifying().encoder.parameters())


@pytest.mark.slow
def test_compiled_layers_draw_natively_too(vectors):
    torch._dynamo.reset()
    kind = functools.partial(Encoder, small=True)
    eager, compiled = (fit(kind=kind, native_dropout=True, compile=scope).losses for scope in (None, "children"))
    torch.testing.assert_close(torch.tensor(compiled), torch.tensor(eager), rtol=1e-4, atol=1e-5)


def test_children_are_the_largest_modules_that_are_called():
    module = Net()
    assert called_children(module) == [module.features, module.heads[0]]


def test_another_machine_is_warned_of():
    with pytest.warns(UserWarning, match="measured on another machine .an abacus.*lightning-accel tune"):
        fit(measured_on="an abacus")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        Speedups()


def test_what_an_allocator_needs_is_told_where_it_is_missing(monkeypatch):
    monkeypatch.setattr(speedups, "why_no_allocator", lambda _: "")
    monkeypatch.setattr(speedups, "variables_for", lambda name: {"LD_PRELOAD": f"lib{name}.so", "OTHER": "1"})
    with pytest.warns(UserWarning, match="start the program with LD_PRELOAD=libtcmalloc.so OTHER=1"):
        fit(allocator="tcmalloc")
    monkeypatch.setattr(speedups, "why_no_allocator", lambda _: "not installed")
    with pytest.warns(UserWarning, match="allocator='jemalloc' has no effect: not installed"):
        fit(allocator="jemalloc")
    monkeypatch.setattr(speedups, "allocator_in_use", lambda: "jemalloc")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="allocator")
        fit(allocator="jemalloc")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threads": 0}, "threads must be at least 1; got 0"),
        ({"attention": "flash"}, "attention must be one of native, math, efficient, cudnn; got 'flash'"),
        ({"compile": "childs"}, "compile must be one of children, blocks; got 'childs'"),
        (
            {"compile": "blocks", "compile_mode": "fast"},
            "compile_mode must be one of reduce-overhead, max-autotune; got",
        ),
        ({"matmul_precision": "low"}, "matmul_precision must be one of high, medium; got 'low'"),
        ({"num_workers": -1}, "num_workers must be at least 0; got -1"),
        ({"prefetch_factor": 0}, "prefetch_factor must be at least 1; got 0"),
        ({"num_workers": 0, "prefetch_factor": 4}, "prefetch_factor=4 needs workers"),
        ({"compile_dynamic": True}, "compile_dynamic needs compile"),
        ({"allocator": "malloc"}, "allocator must be one of tcmalloc, jemalloc, huge_pages; got 'malloc'"),
        ({"allocator": "tcmalloc", "keep_freed_memory": True}, "leave keep_freed_memory out"),
        ({"compile_mode": "max-autotune"}, "compile_mode='max-autotune' needs compile"),
        (
            {"compile": "blocks", "compile_mode": "max-autotune", "native_dropout": True},
            "compile_mode='max-autotune' needs native_dropout=False",
        ),
    ],
)
def test_rejects(options, message):
    with pytest.raises(ValueError, match=message):
        Speedups(**options)


class Tagger(L.LightningModule):
    """Classify samples by a GRU and an LSTM over their pixels, as users write them."""

    def __init__(self):
        super().__init__()
        self.rows = nn.GRU(6, 5, batch_first=True, bidirectional=True)
        self.columns = nn.LSTM(10, 4, dropout=0.3, num_layers=2)
        self.head = nn.Linear(4, 2)
        self.losses, self.fused = [], []

    def training_step(self, batch, batch_idx):
        x, y = batch
        rows = pack_padded_sequence(self.rows(x[:, 0])[0].transpose(0, 1), torch.arange(len(x), 0, -1))
        loss = F.cross_entropy(self.head(self.columns(rows)[1][0][-1]), y)
        self.losses.append(loss.item())
        self.fused.append(["forward" in vars(layer) for layer in (self.rows, self.columns)])
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Graphs(L.LightningModule):
    """Classify graphs by two convolutions of PyTorch Geometric, and attention between them."""

    def __init__(self):
        super().__init__()
        self.convolutions = nn.ModuleList([GINConv(nn.Linear(3, 6)), SAGEConv(6, 2)])
        self.block = GPSConv(6, None, heads=3)
        self.losses, self.fused = [], []

    def training_step(self, batch, batch_idx):
        first, second = self.convolutions
        x = second(self.block(first(batch.x, batch.edge_index), None, batch.batch), batch.edge_index)
        loss = F.cross_entropy(global_add_pool(x, batch.batch), batch.y)
        self.losses.append(loss.item())
        in_convolutions = ["propagate" in vars(layer) for layer in self.convolutions]
        self.fused.append([*in_convolutions, "forward" in vars(self.block)])
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_messages_and_attention_of_graphs_are_replaced_for_the_run_alone(native, caplog):
    caplog.set_level(logging.INFO)
    generator = torch.Generator().manual_seed(0)
    graphs = [
        Data(
            x=torch.randn(n, 3, generator=generator),
            edge_index=torch.randint(n, (2, 2 * n), generator=generator),
            y=torch.tensor([n % 2]),
        )
        for n in range(3, 11)
    ]
    modules = []
    for settings in ({}, {"fused_messages": True, "attention": "native"}):
        torch.manual_seed(0)
        trainer = L.Trainer(
            max_epochs=2, accelerator="cpu", callbacks=[Speedups(**settings)], logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        modules.append(Graphs())
        trainer.fit(modules[-1], GraphLoader(graphs, batch_size=4))
    plain, fused = modules
    assert fused.fused == [[True, True, True]] * 4
    assert plain.fused == [[False, False, False]] * 4
    assert fused.losses == pytest.approx(plain.losses, rel=1e-5)
    assert "Speedups(attention='native') replaces the computation of 1 GPSConv" in caplog.text
    assert "Speedups(fused_messages=True) replaces the computation of 1 GINConv, 1 SAGEConv" in caplog.text
    assert not any({"propagate", "forward"} & vars(layer).keys() for layer in fused.modules())


def test_recurrent_layers_are_fused_for_the_run_alone():
    plain, module = fit(kind=Tagger), fit(kind=Tagger, fused_rnn=True)
    assert module.fused == [[True, True]] * 6
    assert module.losses == pytest.approx(plain.losses, rel=1e-5)
    assert plain.losses[0] != plain.losses[-1]
    for name, weight in plain.state_dict().items():
        assert torch.allclose(module.state_dict()[name], weight, atol=1e-5)
    assert not any("forward" in vars(layer) for layer in module.modules())
