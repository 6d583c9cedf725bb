"""Each resumed run is compared, bit for bit, with the one that was not stopped: rows, draws, weights, optimizer."""

# ruff: noqa: NPY002  # the global generator is what is restored

import random
import warnings
from functools import partial

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    TensorDataset,
    WeightedRandomSampler,
)

from lightning_accel.callbacks import ExactResume
from lightning_accel.data.samplers import ResumableLoader, ResumableSampler, progress_of
from lightning_accel.nn import RBM, ContrastiveDivergence
from lightning_accel.strategies import PipelineStrategy
from tests.ranks import run_ranks

ROWS = 22  # 6 batches of 4, the last of 2


class Noisy(L.LightningModule):
    """Knows nothing of us, and draws from every generator, in hooks that only a resumed run calls, too."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.rows, self.draws = [], []

    def on_train_start(self):
        torch.rand(3), np.random.rand(3), random.random()

    def on_train_epoch_start(self):
        torch.rand(1)

    def training_step(self, batch, batch_idx):
        x, number = batch
        self.rows.append(sorted(number.view(-1).tolist()))
        self.draws.append((torch.rand(1).item(), np.random.rand(), random.random()))
        return self.net(x).square().mean() * (1 + self.draws[-1][1])

    def validation_step(self, batch, batch_idx):
        torch.rand(1)
        self.log("val/loss", self.net(batch[0]).square().mean(), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class CountsItsSteps(Noisy):
    """Has the Trainer make its loaders before the checkpoint is read."""

    def configure_optimizers(self):
        assert self.trainer.estimated_stepping_batches > 0
        return super().configure_optimizers()


class Rows(Dataset):
    """Adds noise of the global generators when a row is fetched."""

    def __len__(self):
        return ROWS

    def __getitem__(self, number):
        generator = torch.Generator().manual_seed(number)
        return torch.randn(3, generator=generator) + 0.01 * torch.rand(3) * np.random.rand(), torch.tensor(number)


class Quiet(Rows):
    def __getitem__(self, number):
        return torch.randn(3, generator=torch.Generator().manual_seed(number)), torch.tensor(number)


class LazyBatches:
    """A sampler of somebody else's, which draws for every batch."""

    def __len__(self):
        return 5

    def __iter__(self):
        for _ in range(5):
            yield np.random.randint(0, ROWS, 4).tolist()


def shuffled(**options):
    return DataLoader(Rows(), batch_size=4, shuffle=True, **options)


LOADERS = {
    "shuffled": shuffled,
    "own generator": lambda: shuffled(generator=torch.Generator().manual_seed(3)),
    "in order": lambda: DataLoader(Rows(), batch_size=4),
    "weighted": lambda: DataLoader(
        Rows(), batch_size=4, drop_last=True, sampler=WeightedRandomSampler(torch.arange(1.0, ROWS + 1), ROWS)
    ),
    "row by row": lambda: DataLoader(Rows(), batch_size=None, shuffle=True),
    "lazy batches": lambda: DataLoader(Rows(), batch_sampler=LazyBatches()),
    "workers": lambda: DataLoader(Quiet(), batch_size=4, shuffle=True, num_workers=1),
    "one with a state of its own": lambda: ResumableLoader(
        Quiet(), batch_size=4, sampler=ResumableSampler(Quiet(), 4, num_replicas=1, rank=0, seed=5)
    ),
    "two of different length": lambda: [shuffled(), DataLoader(Quiet(), batch_size=8, shuffle=True)],
}


class SaveAt(Callback):
    def __init__(self, folder, moments):
        self.folder, self.moments = folder, moments

    def save(self, trainer, moment):
        if moment in self.moments and not trainer.sanity_checking:
            trainer.save_checkpoint(self.folder / f"{moment}.ckpt")

    def on_train_batch_end(self, trainer, *_):
        self.save(trainer, f"step {trainer.fit_loop.epoch_loop.total_batch_idx + 1}")

    def on_validation_end(self, trainer, *_):
        self.save(trainer, f"validation {trainer.fit_loop.epoch_loop.total_batch_idx + 1}")

    def on_train_epoch_end(self, trainer, *_):
        self.save(trainer, f"epoch {trainer.current_epoch + 1}")


def fit(folder, module=Noisy, loader=shuffled, moments=(), resume=None, exact=True, **options):
    torch.manual_seed(7 if resume is None else 99)  # a resumed process begins with other numbers
    np.random.seed(8 if resume is None else 98)
    random.seed(9 if resume is None else 97)
    torch.rand(5 if resume is None else 2)
    model = module()
    trainer = L.Trainer(
        **{"accelerator": "cpu", "devices": 1, "max_epochs": 3, "logger": False, "enable_model_summary": False}
        | {"enable_progress_bar": False, "default_root_dir": folder, "enable_checkpointing": False}
        | options,
        callbacks=[SaveAt(folder, moments), *([ExactResume()] if exact else [])],
    )
    train = loader()
    if isinstance(train, ResumableLoader):
        train.progress = progress_of(trainer)
    if isinstance(train, list):
        model.training_step = lambda batch, batch_idx: Noisy.training_step(
            model, [torch.cat(parts) for parts in zip(*batch, strict=True)], batch_idx
        )
    validation = DataLoader(TensorDataset(torch.ones(6, 3)), batch_size=3)
    trainer.fit(model, train, validation, ckpt_path=resume)
    return model


def assert_goes_on(resumed, whole, moment=""):
    count = len(resumed.rows)
    assert 0 < count < len(whole.rows)
    assert resumed.rows == whole.rows[-count:], f"{moment}: {resumed.rows} is not the end of {whole.rows}"
    assert resumed.draws == whole.draws[-count:], moment
    assert_same_end(resumed, whole)


def assert_same_end(resumed, whole):
    for name, tensor in whole.state_dict().items():
        assert local(tensor).equal(local(resumed.state_dict()[name])), name
    ours, theirs = (model.optimizers().state_dict() for model in (resumed, whole))
    for group in (*ours["param_groups"], *theirs["param_groups"]):
        group["betas"] = tuple(group["betas"])  # FSDP2 makes a list of them
    assert ours["param_groups"] == theirs["param_groups"]
    for index, state in theirs["state"].items():
        assert all(local(value).equal(local(ours["state"][index][name])) for name, value in state.items())


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


MOMENTS = ["step 1", "step 3", "validation 3", "step 6", "validation 6", "epoch 1", "step 7", "step 10", "step 12"]


EPOCHS, STEPS = {"max_epochs": 3}, {"max_steps": 17}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "limit"),
    [(Noisy, EPOCHS), (CountsItsSteps, STEPS),
     pytest.param(Noisy, STEPS, marks=pytest.mark.slow), pytest.param(CountsItsSteps, EPOCHS, marks=pytest.mark.slow)],
)  # fmt: skip
def test_every_moment_of_saving(tmp_path, module, limit):
    whole = fit(tmp_path, module, moments=MOMENTS, val_check_interval=3, **limit)
    for moment in MOMENTS:
        resumed = fit(tmp_path, module, resume=tmp_path / f"{moment}.ckpt", val_check_interval=3, **limit)
        assert_goes_on(resumed, whole, moment)


@pytest.mark.sampled(slow=6)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("loader", "module"),
    [pytest.param(loader, module, id=f"{name}-{module.__name__}",
                  marks=[] if module is Noisy and name in ("shuffled", "lazy batches") else [pytest.mark.slow])
     for name, loader in LOADERS.items() for module in (Noisy, CountsItsSteps)],
)  # fmt: skip
def test_every_kind_of_loader(tmp_path, loader, module):
    moments = ["step 2", "step 4", "step 8", "epoch 1"]
    whole = fit(tmp_path, module, loader, moments)
    for moment in moments:
        assert_goes_on(fit(tmp_path, module, loader, resume=tmp_path / f"{moment}.ckpt"), whole, moment)
    if loader is not LOADERS["in order"] and loader is not LOADERS["two of different length"]:
        assert whole.rows[0] != whole.rows[len(whole.rows) // 3], "each epoch has an order of its own"


@pytest.mark.slow
def test_accumulated_gradients_and_a_second_stop(tmp_path):
    options = {"accumulate_grad_batches": 2, "limit_train_batches": 5}
    whole = fit(tmp_path, moments=["step 4"], **options)
    second = fit(tmp_path, moments=["step 9", "step 5"], resume=tmp_path / "step 4.ckpt", **options)
    assert_goes_on(second, whole)
    assert_goes_on(fit(tmp_path, resume=tmp_path / "step 5.ckpt", **options), whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "module"),
    [("shuffled", CountsItsSteps), ("one with a state of its own", Noisy),
     pytest.param("shuffled", Noisy, marks=pytest.mark.slow),
     pytest.param("one with a state of its own", CountsItsSteps, marks=pytest.mark.slow)],
)  # fmt: skip
def test_a_run_that_ended_within_an_epoch_is_given_more_steps(tmp_path, module, name):
    loader = LOADERS[name]
    whole = fit(tmp_path, module, loader, max_steps=17)
    ended = fit(tmp_path, module, loader, ["epoch 2"], max_steps=8)
    ended.trainer.save_checkpoint(tmp_path / "afterwards.ckpt")
    for moment in ("epoch 2", "afterwards"):
        moments = ["step 10", "step 14"]
        resumed = fit(tmp_path, module, loader, moments, resume=tmp_path / f"{moment}.ckpt", max_steps=17)
        assert_goes_on(resumed, whole, moment)
        for later in moments:
            resumed = fit(tmp_path, module, loader, resume=tmp_path / f"{later}.ckpt", max_steps=17)
            assert_goes_on(resumed, whole, f"{moment}, then {later}")


def test_each_epoch_visits_every_row(tmp_path):
    whole = fit(tmp_path, max_epochs=2)
    for epoch in (whole.rows[:6], whole.rows[6:]):
        assert sorted(row for batch in epoch for row in batch) == list(range(ROWS))


def test_the_loader_gets_its_sampler_back(tmp_path):
    loader = shuffled()
    sampler = loader.batch_sampler
    fit(tmp_path, loader=lambda: loader, max_epochs=1)
    assert loader.batch_sampler is sampler
    assert loader.generator is None


class Stream(IterableDataset):
    def __iter__(self):
        return iter(Quiet())


@pytest.mark.filterwarnings("default")
def test_a_stream_without_a_state_is_told(tmp_path, recwarn):
    options = {"loader": lambda: DataLoader(Stream(), batch_size=4), "max_epochs": 1, "limit_train_batches": 2}
    fit(tmp_path, moments=["step 1"], **options)
    assert "starts the Stream from its beginning, since it has no indices. Give" in messages(recwarn)
    assert "began anew" not in messages(recwarn)
    fit(tmp_path, resume=tmp_path / "step 1.ckpt", **options)
    assert "the Stream began anew within the epoch. Rows of it are trained on again" in messages(recwarn)


@pytest.mark.filterwarnings("default")
def test_a_checkpoint_of_a_run_without_it_is_told(tmp_path, recwarn):
    fit(tmp_path, moments=["step 2"], exact=False, max_epochs=1)
    fit(tmp_path, resume=tmp_path / "step 2.ckpt", max_epochs=1)
    assert "written without this callback" in messages(recwarn)


def messages(recwarn):
    return "\n".join(str(warning.message) for warning in recwarn)


class Sharded(Noisy):
    def configure_model(self):
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


STRATEGIES = {
    "ddp": (Noisy, DDPStrategy),
    "ddp, loaders before the checkpoint": (CountsItsSteps, DDPStrategy),
    "fsdp2, whole file": (Sharded, lambda: ModelParallelStrategy(save_distributed_checkpoint=False)),
    "fsdp2, folder": (Sharded, ModelParallelStrategy),
}


def check_ranks(rank, folder, name):
    module, strategy = STRATEGIES[name]
    options = {"devices": 2, "val_check_interval": 2}
    moments = ["step 1", "step 2", "validation 2", "step 3", "epoch 1", "step 4"]
    for limit in ({"max_epochs": 3}, {"max_steps": 8}):
        whole = fit(folder, module, moments=moments, strategy=strategy(), **options, **limit)
        for moment in moments:
            resumed = fit(folder, module, resume=folder / f"{moment}.ckpt", strategy=strategy(), **options, **limit)
            assert_goes_on(resumed, whole, f"{moment} {limit}")


@pytest.mark.sampled(slow=2)
@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
def test_every_rank_goes_on(tmp_path, name):
    run_ranks(check_ranks, tmp_path, name)


def check_rows_on(rank, folder, devices, resume=None):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        options = {"strategy": "ddp"} if devices > 1 else {}
        model = fit(folder, moments=["step 1"], resume=resume, max_epochs=2, devices=devices, **options)
    return model.rows, "\n".join(str(warning.message) for warning in caught)


@pytest.mark.slow
def test_other_numbers_of_processes_go_on_in_the_order(tmp_path):
    before = run_ranks(check_rows_on, tmp_path, 4, world_size=4)
    done = {row for rows, _ in before for row in rows[0]}
    assert len(done) == 16
    after = run_ranks(check_rows_on, tmp_path / "two", 2, tmp_path / "step 1.ckpt")
    assert done.isdisjoint(rest := [row for rows, _ in after for row in rows[0]])
    assert len(done) + len(rest) == ROWS
    told = after[0][1]
    assert "written by 4 processes, this run has 2. Drawn anew: dropout and other random numbers of some" in told
    assert "order of batches" not in told
    assert "second time" not in told
    _, told = check_rows_on(None, tmp_path / "one", 1, tmp_path / "step 1.ckpt")
    assert (
        "this run has 1. Drawn anew: dropout and other random numbers of some processes; the order of batches" in told
    )


def check_noise(rank, folder, strategy):
    torch.manual_seed(3)
    return [fit(folder / str(again), max_epochs=1, devices=2, strategy=strategy()).draws for again in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "is_shared"), [(DDPStrategy, False), (PipelineStrategy, True)])
def test_processes_on_different_rows_draw_different_numbers(tmp_path, strategy, is_shared):
    (first, first_again), (second, second_again) = run_ranks(check_noise, tmp_path, strategy)
    assert first == first_again
    assert second == second_again
    assert (first[0] == second[0]) is is_shared  # later ones follow the dropout of the layers that are there


class Density(L.LightningModule):
    """Holds chains, and does not know that they should be kept."""

    def __init__(self):
        super().__init__()
        self.rbm = RBM(3, 2)
        self.sampling = ContrastiveDivergence(num_chains=4)

    def training_step(self, batch, batch_idx):
        return self.sampling(self.rbm, batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


def check_chains(rank, folder):
    def run(max_steps, ckpt_path=None):
        torch.manual_seed(3)
        module = Density()
        trainer = L.Trainer(
            accelerator="cpu", strategy="ddp", devices=2, max_steps=max_steps, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, callbacks=[ExactResume()],
        )  # fmt: skip
        rows = TensorDataset(torch.arange(36).view(12, 3).remainder(5).float() / 4)
        trainer.fit(module, DataLoader(rows, batch_size=2, shuffle=True), ckpt_path=ckpt_path)
        return trainer, module

    _, whole = run(5)
    half, _ = run(2)
    half.save_checkpoint(folder / "half.ckpt")
    _, resumed = run(5, folder / "half.ckpt")
    for name, value in whole.sampling.state_dict().items():
        assert value.equal(resumed.sampling.state_dict()[name]), name
    assert whole.rbm.weight.equal(resumed.rbm.weight)
    return whole.sampling.chains


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_chains_of_every_process_go_on(run_folder):
    first, second = run_ranks(check_chains, run_folder)
    assert not first.equal(second)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore:.*LeafSpec:FutureWarning")
def test_a_checkpoint_can_be_validated(run_folder):
    options = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    rows = DataLoader(Rows(), batch_size=4)
    first = L.Trainer(max_steps=2, enable_checkpointing=False, callbacks=[ExactResume()], **options)
    first.fit(Noisy(), rows)
    first.save_checkpoint("two.ckpt")
    (figures,) = L.Trainer(callbacks=[ExactResume()], **options).validate(Noisy(), rows, ckpt_path="two.ckpt")
    assert "val/loss" in figures


class Reloading(Noisy):
    """Makes its loaders anew, or gives the same one again."""

    def train_dataloader(self):
        return shuffled()


class HeldByOrder(Callback):
    def __init__(self, exact):
        self.exact, self.held = exact, []

    def on_train_epoch_end(self, trainer, pl_module):
        self.held.append(len(self.exact._samplers))


class SeededAtItsStart(CountsItsSteps):
    """Has a sampler like the Trainer's for several processes, with a seed of this start."""

    def __init__(self, seed):
        super().__init__()
        self.seed = seed

    def train_dataloader(self):
        sampler = DistributedSampler(Quiet(), num_replicas=1, rank=0, seed=self.seed)
        return DataLoader(Quiet(), batch_size=4, sampler=sampler)


class ReadsLate(SingleDeviceStrategy):
    """Reads the checkpoint after optimizers, and here loaders, are made, as strategies that shard do."""

    restore_checkpoint_after_setup = True


@pytest.mark.parametrize("strategy", [SingleDeviceStrategy, ReadsLate])
def test_distributed_samplers_keep_the_seed_of_the_first_start(tmp_path, strategy):
    options = {"loader": lambda: None, "max_epochs": 2, "reload_dataloaders_every_n_epochs": 1}
    whole = fit(tmp_path, partial(SeededAtItsStart, 5), moments=["step 2"], strategy=strategy("cpu"), **options)
    resumed = fit(
        tmp_path, partial(SeededAtItsStart, 6), resume=tmp_path / "step 2.ckpt", strategy=strategy("cpu"), **options
    )
    assert_goes_on(resumed, whole)


@pytest.mark.parametrize("same", [False, True])
def test_replaced_loaders_are_let_go(tmp_path, same):
    module, exact, one = Reloading(), ExactResume(), shuffled()
    sampler = one.batch_sampler
    if same:
        module.train_dataloader = lambda: one
    held = HeldByOrder(exact)
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_epochs=3, reload_dataloaders_every_n_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[held, exact],
        limit_val_batches=0,
    )  # fmt: skip
    trainer.fit(module)
    assert held.held == [1, 1, 1]
    assert sorted(row for batch in module.rows[-6:] for row in batch) == list(range(ROWS))
    assert one.batch_sampler is sampler


def test_chains_in_lists_and_dicts_are_kept(tmp_path):
    def run(max_steps, resume=None):
        torch.manual_seed(3 if resume is None else 4)
        module = Density()
        module.sampling = {"inner": [(module.sampling,)]}
        module.training_step = lambda batch, batch_idx: module.sampling["inner"][0][0](module.rbm, batch[0])
        trainer = L.Trainer(
            accelerator="cpu", devices=1, max_steps=max_steps, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, callbacks=[ExactResume()],
        )  # fmt: skip
        rows = TensorDataset(torch.arange(36).view(12, 3).remainder(5).float() / 4)
        trainer.fit(module, DataLoader(rows, batch_size=2, shuffle=True), ckpt_path=resume)
        return trainer, module.sampling["inner"][0][0].state_dict()

    _, whole = run(5)
    half, _ = run(2)
    half.save_checkpoint(tmp_path / "half.ckpt")
    _, resumed = run(5, tmp_path / "half.ckpt")
    assert whole.keys() == resumed.keys()
    for name, value in whole.items():
        assert value.equal(resumed[name]), name


def test_double_precision_is_not_rounded(tmp_path):
    whole = fit(tmp_path, moments=["step 8"], precision="64-true")
    assert whole.net[0].weight.dtype == torch.float64
    assert_goes_on(fit(tmp_path, resume=tmp_path / "step 8.ckpt", precision="64-true"), whole)


class Cycled(L.LightningModule):
    """Steps schedules of as many steps as its run, by the Trainer, or two by itself in each batch."""

    def __init__(self, manual):
        super().__init__()
        self.net, self.automatic_optimization = nn.Linear(3, 1), not manual

    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).square().mean()
        if not self.automatic_optimization:
            self.manual_backward(loss)
            for each in (*self.optimizers(), *self.lr_schedulers()):
                each.step()
        return loss

    def configure_optimizers(self):
        optimizers = [torch.optim.SGD([one], lr=0.1) for one in self.net.parameters()]
        length = 6 * self.trainer.max_epochs
        schedules = [torch.optim.lr_scheduler.OneCycleLR(one, 0.1, total_steps=length) for one in optimizers]
        if not self.automatic_optimization:
            return optimizers, schedules
        return [optimizers[0]], [{"scheduler": schedules[0], "interval": "step"}]


def trainer_of(max_epochs, *callbacks):
    return L.Trainer(
        accelerator="cpu", devices=1, max_epochs=max_epochs, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[ExactResume(), *callbacks],
    )  # fmt: skip


@pytest.mark.parametrize("manual", [False, True])
def test_schedule_of_the_checkpoint_that_ends_before_the_run_is_told_before_training(tmp_path, manual):
    short = trainer_of(1)
    short.fit(Cycled(manual), shuffled())
    file = tmp_path / "end.ckpt"
    short.save_checkpoint(file)
    trainer_of(1).fit(Cycled(manual), shuffled(), ckpt_path=file)
    longer = trainer_of(3)
    message = "goes on with the OneCycleLR of its checkpoint, which ends after 6 steps"
    if manual:
        with (
            pytest.warns(UserWarning, match=f"{message}.* would step it 18 times"),
            pytest.raises(ValueError, match="Tried"),
        ):
            longer.fit(Cycled(manual), shuffled(), ckpt_path=file)
        return
    with pytest.raises(
        ValueError, match=rf"{message}, but the run takes 18 .*; end it there with Trainer\(max_steps=6\)"
    ):
        longer.fit(Cycled(manual), shuffled(), ckpt_path=file)
    assert longer.global_step == 6


def test_loader_is_whole_again_after_an_exception():
    class Stop(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 3:
                raise RuntimeError("stop")

    loader = shuffled()
    sampler = loader.batch_sampler
    with pytest.raises(RuntimeError, match="stop"):
        trainer_of(1, Stop()).fit(Cycled(manual=False), loader)
    assert loader.batch_sampler is sampler
    again = trainer_of(1)
    again.fit(Cycled(manual=False), loader)
    assert again.global_step == 6
