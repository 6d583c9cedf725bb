import copy
import functools
import math
import threading
import types

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_accel import Classifier, DigitsDataModule, MoEClassifier
from lightning_accel.callbacks import CompressionReport, Export, OneShotPruning, Quantization
from lightning_accel.callbacks.deployment.copies import WholeCopy, in_float32, run_in_first_process
from lightning_accel.callbacks.deployment.deployed import Deployed, evaluate, find_deployed, part_to_name
from lightning_accel.callbacks.deployment.loaders import undistributed
from lightning_accel.data import LengthBatchSampler, length_batch_loader
from tests.ranks import run_ranks
from tests.strategies.trained import Plain, make

ROWS = TensorDataset(torch.randn(20, 6), torch.arange(20) % 3)


class Own(L.LightningModule):
    """Calls its network, never itself; has a teacher that the network does not need, and a metric."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
        self.accuracy = MulticlassAccuracy(3, average="micro")
        self.register_buffer("shift", torch.randn(6), persistent=False)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0] + self.shift), batch[1])

    def validation_step(self, batch, batch_idx):
        scores = self.net(batch[0] + self.shift)
        self.accuracy(scores, batch[1])
        self.log("val/loss", nn.functional.cross_entropy(scores, batch[1]))
        self.log("val/accuracy", self.accuracy)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Tied(Own):
    """Has one weight, and one buffer, in two places."""

    def __init__(self):
        super().__init__()
        self.other = nn.Linear(6, 5)
        self.other.weight = self.net[0].weight
        self.other.register_buffer("shift", self.shift)


class CopyAtEnd(L.Callback):
    def setup(self, trainer, pl_module, stage):
        self.copy = WholeCopy(pl_module)

    def on_fit_end(self, trainer, pl_module):
        self.made = self.copy.make(trainer, pl_module)


class Lasting(Own):
    """Keeps its last loss, which knows the graph that it came from."""

    def training_step(self, batch, batch_idx):
        self.last = {"loss": super().training_step(batch, batch_idx)}
        return self.last["loss"]


def test_copy_of_a_module_that_keeps_a_result():
    module = Lasting()
    made, _ = fit(module, DataLoader(ROWS, 5))
    assert made.last["loss"].grad_fn is None
    assert made.last["loss"].item() == module.last["loss"].item()


def test_what_cannot_be_copied_is_told_before_training():
    module = Own()
    module.lock = threading.Lock()
    with pytest.raises(
        TypeError, match=r"Own cannot be copied \(TypeError: cannot pickle '_thread.lock' object\), which"
    ):
        fit(module, DataLoader(ROWS, 5))


@pytest.mark.parametrize("precision", ["bf16-true", "64-true", "16-true"])
def test_what_a_precision_cast_takes_batches_of_loaders_in_the_end(precision):
    class Evaluate(L.Callback):
        def setup(self, trainer, pl_module, stage):
            self.copy = WholeCopy(pl_module)

        def on_fit_end(self, trainer, pl_module):
            def use(made):
                self.dtype, self.figures = made.net[0].weight.dtype, evaluate(made, DataLoader(ROWS, 5))

            run_in_first_process(trainer, lambda: self.copy.make(trainer, pl_module), use, "evaluate")

    evaluated, module = Evaluate(), Own()
    fit(module, DataLoader(ROWS, 5), callbacks=[evaluated], precision=precision)
    assert evaluated.dtype == torch.float32
    assert evaluated.figures["val/loss"] > 0
    assert module.net[0].weight.dtype == {"b": torch.bfloat16, "6": torch.float64, "1": torch.float16}[precision[0]]
    double = Own().double()  # by its author
    assert in_float32(L.Trainer(accelerator="cpu", logger=False), double).net[0].weight.dtype == torch.float64


def fit(module, data, callbacks=(), **options):
    keeper = CopyAtEnd()
    trainer = L.Trainer(
        accelerator="cpu", max_steps=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[keeper, *callbacks], **options,
    )  # fmt: skip
    trainer.fit(module, data)
    return keeper.made, trainer


def test_copy_has_the_weights_and_no_trainer():
    module = Own()
    made, _ = fit(module, DataLoader(ROWS, 5))
    torch.testing.assert_close(made.state_dict(), module.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(made.shift, module.shift, rtol=0, atol=0)
    assert made._trainer is None
    assert not made.training
    assert module._trainer is not None
    assert made.net[0].weight is not module.net[0].weight


@pytest.mark.sampled(default=1)
@pytest.mark.parametrize(
    "optimizer", [[], ["--model.optimizer=SGD", "--model.optimizer.lr=0.1"]], ids=["default", "given"]
)
def test_copy_leaves_what_leads_to_the_whole_run(command, run_folder, optimizer):
    """The partial function that jsonargparse gives for an optimizer holds all objects of the run."""
    (run_folder / "own_callback.py").write_text(OWN_CALLBACK)
    quiet = ["--trainer.accelerator=cpu", "--trainer.logger=false", "--trainer.enable_progress_bar=false"]
    data = ["--data=DigitsDataModule", "--trainer.max_epochs=1", "--trainer.limit_train_batches=1"]
    callback = "--trainer.callbacks+=own_callback.Uncopied"
    result = command("fit", "--model=Classifier", *optimizer, *quiet, *data, callback)
    assert result.status == 0, result.err


OWN_CALLBACK = """
import copy
import functools
import math
import threading
import types

import lightning as L
from lightning_accel.callbacks.deployment.copies import WholeCopy


class Uncopied(L.Callback):
    lock = None

    def setup(self, trainer, pl_module, stage):
        self.lock = threading.Lock()
        self.copy = WholeCopy(pl_module)

    def on_fit_end(self, trainer, pl_module):
        copy.deepcopy(self.copy.make(trainer, pl_module))
"""


def check_copy_of_a_sharded_module_is_whole(rank):
    torch.manual_seed(0)
    module = Tied()
    made, trainer = fit(module, DataLoader(ROWS, 5), strategy="accel_fsdp2", devices=2)
    state = {name: value.full_tensor() if hasattr(value, "full_tensor") else value
             for name, value in module.state_dict().items()}  # fmt: skip
    if rank:
        assert made is None
        return None
    torch.testing.assert_close(made.state_dict(), state, rtol=0, atol=0)
    torch.testing.assert_close(made.shift, module.shift, rtol=0, atol=0)
    assert made.other.weight is made.net[0].weight
    loader = trainer.train_dataloader
    return [find_deployed(made, one, num_batches=9).inputs for one in (loader, undistributed(loader))]


@pytest.mark.slow
def test_copy_of_a_sharded_module_is_whole():
    """And is run on all rows of a loader that deals them to processes."""
    (own, everything), _ = run_ranks(check_copy_of_a_sharded_module_is_whole)
    assert sum(len(args[0]) for args, _ in own) == 10
    assert sum(len(args[0]) for args, _ in everything) == 20


def test_copy_of_the_start_has_as_many_weights():
    module = Tied()
    start = WholeCopy(module).with_original_shapes()
    assert start.other.weight is start.net[0].weight
    assert start.other.shift is start.shift
    assert {name: one.shape for name, one in start.named_parameters()} == {
        name: one.shape for name, one in module.named_parameters()
    }


def check_split_modules_are_refused(rank):
    messages = []
    for callback in (Export(), Quantization("dynamic"), CompressionReport(), OneShotPruning()):
        module, data = make("language_model")
        trainer = L.Trainer(accelerator="cpu", devices=2, max_steps=1, logger=False, enable_checkpointing=False,
                            strategy=ModelParallelStrategy(tensor_parallel_size=2), callbacks=[callback])  # fmt: skip
        with pytest.raises(TypeError) as caught:
            trainer.fit(module, DataLoader(data, 4))
        messages.append(str(caught.value))
    return messages


@pytest.mark.slow
def test_split_modules_are_refused_before_training():
    """A copy in one process would wait for the others for ever."""
    for messages in run_ranks(check_split_modules_are_refused):
        assert len(messages) == 4
        assert all("configure_model of MoELanguageModel splits its weights over processes" in one for one in messages)


def check_copy_of_layers_that_the_datamodule_sizes(rank):
    made, trainer = fit(MoEClassifier(), DigitsDataModule(), strategy="accel_fsdp2", devices=2)
    if rank == 0:
        assert find_deployed(made, trainer.val_dataloaders).name == ""


@pytest.mark.slow
def test_copy_of_layers_that_the_datamodule_sizes():
    run_ranks(check_copy_of_layers_that_the_datamodule_sizes)


def check_copy_of_a_pipeline_is_whole(rank):
    module = Plain()
    made, trainer = fit(module, DataLoader(TensorDataset(torch.randn(16, 5), torch.arange(16) % 3), 8),
                        strategy="accel_pipeline", devices=2)  # fmt: skip
    state = trainer.strategy.lightning_module_state_dict()
    if rank == 0:
        torch.testing.assert_close(made.state_dict(), state, rtol=0, atol=0)


@pytest.mark.slow
def test_copy_of_a_pipeline_is_whole():
    run_ranks(check_copy_of_a_pipeline_is_whole)


@pytest.mark.parametrize("name", [None, "net", "net.0"])
def test_what_is_called_is_deployed_with_its_inputs(name):
    module = Own()
    deployed = find_deployed(module, DataLoader(ROWS, 8), name=name, num_batches=2)
    assert deployed.name == (name or "net")
    assert deployed.module is module.get_submodule(deployed.name)
    assert [args[0].shape for args, _ in deployed.inputs] == [(8, 6), (8, 6)]
    torch.testing.assert_close(deployed.inputs[1][0][0], ROWS.tensors[0][8:16] + module.shift)
    assert not any(one._forward_pre_hooks for one in module.modules())


def check_planned_batches_are_whole(rank):
    sampler = LengthBatchSampler([3, 1, 4, 1, 5, 9, 2, 6], batch_size=4)
    loader = length_batch_loader(list(range(8)), sampler, collate_fn=list)
    return list(map(len, loader)), list(map(len, undistributed(loader)))


@pytest.mark.slow
def test_planned_batches_are_whole():
    for own, everything in run_ranks(check_planned_batches_are_whole):
        assert own == [2, 2]
        assert everything == [4, 4]


def test_a_module_that_calls_itself_is_deployed_whole():
    datamodule = DigitsDataModule(batch_size=16)
    datamodule.setup()
    for module in (Classifier(), MoEClassifier(64, 10)):
        deployed = find_deployed(module, datamodule.val_dataloader(), datamodule=datamodule)
        assert deployed.name == ""
        assert deployed.inputs[0][0][0].shape == (16, 1, 8, 8)


def test_figures_are_those_of_a_loop_and_of_what_runs_instead():
    module = Own().eval()
    x, target = ROWS.tensors
    scores = module.net(x + module.shift)
    figures = evaluate(module, DataLoader(ROWS, 5))
    assert figures["val/accuracy"] == pytest.approx(scores.argmax(1).eq(target).float().mean().item())
    assert figures["val/loss"] == pytest.approx(nn.functional.cross_entropy(scores, target).item(), rel=1e-5)
    other = copy.deepcopy(module.net)
    nn.init.zeros_(other[2].weight)
    nn.init.zeros_(other[2].bias)
    assert evaluate(module, DataLoader(ROWS, 5), "net", other)["val/loss"] == pytest.approx(math.log(3), rel=1e-5)
    assert evaluate(module, DataLoader(ROWS, 5)) == pytest.approx(figures)
    assert evaluate(module, DataLoader(ROWS, 5), limit_batches=1) != pytest.approx(figures)


def test_augmentation_of_training_does_not_reach_the_figures():
    datamodule = DigitsDataModule(batch_size=64, max_shift=7)
    module = Classifier()
    made, trainer = fit(module, datamodule)
    trainer.state.stage = "train"
    figures = [evaluate(made, datamodule.val_dataloader(), datamodule=datamodule) for _ in range(2)]
    assert figures[0] == figures[1]
    assert datamodule.trainer is trainer


class Scaled(Own):
    """Log a figure in a unit that the datamodule knows."""

    def setup(self, stage):
        self.unit = getattr(self.trainer.datamodule, "unit", None)

    def validation_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        if self.unit is not None:
            self.log("val/scaled", loss * self.unit)


class WithUnit(L.LightningDataModule):
    unit = 2.0


def test_figures_may_depend_on_attributes_of_the_datamodule():
    figures = evaluate(Scaled(), DataLoader(ROWS, 5), datamodule=WithUnit())
    assert figures.keys() == {"val/scaled"}
    assert evaluate(Scaled(), DataLoader(ROWS, 5)) == {}


def test_copies_run_the_step_without_what_callbacks_put_around_it():
    module = Own()
    inner = module.training_step

    def double(*args):
        return 2 * inner(*args)

    module.training_step = functools.wraps(inner)(double)
    made = WholeCopy(module).make(L.Trainer(accelerator="cpu", logger=False), module)
    assert "training_step" not in vars(made)
    own = types.MethodType(lambda self, batch, number: self, module)  # set by somebody else, and wrapped
    module.training_step = functools.wraps(own)(lambda *args: None)
    made = WholeCopy(module).make(L.Trainer(accelerator="cpu", logger=False), module)
    assert made.training_step(None, 0) is made


def test_what_cannot_be_deployed_is_refused():
    class Silent(Own):
        def validation_step(self, batch, batch_idx):
            self.log("val/loss", (batch[0] @ self.net[0].weight.T).sum())

    with pytest.raises(ValueError, match=r"calls no module.*module='network'"):
        find_deployed(Silent(), DataLoader(ROWS, 5))
    listed = Own()
    listed.parts = nn.ModuleList([listed.net])
    with pytest.raises(ValueError, match=r"does not call 'parts', a ModuleList, so that it has no inputs"):
        find_deployed(listed, DataLoader(ROWS, 5), name="parts")
    assert (
        part_to_name(Deployed("", nn.ModuleList([listed]), [], {}), "Export")
        == ". Export(module='0') would take the part with most parameters"
    )
    assert part_to_name(Deployed("", nn.ModuleDict({"all": listed.parts}), [], {}), "Export") == ""
    with pytest.raises(ValueError, match=r"no submodule .nett..*net, accuracy"):
        find_deployed(Own(), DataLoader(ROWS, 5), name="nett")
    with pytest.raises(TypeError, match="LightningModule needs a validation_step"):
        evaluate(L.LightningModule(), DataLoader(ROWS, 5))
