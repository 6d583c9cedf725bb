"""A simulated step against the same step, trained for real, and seen by counters of the tests' own."""

import multiprocessing as mp
import os
import random
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Timer, TQDMProgressBar
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics import MeanMetric

from lightning_accel.callbacks import Pruning, Quantization
from lightning_accel.planning import Cluster, Device, SimulationError, simulate_step
from lightning_accel.planning.hardware import DEVICES
from lightning_accel.strategies import FullyShardedStrategy, PipelineStrategy
from tests.planning.planned_runs import Block, Seen, SeenStep, TokenModel, make, train_seen
from tests.ranks import run_ranks
from tests.zoo import ZOO

CPU = Device("cpu", 2**34, {"fp32": 1e11}, 1e10, 1e9, 1e9, is_gpu=False)
SHARDED = {
    "sharded": {},
    "checkpointing": {"activation_checkpointing": True},
    "two shards": {"shard_size": 2},
    "experts on two": {"expert_parallel_size": 2},
}
PIPELINES = {"pipeline": 1, "two pipelines": 2}
REPLICAS = {"split": 1, "split and sharded": 2}
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def strategy_of(name):
    if name in PIPELINES:
        return PipelineStrategy(num_micro_batches=4, data_parallel_size=PIPELINES[name])
    if name in REPLICAS:
        return ModelParallelStrategy(data_parallel_size=REPLICAS[name], tensor_parallel_size=2)
    return FullyShardedStrategy(**SHARDED[name]) if name in SHARDED else name


def simulated(tmp_path, kind, strategy, world_size, device=CPU, **options):
    def run(arguments, fit):
        fit(*make(kind, **options, **arguments))

    return simulate_step(run, Cluster(device, world_size), {"strategy": strategy_of(strategy)}, tmp_path)


def train_all(rank, cells, world_size):
    return [train_seen(rank, kind, strategy_of(strategy), world_size) for kind, strategy in cells]


def compare(tmp_path, cells, world_size):
    every = run_ranks(train_all, cells, world_size, world_size=world_size)
    for number, (kind, strategy) in enumerate(cells):
        found = simulated(tmp_path, kind, strategy, world_size)
        # of the ranks the least: some hold what they have sent until others have received it
        peaks = [one[number][1] for one in every]
        peak = max(peaks) if strategy in PIPELINES else min(peaks)
        collectives = every[peaks.index(peak)][number][0]
        planned = {name: size for name, size in found.trace.bytes_by_name().items() if size}
        if strategy in PIPELINES:  # which broadcasts objects, too
            assert planned.pop("broadcast") < collectives.pop("broadcast")
        if strategy == "experts on two":  # which tokens go where depends on the gate
            assert planned.pop("all_to_all") == pytest.approx(collectives.pop("all_to_all"), rel=0.1)
            assert found.peak == pytest.approx(peak, rel=0.15)
        else:
            assert found.peak == pytest.approx(peak, rel=0.03), (
                kind,
                strategy,
            )
        assert planned == collectives, (kind, strategy)
        assert sum(found.memory.values()) == found.peak


@pytest.mark.slow
def test_two_processes(tmp_path):
    compare(tmp_path, [("dense", "ddp"), ("dense", "pipeline")], 2)


@pytest.mark.slow
@pytest.mark.weekly
def test_pipelines(tmp_path):
    compare(tmp_path, [("experts", "pipeline"), ("recurrent", "pipeline")], 2)
    compare(tmp_path, [("dense", "two pipelines")], 4)


@pytest.mark.weekly
@pytest.mark.slow
def test_all_on_two_processes(tmp_path):
    strategies = ("ddp", "sharded", "checkpointing")
    cells = [(kind, strategy) for kind in ("dense", "experts", "recurrent") for strategy in strategies]
    compare(tmp_path, [*cells, ("experts", "experts on two"), ("split", "split")], 2)


@pytest.mark.slow
@pytest.mark.weekly
def test_all_on_four_processes(tmp_path):
    strategies = ("ddp", "sharded", "checkpointing", "two shards")
    cells = [(kind, strategy) for kind in ("dense", "experts", "recurrent") for strategy in strategies]
    compare(tmp_path, [*cells, ("experts", "experts on two"), ("split", "split and sharded")], 4)


def zoo_trainer(**options):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_steps": 3}
    return L.Trainer(**{**quiet, "enable_model_summary": False, "accelerator": "cpu", "devices": 1, **options})


def networks() -> list[object]:
    """Return the zoo: three networks by default, of the others every third slow, and the rest weekly."""
    default = "llama", "resnet", "gcn"
    others = [name for name in ZOO if name not in default]
    rare = [pytest.mark.slow, pytest.mark.weekly]
    return [*default, *(pytest.param(name, marks=rare[: 1 + (i % 3 > 0)]) for i, name in enumerate(others))]


@pytest.mark.sampled(slow=4)
@pytest.mark.slow
@pytest.mark.parametrize("name", networks())
def test_networks_of_others(name, tmp_path):
    model = ZOO[name]
    if model.requires != "torch":
        pytest.importorskip(model.requires)
    seen = Seen()
    second = SeenStep(seen)
    torch.manual_seed(0)
    with seen:
        zoo_trainer(callbacks=[second]).fit(model.make(), model.loader())

    def run(arguments, fit):
        fit(zoo_trainer(**arguments), model.make(), model.loader())

    found = simulate_step(run, Cluster(CPU, 1), {}, tmp_path)
    assert found.peak == pytest.approx(second.peak, rel=0.01)
    assert found.samples == 4

    def run_mixed(arguments, fit):
        fit(zoo_trainer(precision="bf16-mixed", **arguments), model.make(), model.loader())

    # what is recomputed in the backward pass takes the ways of CUDA, too
    sharded = {"strategy": FullyShardedStrategy(activation_checkpointing=True)}
    assert simulate_step(run_mixed, Cluster(DEVICES["L4-24GB"], 2), sharded, tmp_path).peak > 0


@pytest.mark.slow
@pytest.mark.parametrize(("device", "precision"), [("L4-24GB", "32-true"), ("H100-80GB", "bf16-true")])
def test_experts_take_the_kernels_of_the_gpu_that_is_planned_for(tmp_path, device, precision):
    """As many operations as by those of the CPU, in fewer products: torch's kernel on an H100, else Triton's."""
    traces = [
        simulated(tmp_path, "experts", "ddp", 2, one, precision=precision).trace for one in (CPU, DEVICES[device])
    ]
    on_cpu, on_gpu = ([event.flops for event in one.events if getattr(event, "flops", 0)] for one in traces)
    assert sum(on_gpu) == sum(on_cpu)
    # of each of three layers: its experts' two products, each with two in the backward pass; its gate's; and the head's
    assert len(on_gpu) == 3 * (6 + 3) + 3


@pytest.mark.slow
def test_the_kernels_of_experts_depend_on_the_capability_of_the_gpu(tmp_path):
    """Ours, for older GPUs, gathers rows within the product and keeps no copy of them: k = 2 of 4 * 12 tokens."""
    gpu = DEVICES["H100-80GB"]
    new, old = (
        simulated(tmp_path, "experts", "ddp", 2, one, precision="bf16-true")
        for one in (gpu, replace(gpu, capability=8))
    )
    assert new.peak - old.peak >= 2 * 2 * 4 * 12 * 24


class Latent(torch.nn.Module):
    """Attend with values of half the width of queries, as multi-head latent attention does."""

    def __init__(self, dim, width=None, masked=False):
        super().__init__()
        self.width, self.masked = width or dim // 2, masked
        self.project, self.out = torch.nn.Linear(dim, 2 * dim + self.width), torch.nn.Linear(self.width, dim)

    def forward(self, x):
        dim, length = x.shape[-1], x.shape[1]
        query, key, value = self.project(x).unsqueeze(1).split([dim, dim, self.width], -1)
        mask = torch.ones(length, length, dtype=torch.bool) if self.masked else None
        query, key, value = (one.expand(-1, 2, -1, -1) for one in (query, key, value))
        found = F.scaled_dot_product_attention(query, key, value, mask, is_causal=not self.masked)
        return x + self.out(found.mean(1))


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True])
def test_attention_with_values_of_another_width_is_fused(tmp_path, masked):
    """Weights of all pairs of 400 tokens would take 5 MB a layer in bfloat16; there is one of the operations twice."""

    def run(width):
        def made(arguments, fit):
            trainer, _, loader = make("dense", length=400, precision="bf16-mixed", **arguments)
            fit(trainer, TokenModel(partial(Latent, width=width, masked=masked), 24, 3), loader)

        return simulate_step(made, Cluster(DEVICES["L4-24GB"], 1), {}, tmp_path)

    narrow, equal = run(12), run(24)
    attention = [sum(event.flops for event in one.trace.events if event.is_attention) for one in (narrow, equal)]
    size = 2 * 4 * 2 * 400 * 400  # of a product of one number for each pair
    # of values and of the two gradients by them, of which causal kernels leave half out
    assert attention[1] - attention[0] == 3 * 3 * size * 12 // (1 if masked else 2)
    assert abs(equal.peak - narrow.peak) < (3 if masked else 1) * 2 * 2**20


@pytest.mark.slow
def test_kinds_of_memory_and_work(tmp_path):
    _, module, _ = make("dense")
    size = sum(one.numel() for one in module.parameters()) * 4
    found = simulated(tmp_path, "dense", "ddp", 8)
    assert found.num_parameters * 4 == size
    assert found.memory["parameters"] == found.memory["gradients"] == found.memory["communication"] == size
    assert found.memory["optimizer states"] == pytest.approx(2 * size, rel=0.01)
    assert found.trace.bytes_by_name()["all_reduce"] == size
    rows, dim = 4 * 12, 24
    products = 3 * (2 * 4 * dim * dim) + dim * 50  # of the blocks and the head
    assert found.trace.flops == 3 * 2 * rows * products  # forward, and twice as many backward
    sharded = simulated(tmp_path, "dense", "sharded", 8)
    assert sharded.memory["parameters"] == pytest.approx(size / 8, rel=0.03)
    assert sharded.memory["optimizer states"] == pytest.approx(size / 4, rel=0.03)
    assert sharded.phase_of_peak in ("forward", "backward")
    assert sharded.memory["gathered parameters"] >= 4 * 2 * 4 * dim * dim  # of a block


@pytest.mark.slow
def test_accumulated_batches_are_one_step(tmp_path):
    once = simulated(tmp_path, "dense", "ddp", 2)
    found = simulated(tmp_path, "dense", "ddp", 2, accumulate_grad_batches=3)
    assert found.samples == 3 * once.samples == 12
    assert found.trace.flops == 3 * once.trace.flops
    assert found.trace.bytes_by_name()["all_reduce"] == once.trace.bytes_by_name()["all_reduce"]


@pytest.mark.slow
def test_optimizers_update_all_weights_at_once_on_a_gpu(tmp_path):
    on_cpu = simulated(tmp_path, "dense", "ddp", 2, dim=256, length=2)
    on_gpu = simulated(tmp_path, "dense", "ddp", 2, device=DEVICES["H100-80GB"], dim=256, length=2)
    assert on_gpu.phase_of_peak == "optimizer"
    assert on_gpu.memory["temporary"] == pytest.approx(on_gpu.memory["parameters"], rel=0.05)
    assert on_cpu.memory.get("temporary", 0) < on_gpu.memory["temporary"] / 2


@pytest.mark.slow
def test_the_process_is_left_as_it_was(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_NTASKS", "4")
    torch.manual_seed(5)
    before, random_state = dict(os.environ), torch.get_rng_state()
    hook, drawn = sys.excepthook, random.getstate()
    group, resize = torch.distributed.new_group, torch.UntypedStorage.resize_
    simulated(tmp_path, "dense", "sharded", 4, deterministic=True, benchmark=True)
    with pytest.raises(ZeroDivisionError), warnings.catch_warnings():
        simulate_step(lambda arguments, fit: 1 // 0, Cluster(CPU, 4), {}, tmp_path)
    assert dict(os.environ) == before
    assert "TORCHELASTIC_RUN_ID" not in os.environ
    assert torch.get_rng_state().equal(random_state)
    assert sys.excepthook is hook
    assert random.getstate() == drawn
    assert torch.distributed.new_group is group
    assert torch.UntypedStorage.resize_ is resize
    assert not torch.distributed.is_initialized()
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.benchmark
    assert torch.empty(2).fill_(3).tolist() == [3, 3]


def test_callbacks_that_compress_are_left_out(tmp_path):
    callbacks = [Pruning(sparsity=0.5), Quantization(), Timer(), TQDMProgressBar()]
    found = simulated(tmp_path, "dense", "ddp", 2, callbacks=callbacks, enable_progress_bar=True)
    assert found.left_out == ["Pruning", "Quantization"]


class ByHand(TokenModel):
    """A module with a schedule of the whole fit, and batch norms that were converted by hand."""

    def __init__(self):
        super().__init__(Block, 24, 1)
        self.norm = torch.nn.SyncBatchNorm.convert_sync_batchnorm(torch.nn.BatchNorm1d(12))

    def training_step(self, batch, batch_idx):
        assert self.trainer.num_training_batches < 100
        assert self.trainer.max_epochs == self.max_epochs
        self.log("lr", self.lr_schedulers().get_last_lr()[0])
        return super().training_step(batch, batch_idx) + self.norm(self.embedding(batch[0])).sum()

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        self.max_epochs = self.trainer.max_epochs
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def validation_step(self, batch, batch_idx):
        raise ZeroDivisionError("is not part of a step")


@pytest.mark.slow
@pytest.mark.parametrize("limits", [{"max_steps": -1, "max_epochs": 1}, {"fast_dev_run": True}])
def test_an_epoch_of_one_batch_has_the_steps_of_longer_ones(tmp_path, limits):
    def run(few):
        def made(arguments, fit):
            trainer, _, loader = make("dense", accumulate_grad_batches=2, detect_anomaly=True, **limits, **arguments)
            tokens = loader.dataset.tensors[0].repeat(2, 1)[:few]
            fit(trainer, ByHand(), DataLoader(TensorDataset(tokens), batch_size=4))

        return made

    one, many = (
        simulate_step(run(few), Cluster(CPU, 16), {"strategy": FullyShardedStrategy()}, tmp_path)
        for few in (16, 2 * 64)
    )
    assert one.trace.bytes_by_name() == many.trace.bytes_by_name()
    assert one.samples == 2
    assert one.small_batch == (1, 4)
    assert (many.samples, many.small_batch) == (8, None)
    assert one.trace.bytes_by_name()["all_gather"] > 0
    assert many.left_out == ["SyncBatchNorm"]


class Endless(IterableDataset):
    """Data without a length, whose last batch is short."""

    def __iter__(self):
        return iter(torch.arange(18 * 12).view(18, 12) % 50)


@pytest.mark.parametrize("loader", ["table", "stream", "two"])
def test_short_batches_are_left_out(tmp_path, loader):
    table = DataLoader(TensorDataset(torch.zeros(18, 12, dtype=torch.long)), batch_size=16)
    loaders = {"table": table, "stream": DataLoader(Endless(), batch_size=16)}

    class Model(TokenModel):
        def training_step(self, batch, batch_idx):
            batch = batch["a"] if isinstance(batch, dict) else batch
            return super().training_step([batch] if isinstance(batch, torch.Tensor) else batch, batch_idx)

    def run(arguments, fit):
        both = CombinedLoader({"a": table, "b": [torch.zeros(16)]}, "max_size")
        trainer, _, _ = make("dense", **arguments)
        fit(trainer, Model(Block, 24, 1), loaders.get(loader, both))

    found = simulate_step(run, Cluster(CPU, 1), {}, tmp_path)
    assert (found.samples, found.small_batch) == (16, None)


class Measured(TokenModel):
    """A module that logs metrics in its step."""

    def __init__(self):
        super().__init__(Block, 24, 4)
        self.mean = MeanMetric()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.mean(loss)
        self.log("mean", self.mean)
        self.log("loss", loss)
        return loss


@pytest.mark.slow
def test_a_pipeline_that_logs_metrics(tmp_path):
    def run(arguments, fit):
        trainer, _, data = make("dense", **arguments)
        fit(trainer, Measured(), data)

    before = rank_zero_only.rank
    found = simulate_step(run, Cluster(CPU, 2), {"strategy": PipelineStrategy(num_micro_batches=2)}, tmp_path)
    assert rank_zero_only.rank == before == 0
    assert [stage.flops > 0 for stage in found.stages] == [True, True]


class Copying(TokenModel):
    """A module that copies its parts where it has been moved to the device, and keeps a history on the host."""

    def configure_optimizers(self):
        self.copies = [each.detach().clone() for each in self.parameters()]
        return super().configure_optimizers()

    def on_fit_start(self):
        self.more = [each.detach().clone() for each in self.parameters()]
        self.elsewhere = [each.to("cpu") for each in self.more]

    def on_train_batch_end(self, outputs, batch, batch_idx):
        for kept, each in zip(self.elsewhere, self.parameters(), strict=True):
            kept.lerp_(each.detach().cpu(), 0.1)

    def training_step(self, batch, batch_idx):
        self.history = [kept * number for kept in self.elsewhere for number in range(100)]
        return super().training_step(batch, batch_idx)


@pytest.mark.slow
def test_copies_are_where_their_originals_were(tmp_path):
    def run(arguments, fit):
        trainer, _, data = make("dense", **arguments)
        fit(trainer, Copying(Block, 24, 1), data)

    found = simulate_step(run, Cluster(DEVICES["L4-24GB"], 1), {}, tmp_path)
    assert found.memory["other"] == 2 * found.memory["parameters"]
    assert found.memory["activations"] < 100 * found.memory["parameters"]


def test_training_without_batches(tmp_path):
    def run(arguments, fit):
        trainer, module, loader = make("dense", **arguments)
        fit(trainer, module, iter(list(loader)[:1]))

    with pytest.raises(SimulationError, match="before its second optimizer step"):
        simulate_step(run, Cluster(CPU, 1), {}, tmp_path)


class Watched(TokenModel):
    """A module that keeps an average and a teacher, and looks at its numbers on the host."""

    def __init__(self, folder, table):
        super().__init__(Block, 24, 1)
        self.teacher, self.folder, self.seen, self.table = [Block(24)], folder, [], table

    def on_train_start(self):
        self.average = [each.detach().clone() for each in self.parameters()]

    def training_step(self, batch, batch_idx):
        tokens, x = batch
        out = self.teacher[0](self.embedding(tokens))
        scores = (out @ x.unsqueeze(-1)).squeeze(-1)
        order = torch.tensor(scores.detach().cpu().numpy().argsort(axis=1))
        assert any(row.tolist() != list(range(12)) for row in order)
        assert len(set(scores.detach().cpu().flatten().tolist())) > 1
        self.seen.append(scores.detach().cpu())
        return super().training_step([tokens], batch_idx)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        torch._foreach_lerp_(self.average, list(self.parameters()), 0.1)
        torch.save(self.state_dict(), self.folder / "mine.pt")
        self.trainer.save_checkpoint(self.folder / "mine.ckpt")


@pytest.mark.parametrize("device", ["L4-24GB", "cpu"])
def test_what_the_host_holds_is_not_in_the_memory_of_a_gpu(tmp_path, device):
    """A table of features of which batches are views, predictions that were moved, and a table beside the step."""
    held = []

    def run(arguments, fit):
        trainer, _, _ = make("dense", **arguments)
        data = torch.randint(0, 50, (512, 12)), torch.randn(512, 24)
        batches = [(data[0][i : i + 4], data[1][i : i + 4]) for i in range(0, 512, 4)]
        held.append(Watched(tmp_path, torch.randn(3000)))
        fit(trainer, held[0], DataLoader(batches, batch_size=None))

    found = simulate_step(run, Cluster(DEVICES.get(device, CPU), 1), {}, tmp_path / "logs")
    assert list(tmp_path.glob("mine*")) == []
    assert sum(found.memory.values()) == found.peak
    module = held[0]
    parameters, teacher = (sum(4 * one.numel() for one in each.parameters()) for each in (module, module.teacher[0]))
    if device == "cpu":
        assert found.memory["other"] >= parameters + teacher + 3000 * 4
        assert found.memory["batch"] == 512 * (12 * 8 + 24 * 4)
    else:
        assert found.memory["other"] == parameters + teacher
        assert found.memory["batch"] == 4 * (12 * 8 + 24 * 4)


def simulate_four_billion_weights(machines, folder):
    import resource

    def run(arguments, fit):
        trainer, module, loader = make("dense", dim=4096, depth=32, length=16, **arguments)
        fit(trainer, module, loader)

    cluster = Cluster(DEVICES["H100-80GB"], 8, machines)
    found = simulate_step(run, cluster, {"strategy": FullyShardedStrategy()}, folder)
    return found, cluster.size, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.mark.weekly
@pytest.mark.slow
@pytest.mark.parametrize("machines", [1, 128])
def test_a_model_of_four_billion_weights_on_a_thousand_processes(tmp_path, machines):
    """In a process of its own: its untouched weights take address space, beside which this one may not fork."""
    with ProcessPoolExecutor(1, mp.get_context("forkserver")) as pool:
        found, size, most_kib = pool.submit(simulate_four_billion_weights, machines, tmp_path).result(timeout=600)
    assert found.num_parameters > 4e9
    assert found.memory["parameters"] == pytest.approx(4 * found.num_parameters / size, rel=0.05)
    assert most_kib < 4 * 2**20
