"""Private names of Lightning, each of which does what its function in ``_private.lightning`` says."""

from datetime import timedelta

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint, RichProgressBar
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.plugins import MixedPrecision, TorchSyncBatchNorm
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.compile import from_compiled
from torchmetrics import MeanMetric

from lightning_accel._private import lightning as private


class Logging(BoringModel):
    """Log means of training and validation."""

    def __init__(self):
        super().__init__()
        self.mean = MeanMetric()

    def training_step(self, batch, batch_idx):
        self.mean(float(batch_idx))
        self.log("train/mean", self.mean, on_step=True, on_epoch=True)
        self.log("train/index", float(batch_idx), on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.log("val/index", float(batch_idx))


class Recorder(L.Callback):
    """Record values of functions at hooks, by their names."""

    def __init__(self, **at):
        self.at, self.seen = at, {}

    def _record(self, hook, trainer):
        if hook in self.at and hook not in self.seen:
            self.seen[hook] = self.at[hook](trainer)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 1:
            self._record("second_batch", trainer)

    def on_validation_start(self, trainer, pl_module):
        self._record("validation", trainer)

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 1:
            self._record("second_validation_batch", trainer)

    def on_validation_epoch_end(self, trainer, pl_module):
        self._record("validation_epoch_end", trainer)

    def on_train_epoch_end(self, trainer, pl_module):
        self._record("epoch_end", trainer)


def fit(*callbacks, module=None, **options):
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=1, limit_train_batches=3, limit_val_batches=2, num_sanity_val_steps=0,
        enable_progress_bar=False, enable_model_summary=False, callbacks=list(callbacks),
        **{"logger": False, "enable_checkpointing": False} | options,
    )  # fmt: skip
    trainer.fit(module or Logging())
    return trainer


def test_modules_with_a_trainer():
    module = BoringModel()
    assert not private.has_trainer(module)
    module.trainer = L.Trainer(logger=False, enable_checkpointing=False)
    assert private.has_trainer(module)
    module.trainer = None
    assert not private.has_trainer(module)


@pytest.mark.slow
def test_compiled_modules():
    module = BoringModel()
    assert not private.is_compiled(module)
    assert private.is_compiled(from_compiled(torch.compile(module)))


def test_names_of_metrics_are_found_again():
    def replace(trainer):
        assert trainer.lightning_module._metric_attributes == {id(module.mean): "mean"}
        private.forget_metric_names(module)
        module.mean = MeanMetric()

    module = Logging()
    at = Recorder(
        second_batch=replace, epoch_end=lambda trainer: module._metric_attributes == {id(module.mean): "mean"}
    )
    fit(at, module=module)  # log() raises for a metric whose name it does not find
    assert at.seen["epoch_end"]


def test_devices_of_modules():
    module = BoringModel()
    private.set_device(module, torch.device("meta"))
    assert module.device == torch.device("meta")
    assert module.layer.weight.device == torch.device("cpu")


def test_early_stopping_judges_a_value():
    callback = EarlyStopping("loss", patience=1, stopping_threshold=0.5)
    assert private.should_stop_early(callback, torch.tensor(1.0))[0] is False
    stops, reason = private.should_stop_early(callback, torch.tensor(0.1))
    assert stops
    assert "Stopping threshold reached" in reason


def test_averaged_models():
    callback = EMAWeightAveraging()
    assert private.averaged_model(callback) is None
    fit(callback)
    assert isinstance(private.averaged_model(callback).module, Logging)


def test_state_of_checkpoint_callbacks(tmp_path):
    keeper = ModelCheckpoint(tmp_path, save_last=True)
    assert (private.last_saved_step(keeper), private.last_saved_file(keeper)) == (0, "")
    trainer = fit(keeper, enable_checkpointing=True)
    assert private.last_saved_step(keeper) == 3
    assert private.last_saved_file(keeper) == keeper.last_model_path
    (tmp_path / "last.ckpt").unlink()
    private.save_last(keeper, trainer)
    assert (tmp_path / "last.ckpt").exists()
    private.set_last_saved_step(keeper, 7)
    private.set_last_saved_file(keeper, "file")
    assert (private.last_saved_step(keeper), private.last_saved_file(keeper)) == (7, "file")
    assert not private.waits_for_validation(keeper)


def test_a_step_that_was_saved_is_not_saved_again(tmp_path):
    class Saved(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            private.set_last_saved_step(keeper, 2)

    keeper = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)
    fit(Saved(), keeper, enable_checkpointing=True)
    assert not list(tmp_path.iterdir())


def test_a_save_waits_for_validation(tmp_path):
    class Waits(L.Callback):
        def on_validation_start(self, trainer, pl_module):
            private.set_waits_for_validation(keeper, True)

        def on_validation_end(self, trainer, pl_module):
            waited.append(private.waits_for_validation(keeper))

    waited = []
    keeper = ModelCheckpoint(tmp_path, monitor="val/index", every_n_epochs=99, save_on_train_epoch_end=False)
    fit(Waits(), keeper, enable_checkpointing=True)
    assert waited == [True]
    assert list(tmp_path.iterdir())  # by the wait alone
    assert not private.waits_for_validation(keeper)


@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
def test_versions_of_loggers(tmp_path, kind):
    logger = kind(tmp_path)
    assert private.given_version(logger) is None
    assert logger.version == private.given_version(logger) == 0
    private.set_version(logger, 5)
    assert logger.version == 5
    assert logger.log_dir.endswith("version_5")


@pytest.mark.slow
def test_a_subcommand_without_arguments(monkeypatch):
    monkeypatch.setattr("sys.argv", ["run"])

    class Empty(LightningCLI):
        def before_instantiate_classes(self):
            private.leave_subcommand_empty(self, "fit")

    options = [f"--trainer.{name}" for name in ("fast_dev_run=1", "accelerator=cpu", "enable_progress_bar=false")]
    args = ["fit", "--ckpt_path=missing.ckpt", *options]
    with pytest.raises(FileNotFoundError, match=r"missing\.ckpt"):
        LightningCLI(BoringModel, args=args, save_config_callback=None, seed_everything_default=0)
    cli = Empty(BoringModel, args=args, save_config_callback=None, seed_everything_default=0)
    assert cli.trainer.global_step == 1


@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
def test_copies_of_loggers_write_elsewhere(tmp_path, kind):
    logger = kind(tmp_path / "first", name="runs")
    copied = private.copy_into(logger, str(tmp_path / "second"))
    copied.log_metrics({"loss": 1.0}, 0)
    copied.save()
    assert not (tmp_path / "first").exists()
    assert any(path.is_file() for path in (tmp_path / "second").rglob("*"))


def test_default_folder(tmp_path):
    trainer = L.Trainer(logger=False, enable_checkpointing=False)
    private.set_default_folder(trainer, str(tmp_path))
    assert trainer.default_root_dir == str(tmp_path)


def test_flag_of_samplers():
    for flag in (True, False):
        trainer = L.Trainer(logger=False, enable_checkpointing=False, use_distributed_sampler=flag)
        assert private.distributes_samples_by_default(trainer) is flag


def test_settings_of_strategies():
    for kind in (DDPStrategy, ModelParallelStrategy):
        assert private.timeout_of(kind(timeout=timedelta(seconds=7))) == timedelta(seconds=7)
    for flag in (True, False):
        assert private.saves_sharded(ModelParallelStrategy(save_distributed_checkpoint=flag)) is flag
        assert private.saves_sharded(FSDPStrategy(state_dict_type="sharded" if flag else "full")) is flag
    assert not private.saves_sharded(DDPStrategy())
    assert private.ddp_options(DDPStrategy(bucket_cap_mb=3)) == {"bucket_cap_mb": 3}
    assert private.starts_scripts(DDPStrategy())
    assert not private.starts_scripts(DDPStrategy(start_method="fork"))
    assert private.starts_scripts(SingleDeviceStrategy())
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", logger=False, enable_checkpointing=False, sync_batchnorm=True
    )
    assert isinstance(private.layer_sync_of(trainer.strategy), TorchSyncBatchNorm)
    private.leave_layer_sync_out(trainer.strategy)
    assert private.layer_sync_of(trainer.strategy) is None


def test_names_of_queued_files_count_as_taken(tmp_path):
    class Queued(TorchCheckpointIO):
        def will_exist(self, path):
            return {"written": True, "removed": False}.get(path.name)

    private.count_queued_files()
    private.count_queued_files()
    for name in ("there", "removed"):
        (tmp_path / name).touch()
    keeper = ModelCheckpoint(tmp_path)
    for plugins, taken in (([Queued()], {"there", "written"}), ([], {"there", "removed"})):
        trainer = L.Trainer(accelerator="cpu", logger=False, plugins=plugins)
        names = ("there", "removed", "written", "absent")
        assert {name for name in names if keeper.file_exists(tmp_path / name, trainer)} == taken


def test_the_file_of_a_requeue_has_the_next_number(tmp_path):
    (tmp_path / "hpc_ckpt_3.ckpt").touch()
    trainer = L.Trainer(accelerator="cpu", logger=False, default_root_dir=tmp_path)
    assert private.requeue_path(trainer) == str(tmp_path / "hpc_ckpt_4.ckpt")


def test_saves_end_before_they_return_unless_a_model_checkpoint_asks(tmp_path):
    class Waits(TorchCheckpointIO):
        def finish(self, strategy):
            waited.append(strategy)

    class Saves(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx == 1:
                trainer.save_checkpoint(tmp_path / "mine")

    private.finish_other_saves()
    private.finish_other_saves()
    waited: list[int] = []
    keeper = ModelCheckpoint(tmp_path, every_n_train_steps=1)
    trainer = fit(Saves(), keeper, plugins=[Waits()], enable_checkpointing=True)
    assert waited == [trainer.strategy]
    trainer.state.status = TrainerStatus.INTERRUPTED
    trainer.save_checkpoint(tmp_path / "mine")
    assert waited == [trainer.strategy, None]


def test_hooks_of_a_step_are_called_and_gradients_clipped():
    class Precision(MixedPrecision):
        def optimizer_step(self, optimizer, model, closure, **kwargs):
            closure()
            private.call_step_hooks(self, model, optimizer)
            norms.append(torch.nn.utils.get_total_norm([one.grad for one in model.parameters()]).item())
            optimizer.step(**kwargs)

    class Called(L.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            called.append(optimizer)

    norms, called = [], []
    fit(Called(), plugins=[Precision("bf16-mixed", "cpu")], gradient_clip_val=1e-3)
    assert len(called) == 3
    assert norms == pytest.approx([1e-3] * 3, rel=1e-2)


def test_loaders_of_a_fit():
    def read(trainer):
        loop = trainer.fit_loop
        loaders = private.combined_loader_of(loop)
        assert isinstance(loaders, CombinedLoader)
        assert private.data_fetcher_of(loop).fetched == 2
        assert not private.restore_loaders(loop)
        loop._combined_loader_states_to_load, loop._restarting = [{}], True
        with pytest.raises(RuntimeError, match="0 stateful loaders, but found 1 states"):
            private.restore_loaders(loop)
        loop._combined_loader_states_to_load = []
        private.begin_without_restart(loop)
        return loaders.iterables is trainer.train_dataloader

    at, module = Recorder(second_batch=read), Logging()
    trainer = fit(at, module=module)
    assert at.seen["second_batch"]
    source = private.data_source_of(trainer.fit_loop)
    assert source.instance is module
    assert source.is_defined()
    assert len(source.dataloader()) == len(module.train_dataloader())


def test_what_is_logged_during_a_fit():
    def in_training(trainer):
        results = private.results_of(trainer.fit_loop.epoch_loop)
        connector = private.logger_connector(trainer)
        index = results["training_step.train/index"]
        assert private.forward_value_of(index) == 1
        assert (index.value, index.cumulated_batch_size) == (1, 2)
        hook = private.logged_hook(connector)
        private.set_logged_hook(connector, "on_train_batch_end")
        assert (hook, private.logged_hook(connector)) == ("training_step", "on_train_batch_end")
        assert [type(getattr(connector, name)) for name in private.FIGURES] == [dict] * 3
        made = private.make_result(
            {name: getattr(index.meta, name) for name in OPTIONS},
            torch.mean,
            trainer.strategy.reduce,
            {"_should": False, "rank_zero_only": False, "_op": "mean"},
            True,
        )
        made.update(torch.tensor(3.0), 2)
        made.update(torch.tensor(6.0), 1)
        assert made.meta.is_mean_reduction
        return made.compute()

    def in_validation(trainer):
        loop = trainer.fit_loop.epoch_loop.val_loop
        assert private.seen_batches_of(loop)[0] in (1, 2)
        assert not private.has_logged_outputs(loop)
        return set(private.results_of(loop))

    at = Recorder(
        second_batch=in_training,
        second_validation_batch=in_validation,
        validation_epoch_end=lambda trainer: private.has_logged_outputs(trainer.fit_loop.epoch_loop.val_loop),
        epoch_end=lambda trainer: private.logger_connector(trainer).metrics["callback"],
    )
    fit(at)
    assert at.seen["second_batch"] == 4
    assert at.seen["validation_epoch_end"]
    assert at.seen["second_validation_batch"] == {"validation_step.val/index"}
    assert set(at.seen["epoch_end"]) >= {"train/mean_epoch", "train/index_epoch"}


OPTIONS = (
    "fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx", "dataloader_idx",
    "metric_attribute",
)  # fmt: skip


def test_first_batch_of_a_loop():
    def read(trainer):
        connector = private.logger_connector(trainer)
        before = connector._first_loop_iter
        private.set_first_batch(connector, None)
        connector.on_batch_start(None)
        return before, connector._first_loop_iter

    at = Recorder(second_batch=read)
    fit(at)
    assert at.seen["second_batch"] == (False, True)


def test_end_of_batches():
    at = Recorder(
        second_batch=lambda trainer: private.has_read_all_batches(trainer.fit_loop.epoch_loop),
        epoch_end=lambda trainer: private.has_read_all_batches(trainer.fit_loop.epoch_loop),
    )
    fit(at)
    assert at.seen == {"second_batch": False, "epoch_end": True}


@pytest.mark.parametrize("has_length", [True, False])
def test_an_epoch_without_end(has_length):
    seen = []

    class Repeating(L.Callback):
        def on_train_start(self, trainer, pl_module):
            private.repeat_batches(trainer.fit_loop, lambda batch: batch[0, 0] != 2, 9)

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            seen.append((batch_idx, float(batch[0, 0]), trainer.is_last_batch, trainer.current_epoch))

    class Counting(torch.utils.data.IterableDataset):
        def __iter__(self):
            return (torch.full((32,), float(number)) for number in range(3))

    data = Counting() if not has_length else [torch.full((32,), float(number)) for number in range(3)]
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(accelerator="cpu", max_steps=5, enable_model_summary=False, callbacks=[Repeating()], **quiet)
    trainer.fit(BoringModel(), torch.utils.data.DataLoader(data))
    assert seen == [(index, float(index % 2), False, 0) for index in range(5)]


def test_restarts_of_loops():
    trainer = fit()
    loop = trainer.fit_loop
    _loop_type = type(loop).__mro__[1]
    for one in (loop, loop.epoch_loop):
        _loop_type.restarting.fset(one, True)
    assert loop.epoch_loop.val_loop.restarting
    private.begin_without_restart(loop, loop.epoch_loop, loop.epoch_loop.val_loop)
    assert not any(one.restarting for one in (loop, loop.epoch_loop, loop.epoch_loop.val_loop))
    private.restart_within_epoch(loop)
    assert loop.restarted_mid_epoch
    for keeps in (True, False):
        private.end_restart(loop, keeps)
        assert loop.is_resuming is keeps
    assert not loop._loaded_from_state_dict


def test_a_validation_is_skipped():
    class Skip(L.Callback):
        def on_train_start(self, trainer, pl_module):
            private.skip_next_validation(trainer.fit_loop.epoch_loop)

    at = Recorder(validation=lambda trainer: trainer.global_step)
    fit(Skip(), at, val_check_interval=1)
    assert at.seen == {"validation": 2}  # not after the first step


def test_rows_of_the_step_before():
    loop = fit().fit_loop.epoch_loop
    with private.in_step_before(loop):
        assert loop._batches_that_stepped == 2
    assert loop._batches_that_stepped == 3


@pytest.mark.parametrize(("options", "last"), [({"max_steps": 7}, ""), ({"max_epochs": 7}, "/6")])
def test_the_bar_of_a_run_that_steps_end_names_no_last_epoch(options, last):
    trainer = L.Trainer(callbacks=[RichProgressBar()], logger=False, **options)
    bar = trainer.progress_bar_callback
    bar._trainer = trainer
    private.omit_unknown_epochs(trainer)
    trainer.fit_loop.max_epochs = trainer.max_epochs or -1  # as a fit does
    assert bar._get_train_description(3).strip() == f"Epoch 3{last}"
