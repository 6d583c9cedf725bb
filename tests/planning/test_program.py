"""Plans of runs, as a function and on the command line."""

import gc
import json
import weakref

import lightning as L
import pytest
import torch
import yaml
from torchmetrics import Accuracy

from lightning_accel import plan
from lightning_accel.__main__ import main
from lightning_accel.measure.table import with_unit
from lightning_accel.planning import Cluster, Device, SimulationError
from lightning_accel.planning.candidates import candidates_for
from lightning_accel.planning.writing import plan_tables
from tests.planning.planned_runs import make

SMALL = Device("small", 2**31, {"fp32": 1e13}, 1e11, 1e10, 1e9)
CONFIG = ["--config", "configs/moe_digits.yaml"]


def run_of(kind, **settings):
    def made(**options):
        return make(kind, **settings, **options)

    return made


@pytest.mark.slow
def test_strategies_are_compared_and_the_fastest_that_fits_comes_first():
    found = plan(run_of("experts", depth=1), "2xL4-24GB", machines=2)
    names = {option.candidate.name for option in found.options}
    assert names >= {
        "as configured",
        "ddp",
        "fsdp2",
        "fsdp2, shards of 2",
        "fsdp2, experts on 2",
        "fsdp2, experts on 4",
    }
    planned = [option for option in found.options if option.simulation is not None]
    assert all(option.fits for option in planned)
    assert {option.candidate.name: option.reason[:10] for option in found.options if option not in planned} == {
        "pipeline of 2": "TypeError:"  # of one layer
    }
    rates = [option.batches_per_second for option in planned]
    assert rates == sorted(rates, reverse=True)
    assert found.fits_from is None
    trainer = found.overlay()["trainer"]
    assert (trainer["accelerator"], trainer["devices"], trainer["num_nodes"]) == ("gpu", 2, 2)
    by_name = {option.candidate.name: option for option in found.options}
    inside, outside = by_name["fsdp2, experts on 2"].simulation.trace.sent_bytes(found.cluster)
    assert inside > 0  # tokens stay in their machine
    assert json.loads(json.dumps(found.to_dict()))["cluster"] == {"device": "L4-24GB", "per_machine": 2, "machines": 2}
    assert outside > 0


@pytest.mark.parametrize(
    ("per_machine", "machines", "num_experts", "sizes"),
    [(2, 2, 4, {2, 4}), (3, 1, 4, set()), (4, 2, 4, {4}), (1, 4, 8, {4}), (2, 2, 0, set())],
)
def test_experts_are_distributed_in_equal_numbers(per_machine, machines, num_experts, sizes):
    found = candidates_for(Cluster(SMALL, per_machine, machines), num_experts, has_tensor_plan=False)
    arguments = [candidate.arguments for candidate in found]
    assert {one["expert_parallel_size"] for one in arguments if "expert_parallel_size" in one} == sizes
    assert ({"shard_size": per_machine} in arguments) == (per_machine > 1 and machines > 1)


@pytest.mark.slow
def test_modules_that_say_how_they_split_their_weights_are_planned_so():
    """Processes that hold parts of the weights share a batch, as the stages of a pipeline do."""
    found = plan(run_of("split"), "2xL4-24GB")
    options = {option.candidate.name: option for option in found.options}
    rates = {name: one.batches_per_second * one.time.total for name, one in options.items() if one.simulation}
    assert rates["ddp"] == rates["fsdp2"] == pytest.approx(2)
    assert rates["tensors split in 2"] == rates["pipeline of 2"] == pytest.approx(1)
    split = options["tensors split in 2"]
    assert split.simulation.memory["parameters"] < options["ddp"].simulation.memory["parameters"]
    assert split.candidate.config()["strategy"]["init_args"] == {"data_parallel_size": 1, "tensor_parallel_size": 2}
    assert not any("tensors" in one.name for one in candidates_for(Cluster(SMALL, 2, 2), 0, has_tensor_plan=True))


@pytest.mark.slow
def test_what_does_not_fit_is_told_where_it_would(capsys):
    device = Device("small", 1100 * 2**20, {"fp32": 1e13}, 1e11, 1e10, 1e9)  # 1 GiB of it is for CUDA
    runs = run_of("dense", dim=640, depth=2)
    found = plan(runs, device, machines=2)
    assert found.best is None
    candidate, larger = found.fits_from
    assert candidate.arguments == {"activation_checkpointing": True}
    assert (larger.per_machine > 1, larger.machines) == (True, 2)
    assert next(
        one for one in plan(runs, device, larger.size).options if one.candidate.arguments == candidate.arguments
    ).fits
    assert plan(runs, device, larger.size // 2).best is None
    with pytest.raises(ValueError, match="nothing fits on"):
        found.overlay()
    found.print()
    assert f"fsdp2, checkpointing fits on {larger}." in capsys.readouterr().out


@pytest.mark.slow
def test_a_strategy_that_cannot_be_planned_says_why(capsys):
    def without_layers(**options):
        trainer, _, data = make("dense", **options)
        return trainer, Normed(), data

    found = plan(without_layers, "8xL4-24GB")
    reasons = {option.candidate.name: option.reason for option in found.options if option.simulation is None}
    assert "does not tell which layers form its pipeline" in reasons["pipeline of 8"]
    assert found.options[-1].simulation is None
    found.print()
    assert "pipeline of 8: " in capsys.readouterr().out
    assert "pipeline of 8: " in str(found)
    assert len(repr(found)) < 1000


class Normed(L.LightningModule):
    """A table with sparse gradients, dropout and batch norm, trained as users do."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(50, 8, sparse=True)
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.2))
        self.accuracy = Accuracy("multiclass", num_classes=8)

    def training_step(self, batch, batch_idx):
        scores = self.net(self.table(batch[0][:, 0]))
        classes = batch[0][:, 1] % 8
        loss = torch.nn.functional.cross_entropy(scores, classes)
        if torch.isnan(loss) or loss.item() > 1e6:
            raise ValueError("diverged")
        right = scores.argmax(1) == classes
        self.log("right", scores[right].detach().cpu().numpy().sum().item(), sync_dist=True)
        self.accuracy(scores, classes)
        self.log("accuracy", self.accuracy)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=100)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_modules_as_users_write_them():
    def made(**options):
        trainer, _, data = make("dense", sync_batchnorm=True, accumulate_grad_batches=2, **options)
        return trainer, Normed(), data

    found = plan(made, "2xL4-24GB")
    assert [option.reason for option in found.options if "ddp" in option.candidate.name] == [""]
    by_name = {option.candidate.name: option for option in found.options}
    assert by_name["ddp"].simulation.left_out == ["SyncBatchNorm"]
    assert by_name["ddp"].simulation.trace.bytes_by_name()["all_reduce"] > 0
    assert "SparseCPU" in by_name["fsdp2"].reason


class Huge(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(2**40))


def test_tensors_that_the_system_refuses():
    def made(**options):
        trainer, module, data = make("dense", **options)
        module.configure_model = lambda: setattr(module, "block", Huge())
        return trainer, module, data

    with pytest.raises(SimulationError, match="overcommit_memory=1"):
        plan(made, SMALL)


@pytest.mark.weekly
@pytest.mark.slow
def test_pipelines_have_a_batch_for_all_stages():
    found = plan(run_of("dense", depth=4, dim=512), "2xL4-24GB", machines=2)
    by_name = {option.candidate.name: option for option in found.options}
    pipeline = by_name["pipeline of 2"]
    assert pipeline.fits
    flops = [stage.flops for stage in pipeline.simulation.stages]
    assert sum(flops) == by_name["ddp"].simulation.trace.flops
    assert max(flops) < 0.6 * sum(flops)
    assert pipeline.time.computation < pipeline.time.total < 3 * pipeline.time.computation
    table = plan_tables(found)[0]
    shown = dict(zip(table.columns, table.rows[found.options.index(pipeline)], strict=True))
    rates = [option.batches_per_second for option in found.options]
    assert rates == sorted(rates, reverse=True)
    assert pipeline.time.total * pipeline.batches_per_second == pytest.approx(2)
    assert shown["samples/s"] == with_unit(2 * 4 / pipeline.time.total, "")
    assert found.to_dict()["options"][0]["fits"]


@pytest.mark.slow
def test_nothing_of_the_runs_is_left():
    made = []

    def run(**options):
        trainer, module, data = make("experts", depth=1, **options)
        made.extend(weakref.ref(each) for each in (trainer, module))
        return trainer, module, data

    plan(run, "2xL4-24GB", machines=2)
    gc.collect()
    assert len(made) > 8
    assert [each() for each in made if each() is not None] == []


@pytest.mark.slow
def test_checkpointing_of_no_block_is_no_option_of_its_own():
    class Flat(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(50, 8)

        def training_step(self, batch, batch_idx):
            return self.table(batch[0]).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def made(**options):
        trainer, _, data = make("dense", **options)
        return trainer, Flat(), data

    found = plan(made, "2xL4-24GB")
    assert {option.candidate.name for option in found.options} == {"as configured", "ddp", "fsdp2", "pipeline of 2"}


def test_one_device_has_the_strategy_of_the_run():
    found = plan(run_of("recurrent"), SMALL)
    assert [option.candidate.name for option in found.options] == ["as configured"]
    assert found.options[0].simulation.trace.bytes_by_name() == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give gpus"),
        ({"gpus": "8xH100-80GB", "processes": 2}, "give gpus"),
        ({"gpus": "8xH101"}, "gpus must be a number and a kind"),
        ({"gpus": "8xH100-80GB", "machines": 0}, "must be positive"),
        ({"processes": 0}, "must be positive"),
        ({"gpus": "8xH100"}, "which H100: H100-80GB or H100-96GB"),
    ],
)
def test_numbers_and_devices_that_cannot_be(arguments, message):
    with pytest.raises(ValueError, match=message):
        plan(run_of("dense"), **arguments)


@pytest.mark.parametrize(
    "arguments", [{"gpus": 8}, {"gpus": "L4", "machines": 1.5}, {"gpus": "L4", "machines": "2"}, {"processes": True}]
)
def test_arguments_of_other_types(arguments):
    name = list(arguments)[-1]
    with pytest.raises(TypeError, match=f"{name} must be"):
        plan(run_of("dense"), **arguments)
    for no_run in (3, make("dense")):
        with pytest.raises(TypeError, match=f"config must be a file.*; got {type(no_run).__name__}. Pass the function"):
            plan(no_run, **arguments)


def test_functions_that_are_no_run():
    with pytest.raises(TypeError, match=r"must return \(trainer, module, data\), in this order; got list"):
        plan(lambda **options: [], SMALL)

    def with_own_devices(**options):
        return make("dense", accelerator="cpu", devices=1)

    with pytest.raises(SimulationError, match="the Trainer has 1 processes where 4 are planned"):
        plan(with_own_devices, "2xL4-24GB", machines=2)


@pytest.mark.slow
def test_the_command_line(tmp_path, capsys):
    overlay, facts = tmp_path / "plan.yaml", tmp_path / "plan.json"
    status = main(["plan", *CONFIG, "--gpus", "2xA100-40GB", "--output", str(overlay), "--json", str(facts)])
    printed = capsys.readouterr().out
    assert status == 0
    assert "Plan for 2xA100-40GB" in printed
    assert f"--config {overlay}" in printed
    assert yaml.safe_load(overlay.read_text())["trainer"]["devices"] == 2
    assert json.loads(facts.read_text())["options"][0]["fits"] is True


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ([*CONFIG, "--processes", "2", "--output", "no_folder/plan.yaml"], 2, "there is no folder no_folder"),
        ([], 2, "give the run to plan"),
        (CONFIG, 2, "give --gpus"),
        ([*CONFIG, "--gpus", "7xZ1"], 2, "gpus must be a number and a kind"),
        (["--config", "missing.yaml", "--gpus", "1xL4-24GB"], 2, "missing.yaml"),
        ([*CONFIG, "--gpus", "1xL4-24GB", "--model.dim", "x"], 2, "dim"),
    ],
)
def test_command_lines_that_cannot_work(arguments, status, message, capsys):
    assert main(["plan", *arguments]) == status
    assert message in capsys.readouterr().err
