import copy
import re
from itertools import pairwise

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler, TensorDataset

from lightning_accel import DeepBeliefNetwork, DigitsDataModule, ExactResume
from lightning_accel.models import FineTuning, Stage
from lightning_accel.models.dbn_fine_tuning import split_batch
from lightning_accel.models.dbn_stages import redistribute_states
from lightning_accel.nn import RBM
from lightning_accel.nn.boltzmann.partition import LogZ
from tests.nn.boltzmann.test_stack import bars_and_stripes, exact_bound
from tests.ranks import run_ranks
from tests.strategies.trained import trainer, whole_weights

TWO_STAGES = (Stage(epochs=2, lr=0.5, num_chains=6), Stage(epochs=1, lr=0.3, num_chains=6))


def rows(num_rows=22, num_visible=7, kind="bernoulli"):
    generator = torch.Generator().manual_seed(3)
    x = torch.rand(num_rows, num_visible, generator=generator)
    x = (x < torch.linspace(0.2, 0.9, num_visible)).float() if kind == "bernoulli" else x * 3
    return TensorDataset(x, torch.randint(3, (num_rows,), generator=generator))


def model(finetune="none", finetune_epochs=2, finetune_lr=None, **options):
    torch.manual_seed(1)
    defaults = {"num_visible": 7, "num_classes": 3, "hidden_dims": [6, 5], "stages": TWO_STAGES}
    return DeepBeliefNetwork(**defaults | options, fine_tuning=FineTuning(finetune, finetune_epochs, finetune_lr))


def fit(one, batch_size=5, data=None, **options):
    torch.manual_seed(2)
    data = rows() if data is None else data
    run = trainer(**{"max_epochs": one.schedule.num_epochs, "max_steps": -1} | options)
    run.fit(one, DataLoader(data, batch_size=batch_size, shuffle=True), DataLoader(data, batch_size=batch_size))
    return run


def snapshot(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


class Watched(DeepBeliefNetwork):
    """Remembers its weights at the end of each epoch, and the optimizer's state at the start of each stage."""

    def on_fit_start(self):
        super().on_fit_start()
        self.history, self.states = [snapshot(self)], []

    def on_train_epoch_start(self):
        super().on_train_epoch_start()
        self.states.append(len(self.trainer.optimizers[0].state))

    def on_train_epoch_end(self):
        super().on_train_epoch_end()
        self.history.append(snapshot(self))


def changed(before, after):
    return {name.rpartition(".")[0] for name in before if not before[name].equal(after[name])}


def test_each_stage_trains_its_layer_alone():
    one = model(finetune="classifier")
    one.__class__ = Watched
    one.make_optimizer = lambda groups: torch.optim.SGD(groups, lr=1, momentum=0.9, weight_decay=0.1)
    fit(one, max_epochs=5)
    assert [changed(*step) for step in pairwise(one.history)] == [
        {"stack.rbms.0"}, {"stack.rbms.0"}, {"stack.rbms.1"},
        {"stack.rbms.0", "stack.rbms.1", "head"}, {"stack.rbms.0", "stack.rbms.1", "head"},
    ]  # fmt: skip
    assert one.states[:4] == [0, 3, 3, 0]  # in the first epoch, of RBM 1; kept; RBM 2 begins; all begin anew


def check_alternating_column(rank):
    data = rows(kind="real")
    data.tensors[0][:, 4] = torch.arange(len(data)) % 2
    fit(
        model(visible="gaussian", hidden_dims=[4], stages=[Stage(epochs=1, lr=0.01)]),
        data=data,
        strategy="ddp",
        devices=2,
    )


def test_a_column_that_varies_between_processes_alone_is_no_constant():
    run_ranks(check_alternating_column)


def check_save(rank, path):
    run = fit(model(), batch_size=3, strategy="ddp", devices=2, max_epochs=1)
    run.save_checkpoint(path)


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_chains_go_on_in_another_number_of_processes(run_folder):
    run_ranks(check_save, run_folder / "two.ckpt")
    saved = torch.load("two.ckpt", weights_only=True)["deep_belief_network"]
    one, seen, seeds = model(), [], []

    class Seen(L.Callback):
        def on_train_start(self, trainer, pl_module):
            seen.append(pl_module.sampling[0].chains.clone())
            seeds.extend(each.seed - torch.initial_seed() for each in pl_module.sampling)

    run = trainer(max_epochs=3, max_steps=-1, callbacks=[Seen()])
    with pytest.warns(UserWarning, match="chains of 2 processes, this run has 1: chains are dealt anew"):
        run.fit(one, DataLoader(rows(), batch_size=5), ckpt_path="two.ckpt")
    assert seen[0].equal(torch.cat([state["sampling"][0]["chains"] for state in saved["ranks"]]))
    assert seeds == [*range(len(one.sampling))]  # of processes that were not there


def test_chains_are_dealt_to_any_number_of_processes():
    states = [{"chains": torch.arange(3 * 2).view(3, 2) + 10 * rank, "generator": rank} for rank in range(2)]
    dealt = [redistribute_states(states, 4, rank) for rank in range(4)]
    assert torch.cat([one["chains"] for one in dealt])[:, 0].sort().values.tolist() == [0, 2, 4, 10, 12, 14]
    assert [one.get("generator") for one in dealt] == [0, 1, None, None]
    assert redistribute_states(states, 2, 1) == states[1]
    assert [len(redistribute_states(states, 9, rank)["chains"]) for rank in range(9)] == [1] * 9


@pytest.mark.sampled(default=2)
@pytest.mark.parametrize("finetune", ["none", "classifier", "updown"])
def test_the_best_checkpoint_and_early_stopping_are_of_the_last_stage(finetune, run_folder):
    one = model(finetune=finetune, stages=[Stage(epochs=3, lr=0.5, num_chains=6)], finetune_lr=1e-3, finetune_epochs=4)
    keeper = ModelCheckpoint(run_folder, monitor="val/loss")
    stopping = EarlyStopping("val/loss", patience=2)
    files = {"enable_checkpointing": True, "default_root_dir": run_folder}
    run = fit(one, callbacks=[keeper, stopping], **files)
    last = one.schedule.spans[-1]
    saved = torch.load(keeper.best_model_path, weights_only=True)
    assert saved["deep_belief_network"]["name"] == last.name
    assert run.current_epoch > last.first_epoch


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning", "ignore:the stages of")
def test_a_checkpoint_of_an_earlier_stage_is_told(run_folder):
    run = fit(model(finetune="classifier"), max_epochs=1)
    run.save_checkpoint("early.ckpt")
    with pytest.warns(UserWarning, match="saved in the stage 'rbm 1'.* last is 'classifier'"):
        DeepBeliefNetwork.load_from_checkpoint("early.ckpt")


def test_another_fit_begins_anew_and_a_finished_one_trains_no_more(run_folder):
    one = model(hidden_dims=[4], stages=[Stage(epochs=1, lr=0.5, lr_decay="none", num_chains=6)])
    run = fit(one)
    chains = one.sampling[0].chains
    bad = rows()
    bad.tensors[0][3, 2] = float("nan")
    with pytest.raises(ValueError, match="found nan"):
        trainer(max_epochs=1, max_steps=-1).fit(one, DataLoader(bad, batch_size=5))
    assert one.sampling[0].chains is not chains
    run.save_checkpoint("end.ckpt")
    before = snapshot(one)
    trainer(max_epochs=5, max_steps=-1).fit(one, DataLoader(rows(), batch_size=5), ckpt_path="end.ckpt")
    assert not changed(before, snapshot(one))


@pytest.mark.slow
def test_annealing_leaves_the_training_as_it_is():
    ends = [model(likelihood=likelihood) for likelihood in ("exact", "ais")]
    for one in ends:
        fit(one)
    assert not changed(snapshot(ends[0].stack), snapshot(ends[1].stack))


@pytest.mark.sampled(default=3)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.int64, torch.float64])
@pytest.mark.parametrize("minibatch_size", [None, 2])
def test_rows_of_any_dtype(dtype, minibatch_size):
    data = TensorDataset(rows().tensors[0].to(dtype))
    ends = [model(minibatch_size=minibatch_size) for _ in range(2)]
    fit(ends[0], data=data)
    fit(ends[1], data=TensorDataset(rows().tensors[0]))
    assert not changed(snapshot(ends[0].stack), snapshot(ends[1].stack))


@pytest.mark.filterwarnings("ignore:the stages of")
@pytest.mark.parametrize(
    "classes",
    [torch.arange(22) % 3 + 1, torch.zeros(22), torch.zeros(22, 1, dtype=torch.int64)],
    ids=["range", "real", "column"],
)
def test_classes_are_checked_before_training(classes):
    one = model(finetune="classifier")
    with pytest.raises(ValueError, match=r"classes must be \(22,\) integers in \[0, 3\), one for each row"):
        trainer(max_epochs=1, max_steps=-1).fit(
            one, DataLoader(TensorDataset(rows().tensors[0], classes), batch_size=5)
        )


def test_rows_that_a_subset_leaves_out_do_not_count():
    data = rows()
    data.tensors[0][13, 2] = float("nan")
    one = model(hidden_dims=[4], stages=[Stage(epochs=1, lr=1e-9)])
    chosen = [*range(13), *range(15, 22)]
    loader = DataLoader(data, batch_size=5, sampler=SubsetRandomSampler(chosen))
    trainer(max_epochs=1, max_steps=-1).fit(one, loader)
    torch.testing.assert_close(one.stack.top.visible_bias.sigmoid(), data.tensors[0][chosen].mean(dim=0))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(rows().tensors[0] * 9)


@pytest.mark.filterwarnings("ignore:the stages of")
def test_a_stream_is_checked_by_its_first_batch():
    with pytest.raises(ValueError, match=r"values in \[0, 1\], found 0 to 9"):
        trainer(max_epochs=1, max_steps=-1).fit(model(), DataLoader(Stream(), batch_size=5))


def check_idle_layers(rank):
    one = model(finetune="classifier")
    one.__class__ = Watched
    one.make_optimizer = lambda groups: torch.optim.SGD(groups, lr=1, momentum=0.9, weight_decay=0.1)
    fit(one, max_epochs=3, strategy="ddp", devices=2)
    return [changed(*step) for step in pairwise(one.history)]


@pytest.mark.slow
def test_momentum_and_decay_leave_idle_layers_alone_under_ddp():
    for found in run_ranks(check_idle_layers):
        assert found == [{"stack.rbms.0"}, {"stack.rbms.0"}, {"stack.rbms.1"}]


def test_it_stops_when_all_stages_are_over():
    run = fit(model(), max_epochs=7)
    assert run.current_epoch == 3


def test_recognition_follows_the_layers_until_it_is_trained():
    one = model(finetune="updown", finetune_lr=1e-9)
    fit(one)
    x = rows().tensors[0]
    torch.testing.assert_close(one.stack.transform(x, 1), one.stack.layers[0](x))


def test_reconstructions_are_of_the_layers_trained_so_far():
    errors = []

    class Errors(L.Callback):
        def on_validation_end(self, trainer, pl_module):
            x = rows().tensors[0]
            number = 1 if trainer.current_epoch < 2 else 2
            expected = (pl_module.stack.reconstruct(x, number) - x).square().mean().item()
            errors.append((float(trainer.callback_metrics["val/reconstruction_error"]), expected))

    fit(model(), callbacks=[Errors()], num_sanity_val_steps=0)
    assert len(errors) == 3
    for found, expected in errors:
        assert found == pytest.approx(expected, rel=1e-5)


def test_visible_biases_start_at_the_means_of_what_is_below():
    one = model(stages=[Stage(epochs=1, lr=1e-9, num_chains=6)])
    data = rows()
    fit(one, data=data)
    x = data.tensors[0]
    torch.testing.assert_close(one.stack.layers[0].visible_bias.sigmoid(), x.mean(dim=0))
    means = one.stack.layers[0](x).mean(dim=0)
    torch.testing.assert_close(one.stack.layers[1].visible_bias.sigmoid(), means)


@pytest.mark.parametrize(("options", "are_samples"), [({}, True), ({"preset": "features"}, False)])
def test_what_a_machine_above_another_is_trained_on(options, are_samples):
    one = model(stages=[Stage(epochs=1, lr=1e-9, num_chains=6, **options)], hidden_dims=[6, 5, 4])
    fit(one)
    x = rows().tensors[0][:1].expand(4000, -1)
    means = one.stack.transform(x, 1)
    inputs = one._rbm_input(x, 1)
    assert ((inputs == 0) | (inputs == 1)).all() == are_samples
    if are_samples:
        torch.testing.assert_close(inputs.mean(dim=0), means[0], atol=0.05, rtol=0)
        assert not inputs.equal(one._rbm_input(x, 1))
        drawn = one._rbm_input(x, 2)  # of samples of samples, not of means
        expected = one.stack.layers[1](inputs).mean(dim=0)
        torch.testing.assert_close(drawn.mean(dim=0), expected, atol=0.05, rtol=0)
    else:
        assert inputs.equal(means)


@pytest.mark.slow
def test_a_second_machine_on_samples_raises_the_bound():
    """As the theorem of Hinton, Osindero and Teh says; on means it falls here."""
    pictures = bars_and_stripes(3).float()
    found = {}
    for inputs in ("samples", "means"):
        first = Stage(epochs=10, lr=0.3, sampler="cd")
        stages = first, Stage(epochs=20, lr=0.3, inputs=inputs, start_from_below=True)
        one = model(num_visible=9, hidden_dims=[6, 9], stages=stages, minibatch_size=20)
        fit(one, batch_size=500, data=TensorDataset(pictures.repeat(100, 1)))
        found[inputs] = float(exact_bound(one.stack, pictures)[0].mean())
    alone = float(one.stack.layers[0].log_prob(pictures).mean())
    assert found["samples"] > alone + 0.05
    assert found["means"] < alone


def test_stages_of_old_checkpoints_train_on_means():
    stage = Stage(epochs=3)
    old = {name: value for name, value in vars(stage).items() if name not in ("inputs", "start_from_below")}
    assert Stage.from_dict(old) == Stage(epochs=3, inputs="means")
    assert Stage.from_dict(vars(stage)) == Stage.from_dict({"epochs": 3}) == stage


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
def test_classes_of_any_integers(dtype):
    data = TensorDataset(*(rows().tensors[0], rows().tensors[1].to(dtype)))
    fit(model("classifier", labels=True), data=data)


def test_a_machine_starts_from_the_one_below():
    one = model(hidden_dims=[6, 7], stages=[Stage(epochs=1, lr=0.5), Stage(epochs=1, lr=1e-9, start_from_below=True)])
    fit(one)
    bottom, top = one.stack.layers
    torch.testing.assert_close(top.weight, bottom.weight.T)
    torch.testing.assert_close(top.visible_bias, bottom.hidden_bias)
    torch.testing.assert_close(top.hidden_bias, bottom.visible_bias)


def unlabelled(num_known, num_rows=22):
    data = rows(num_rows)
    data.tensors[1][num_known:] = -100
    return data


@pytest.mark.parametrize("shares", [(0, 0.5, 1, 1), (1,)])
def test_a_classifier_learns_from_samples_of_known_class_and_the_means_of_others(shares, monkeypatch):
    """Held against the formula; without dropout, others have no effect."""
    kept = torch.ones(22, 5) * 2
    kept[:, 3] = 0
    monkeypatch.setattr(
        "torch.nn.functional.dropout", lambda states, p: states * kept[: len(states), : states.shape[1]]
    )
    one = model("classifier", len(shares), hidden_dims=[5], stages=[Stage(epochs=1)])
    one.trainer = trainer(max_epochs=5)
    one._stage = 1
    x, classes = unlabelled(9).tensors
    close = torch.testing.assert_close
    close(one._objective((x, classes)), F.cross_entropy(one(x[:9]), classes[:9]))
    one.fine_tuning = FineTuning("classifier", len(shares), dropout=0.5, unlabeled=3.0)
    for epoch, share in enumerate(shares, 1):  # the first epoch is the RBM's
        one.trainer.fit_loop.epoch_progress.current.completed = epoch
        scores = one.head(one.stack.top(x) * kept)
        agree = -(one(x[9:]).softmax(1) * scores[9:].log_softmax(1)).sum(1).mean()
        close(one._objective((x, classes)), F.cross_entropy(scores[:9], classes[:9]) + 3 * share * agree)


def test_minibatches_without_lightnings_calls_are_the_same_updates():
    """Against steps of the optimizer over the parts of each batch, by hand."""
    one = model("classifier", 1, 0.5, hidden_dims=[6], stages=[Stage(epochs=1, lr=1e-9)], minibatch_size=4)
    one.make_optimizer = lambda groups: torch.optim.SGD(groups, momentum=0.9)
    by_hand, data = copy.deepcopy(one), rows()

    class Begin(L.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            by_hand.load_state_dict(pl_module.state_dict())

    run = trainer(max_epochs=2, max_steps=-1, callbacks=[Begin()])
    run.fit(one, DataLoader(data, batch_size=11))
    optimizer = torch.optim.SGD([*by_hand.stack.parameters(), *by_hand.head.parameters()], momentum=0.9)
    for number, (x, classes) in enumerate(DataLoader(data, batch_size=11)):
        optimizer.param_groups[0]["lr"] = 0.5 * (1 - number / 2)
        for part, its_classes in zip(x.split(4), classes.split(4), strict=True):
            optimizer.zero_grad()
            F.cross_entropy(by_hand(part), its_classes).backward()
            optimizer.step()
    for name, value in by_hand.state_dict().items():
        if not name.startswith(("val_", "test_")):
            torch.testing.assert_close(one.state_dict()[name], value, msg=name)


@pytest.mark.parametrize(("num_known", "sizes"), [(3, [3] * 6), (22, [4] * 5 + [2]), (0, [4] * 5 + [2]), (15, [4] * 6)])
def test_minibatches_hold_samples_of_known_class(num_known, sizes):
    x, classes = unlabelled(num_known).tensors
    parts = split_batch((x, classes), 4, needs_classes=True)
    for (part, its_classes), size in zip(parts, sizes, strict=True):
        known = its_classes != -100
        assert int(known.sum()) == size if num_known else not known.any()
        assert int((~known).sum()) <= 4
        assert all(
            any(row.equal(other) for other in x[classes == its]) for row, its in zip(part, its_classes, strict=True)
        )
    everything = torch.cat([part for part, _ in parts])
    assert {tuple(row) for row in everything.tolist()} == {tuple(row) for row in x.tolist()}
    num_unknown = sum(int((its == -100).sum()) for _, its in parts)
    assert num_unknown == 22 - num_known


def test_the_head_starts_with_the_weights_of_labels():
    one = model("classifier", 1, 1e-9, labels=True, hidden_dims=[6], stages=[Stage(epochs=2, lr=0.5, num_chains=6)])
    fit(one, data=unlabelled(9))
    x, top = rows().tensors[0], one.stack.top
    hidden = torch.bernoulli(torch.full((4, 6), 0.5))
    expected = top.visible_activation(hidden)[:, -3:].softmax(1)
    torch.testing.assert_close(one.head(hidden).softmax(1), expected)
    assert one(x).shape == (22, 3)


@pytest.mark.parametrize(
    ("finetune", "labels", "minibatch_size"), [("none", True, None), ("updown", True, 3), ("classifier", True, 3)]
)
def test_samples_of_unknown_class_train_and_do_not_count(finetune, labels, minibatch_size):
    one = model(finetune, 1, 0.01, labels=labels, minibatch_size=minibatch_size)
    data = unlabelled(6)
    run = fit(one, data=data, max_epochs=4 if finetune != "none" else 3)
    assert all(value.isfinite().all() for value in one.state_dict().values())
    x, classes = (part[:6] for part in data.tensors)
    scores = (one.stack.class_log_prob(x) if one.head is None else one(x)).detach()
    expected = (scores.argmax(1) == classes).float().mean()
    assert float(run.callback_metrics["val/accuracy"]) == pytest.approx(float(expected))
    if one.head is not None:
        assert float(run.callback_metrics["val/loss"]) == pytest.approx(
            float(F.cross_entropy(scores, classes)), rel=1e-5
        )


@pytest.mark.parametrize(("finetune", "lacking"), [("none", ["accuracy"]), ("classifier", ["accuracy", "loss"])])
def test_figures_that_need_a_class_are_left_out_where_none_is_known(finetune, lacking):
    one, run = model(finetune, labels=finetune == "none"), trainer()
    names = {"val/accuracy", "val/loss", "val/reconstruction_error"}
    with pytest.warns(UserWarning, match=f"no val sample has a known class, which {' and '.join(lacking)} need"):
        run.validate(one, DataLoader(unlabelled(0), batch_size=5), verbose=False)
    assert run.callback_metrics.keys() == names - {f"val/{name}" for name in lacking}
    run.validate(one, DataLoader(unlabelled(1), batch_size=5), verbose=False)
    assert run.callback_metrics.keys() == names


def test_a_classifier_is_not_trained_without_a_class_to_validate_it():
    one = model("classifier")
    before = snapshot(one)
    run = trainer(max_epochs=one.schedule.num_epochs, max_steps=-1)
    with pytest.raises(ValueError, match=r"needs validation samples of known class, .* leave validation out"):
        run.fit(one, DataLoader(rows(), batch_size=5), DataLoader(unlabelled(0), batch_size=5))
    assert not changed(before, snapshot(one))


@pytest.mark.parametrize("decay", ["linear", "quadratic"])
def test_rates_fall_to_zero_within_each_stage(decay):
    rates = []
    stages = [Stage(epochs=2, lr=0.5, lr_decay=decay, num_chains=6), TWO_STAGES[1]]

    class Rates(L.Callback):
        def on_train_batch_end(self, trainer, *_):
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    fit(model(stages=stages, finetune="classifier", finetune_lr=0.2), batch_size=11, callbacks=[Rates()])
    first = {"linear": [0.5, 0.375, 0.25, 0.125], "quadratic": [0.5, 0.28125, 0.125, 0.03125]}
    assert rates == pytest.approx([*first[decay], 0.3, 0.15, 0.2, 0.15, 0.1, 0.05])


def test_one_rbm_in_the_trainer_equals_a_loop():
    one = model(hidden_dims=[6], stages=[Stage(epochs=3, lr=0.5, lr_decay="none", num_chains=6)])
    data, by_hand = rows(), RBM(7, 6)
    by_hand.load_state_dict(one.stack.layers[0].state_dict())
    loader = DataLoader(data, batch_size=5)
    run = trainer(max_epochs=3, max_steps=-1)
    torch.manual_seed(2)
    run.fit(one, loader)

    x = data.tensors[0]
    by_hand.start_at_(x.mean(dim=0), len(x))
    learn = one.stages[0].start_sampling(2)  # the seed of the run
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.5)
    for _ in range(3):
        for part in x.split(5):
            optimizer.zero_grad()
            learn(by_hand, part).backward()
            optimizer.step()
    for name, value in by_hand.state_dict().items():
        torch.testing.assert_close(one.stack.layers[0].state_dict()[name], value)


class Keep(L.Callback):
    """What a run ends with: weights, chains and optimizer states."""

    def on_train_end(self, trainer, pl_module):
        self.end = snapshot(pl_module)
        for number, learn in enumerate(pl_module.sampling):
            self.end |= {f"{number}.{name}": value for name, value in learn.state_dict().items()}


@pytest.mark.sampled(slow=2)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`", "ignore:Using ModelCheckpoint with manual")
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"finetune": "classifier"}, marks=pytest.mark.slow),
        pytest.param({"finetune": "updown", "finetune_lr": 0.01}, marks=pytest.mark.slow),
        {"finetune": "updown", "labels": True, "finetune_lr": 0.01},
        {"stages": (Stage(epochs=2, sampler="pcd", num_chains=4),)},
        pytest.param({"finetune": "classifier", "minibatch_size": 2}, marks=pytest.mark.slow),
    ],
    ids=["classifier", "updown", "labels", "chains", "minibatches"],
)
def test_resumed_in_any_stage_it_ends_with_the_same_bits(options, run_folder):
    whole, keeper = Keep(), ModelCheckpoint(run_folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    momentum = {"optimizer": lambda groups: torch.optim.SGD(groups, lr=1, momentum=0.5)}

    def run(callbacks, ckpt_path=None):
        one = model(**options | momentum)
        torch.manual_seed(2 if ckpt_path is None else 77)
        loader = DataLoader(rows(), batch_size=8, shuffle=True)
        files = {"enable_checkpointing": True, "default_root_dir": run_folder} if keeper in callbacks else {}
        one_run = trainer(max_epochs=one.schedule.num_epochs, max_steps=-1, callbacks=callbacks, **files)
        one_run.fit(one, loader, ckpt_path=ckpt_path)

    run([whole, keeper, ExactResume()])
    paths = sorted(run_folder.glob("step=*.ckpt"), key=lambda path: int(path.stem.partition("=")[2]))
    assert len(paths) >= 9
    for path in paths[:-1]:
        resumed = Keep()
        run([resumed, ExactResume()], path)
        assert whole.end.keys() == resumed.end.keys()
        for name, value in whole.end.items():
            assert value.equal(resumed.end[name]), f"{name}, from {path.stem}"


def check_unknown(rank):
    data = unlabelled(22)
    data.tensors[1][:: 2 + 20 * rank] = -100  # every other one in one process, a single one in the other
    one = model("classifier", 1, 0.1, labels=True, minibatch_size=2)
    run = trainer(max_epochs=one.schedule.num_epochs, max_steps=-1, strategy="ddp", devices=2)
    run.fit(one, DataLoader(data, batch_size=5), DataLoader(unlabelled(22 * rank), batch_size=5))
    assert run.callback_metrics["val/loss"].isfinite()
    return whole_weights(run)


@pytest.mark.slow
def test_processes_agree_where_one_has_the_samples_of_unknown_class():
    first, second = run_ranks(check_unknown)
    for name, value in first.items():
        assert value.equal(second[name]), name
        assert value.isfinite().all()


def check_ddp(rank, strategy, options):
    one = model(**options)
    run = fit(one, batch_size=3, strategy=strategy, devices=2)
    return whole_weights(run), [learn.state_dict() for learn in one.sampling]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "finetune"),
    [
        ("ddp", "updown"),
        pytest.param("accel_fsdp2", "classifier", marks=pytest.mark.slow),
        pytest.param("ddp", "classifier", marks=pytest.mark.slow),
        pytest.param("accel_ddp", "classifier", marks=pytest.mark.slow),
        pytest.param("accel_ddp", "updown", marks=pytest.mark.slow),
        pytest.param("accel_fsdp2", "updown", marks=pytest.mark.slow),
    ],
)
def test_processes_agree_on_weights_and_draw_chains_of_their_own(strategy, finetune):
    options = {"finetune": finetune, "finetune_lr": 0.01}
    (first, chains), (second, others) = run_ranks(check_ddp, strategy, options)
    for name, value in first.items():
        assert value.equal(second[name]), name
        assert value.isfinite().all()
    for mine, other in zip(chains, others, strict=True):
        assert len(mine["chains"]) == 3  # of 6
        assert not mine["chains"].equal(other["chains"])
        assert mine["visible_offset"].equal(other["visible_offset"])


def check_likelihood(rank, world_size):
    """Held-out log-probability of digits after 30 epochs, with so many rows and chains over all processes."""
    one = model(num_visible=64, hidden_dims=[16], stages=[Stage(epochs=30, lr=2.0)])
    digits = DigitsDataModule(batch_size=100 // world_size, binarize=True)
    options = {"strategy": "ddp", "devices": 2} if world_size > 1 else {}
    run = trainer(max_epochs=30, max_steps=-1, **options)
    run.fit(one, digits)
    rows = digits.test_rows.tensors[0].flatten(1)
    return float(one.stack.top.log_prob(rows).mean()), snapshot(one)


@pytest.mark.weekly
@pytest.mark.slow
def test_two_processes_learn_a_density_as_well_as_one():
    alone, _ = check_likelihood(0, 1)
    (first, weights), (_, others) = run_ranks(check_likelihood, 2)
    assert not changed(weights, others)
    assert first > alone - 0.25  # seeds differ by 0.1
    assert alone > -20  # the mean picture has -26


def check_large(rank):
    one = model(num_visible=784, hidden_dims=[1024], stages=[Stage(epochs=2, lr=0.5)])
    data = torch.rand(96, 784, generator=torch.Generator().manual_seed(1)).lt(0.3).float()
    data[:, :392] = data[:, :1]  # something to learn
    loader = DataLoader(TensorDataset(data), batch_size=16)
    errors, local = [], []

    class Errors(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            local.append(sum(parameter.to_local().numel() for parameter in pl_module.parameters()))

        def on_validation_end(self, trainer, pl_module):
            errors.append(float(trainer.callback_metrics["val/reconstruction_error"]))

    run = trainer(max_epochs=2, max_steps=-1, strategy="accel_fsdp2", devices=2, callbacks=[Errors()])
    run.fit(one, loader, loader)
    return errors, local[0], sum(parameter.numel() for parameter in one.parameters())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*DTensor")
def test_fsdp2_trains_a_large_rbm_of_which_each_process_holds_half():
    for errors, local, whole in run_ranks(check_large):
        assert errors[-1] < 0.9 * errors[0]
        assert local <= whole / 2 + 784


@pytest.mark.slow
@pytest.mark.parametrize("finetune", ["classifier", "updown"])
def test_it_learns_digits_in_a_few_epochs(finetune):
    one = DeepBeliefNetwork(
        hidden_dims=[64, 48], stages=[Stage(epochs=8, lr=0.5)], labels=finetune == "updown",
        fine_tuning=FineTuning(finetune, epochs=6, lr=1.0 if finetune == "classifier" else 0.01),
    )  # fmt: skip
    run = trainer(max_epochs=one.schedule.num_epochs, max_steps=-1)
    digits = DigitsDataModule(batch_size=20, binarize=True)
    run.fit(one, digits)
    (figures,) = run.test(one, digits, verbose=False)
    assert figures["test/accuracy"] > 0.7
    assert figures["test/reconstruction_error"] < 0.1  # 0.13 is that of the mean picture
    predicted = torch.cat([torch.tensor([int(name) for name in part["class"]]) for part in run.predict(one, digits)])
    assert (predicted == digits.test_rows.tensors[1]).float().mean() == pytest.approx(figures["test/accuracy"])


def test_presets_choose_sampler_centres_and_first_weights():
    sizes = {"num_visible": 400, "hidden_dims": [300]}
    for preset, std, sampler, centering in (("density", 0.1069, "pcd", 100), ("features", 0.01, "cd", 0)):
        one = model(stages=[Stage(preset=preset)], **sizes)
        assert float(one.stack.top.weight.std().detach()) == pytest.approx(std, rel=0.02)
        assert (one.sampling[0].sampler, one.sampling[0].centering) == (sampler, centering)
    one = model(stages=[Stage(centering=20, initial_std=0.5, sampler="cd")], **sizes)
    assert float(one.stack.top.weight.std().detach()) == pytest.approx(0.5, rel=0.02)
    assert (one.sampling[0].sampler, one.sampling[0].centering) == ("cd", 20)
    gaussian = model(visible="gaussian", stages=[Stage()], **sizes)
    assert float(gaussian.stack.top.weight.std().detach()) == pytest.approx(0.01, rel=0.02)


def test_schedulers_that_would_not_be_stepped_are_refused():
    one = model(minibatch_size=2)
    optimizer = torch.optim.SGD(one.parameters(), lr=1)
    one.configure_optimizers = lambda: [[optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]]
    with pytest.raises(ValueError, match=r"leave the scheduler out.*or leave minibatch_size out"):
        fit(one)


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_annealing_that_disagrees_is_told(monkeypatch):
    found = {"ais": torch.tensor([5.0, 4.5, 5.5, 90.0]), "reverse_ais": torch.tensor([6.0, 5.7, 6.25, 90.0])}
    monkeypatch.setattr(RBM, "log_z", lambda self, method, **options: LogZ(*found[method].double()))
    one = model(likelihood="ais", labels=True, hidden_dims=[6], stages=[Stage(epochs=1, lr=0.1)])
    with pytest.warns(UserWarning, match="log Z is known to 1.75 nats only"):
        run = fit(one)
    assert float(run.callback_metrics["val/log_z_gap"]) == pytest.approx(1.75)
    x = rows().tensors[0]
    expected = one.stack.log_prob_bound(x, LogZ(*found["ais"].double())).estimate.mean()
    assert float(run.callback_metrics["val/log_prob"]) == pytest.approx(float(expected), abs=1e-4)


def test_log_prob_of_validation_is_that_of_enumeration():
    one = model(likelihood="exact", stages=[Stage(epochs=3, lr=0.5)], hidden_dims=[6])
    data = rows()
    run = fit(one, data=data)
    x = data.tensors[0]
    expected = one.stack.top.log_prob(x).mean()
    assert float(run.callback_metrics["val/log_prob"]) == pytest.approx(float(expected), abs=1e-4)
    assert float(run.callback_metrics["val/loss"]) == pytest.approx(-float(expected), abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("finetune", ["none", "classifier", "updown"])
def test_a_checkpoint_loads_without_sizes(finetune, run_folder):
    one = DeepBeliefNetwork(hidden_dims=[6, 5], stages=TWO_STAGES, fine_tuning=FineTuning(finetune, epochs=1))
    run = trainer(max_epochs=4, max_steps=-1)
    run.fit(one, Data(rows()))
    run.save_checkpoint("one.ckpt")
    loaded = DeepBeliefNetwork.load_from_checkpoint("one.ckpt", weights_only=True)
    x = rows().tensors[0]
    torch.testing.assert_close(loaded(x), one(x))
    assert loaded.stages == one.stages


class Data(L.LightningDataModule):
    num_features, num_classes = 7, 3

    def __init__(self, data):
        super().__init__()
        self.data = data

    def train_dataloader(self):
        return DataLoader(self.data, batch_size=5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_dims": []}, "at least one RBM"),
        ({"stages": TWO_STAGES, "hidden_dims": [3]}, "got 1 hidden_dims and 2 stages"),
        ({"finetune": "sgd"}, "'none', 'classifier' or 'updown'; got 'sgd'"),
        ({"likelihood": "pl"}, "'none', 'exact' or 'ais'; got 'pl'"),
        ({"minibatch_size": 0}, "at least 1; got 0"),
        ({"finetune": "classifier", "class_names": ["a", "b"]}, "num_classes is 3, but there are 2 class_names"),
        ({"finetune": "updown", "finetune_epochs": 0}, "at least 1 epoch"),
        ({"stages": [Stage(start_from_below=True)]}, "an RBM above another, and the first stage has it"),
        ({"stages": [Stage(), Stage(start_from_below=True)]}, "RBM 2 .* as many hidden units .* 7; got 5 in hidden_d"),
        (
            {"stages": [Stage(), Stage(start_from_below=True)], "hidden_dims": [6, 7], "visible": "gaussian"},
            "'bernoulli' units on both sides",
        ),
    ],
)
def test_options_that_contradict_each_other(options, message):
    with pytest.raises(ValueError, match=message):
        model(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "classifier", "dropout": 1.0}, r"dropout must lie in \[0, 1\).*dropout=1.0"),
        ({"unlabeled": -1.0}, "at least 0; got .*unlabeled=-1.0"),
        ({"unlabeled": float("inf")}, "finite and at least 0; got .*unlabeled=inf"),
        ({"method": "updown", "dropout": 0.5}, "dropout is for the method 'classifier'; got 'updown'"),
    ],
)
def test_fine_tuning_checks_its_numbers(options, message):
    with pytest.raises(ValueError, match=message):
        FineTuning(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "at least 1 epoch"),
        ({"lr": 0}, "above 0"),
        ({"lr_decay": "cosine"}, "'linear', 'quadratic' or 'none'"),
        ({"steps": 0}, "steps"),
        ({"preset": "both"}, "'density' or 'features'; got 'both'"),
        ({"inputs": "states"}, "'samples' or 'means'; got 'states'"),
    ],
)
def test_stages_check_their_numbers(options, message):
    with pytest.raises(ValueError, match=message):
        Stage(**options)


def without(one, value, position):
    one.tensors[0][position] = value
    return one


@pytest.mark.parametrize(
    ("data", "units", "message"),
    [
        (
            lambda: without(rows(), float("nan"), (3, 2)),
            "bernoulli",
            r"training data, rows counted from item 0: .*found nan in row 3, column 2",
        ),
        (lambda: without(rows(), 1.5, (3, 2)), "bernoulli", r"\[0, 1\].*1\.5"),
        (lambda: without(rows(kind="real"), 2.0, (slice(None), 4)), "gaussian", "constant.* 4"),
    ],
    ids=["nan", "range", "constant"],
)
def test_rows_outside_of_the_support_are_refused_before_training(data, units, message):
    one = model(visible=units, hidden_dims=[4], stages=[Stage(epochs=1)])
    before = snapshot(one)
    run = trainer(max_epochs=1, max_steps=-1)
    with pytest.raises(ValueError, match=message):
        run.fit(one, DataLoader(data(), batch_size=5))
    assert not changed(before, snapshot(one))


@pytest.mark.parametrize(("finetune", "labels"), [("classifier", False), ("none", True)])
def test_training_without_a_single_known_class_is_refused(finetune, labels):
    one = model(finetune, labels=labels)
    before = snapshot(one)
    run = trainer(max_epochs=one.schedule.num_epochs, max_steps=-1)
    with pytest.raises(ValueError, match=r"need training samples of known class; all 22 are -100.* Give the class"):
        run.fit(one, DataLoader(unlabelled(0), batch_size=5))
    assert not changed(before, snapshot(one))


def test_strategies_that_cannot_train_it_are_refused():
    with pytest.raises(ValueError, match=r"chains.*accel_dp.*strategy=ddp"):
        fit(model(), strategy="accel_dp", devices=2)
    with pytest.raises(ValueError, match=r"one RBM at a time.*'accel_fsdp2'"):
        model().pipeline_layers()


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_too_few_epochs_are_told():
    with pytest.warns(
        UserWarning, match=re.escape("take 3 epochs together, the trainer has 1: training ends in 'rbm 1'")
    ):
        fit(model(), max_epochs=1)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("finetune", ["classifier", "updown"])
def test_it_trains_and_resumes_on_a_gpu(precision, finetune, run_folder):
    options = {"accelerator": "gpu", "devices": 1, "precision": precision, "default_root_dir": run_folder}
    with pytest.warns(UserWarning, match="training ends in 'rbm 1'"):
        run = fit(model(finetune=finetune), max_epochs=2, **options)
    run.save_checkpoint("half.ckpt")
    one = model(finetune=finetune)
    go_on = trainer(max_epochs=one.schedule.num_epochs, max_steps=-1, **options)
    go_on.fit(one, DataLoader(rows(), batch_size=5), ckpt_path="half.ckpt")
    assert one.sampling[0].chains.is_cuda
    assert all(value.isfinite().all() for value in one.state_dict().values())


def test_divergence_is_told():
    one = model(stages=[Stage(epochs=3, lr=3e38, lr_decay="none", num_chains=6)])
    with pytest.raises(ValueError, match=r"rbm 1 has diverged: its energy_gap is .*Lower its learning rate"):
        fit(one)


def test_classes_that_are_missing_are_told():
    one = model(finetune="classifier")
    with pytest.raises(ValueError, match="batches of rows and classes"):
        fit(one, data=TensorDataset(rows().tensors[0]))


@pytest.mark.parametrize("labels", [True, False])
def test_classes_out_of_range_are_told_of_validation_too(labels):
    data = rows()
    data.tensors[1][3] = -1
    one = model("none" if labels else "classifier", labels=labels)
    with pytest.raises(ValueError, match=r"val classes must be \(5,\) integers in \[0, 3\).*or -100.*got .* -1 to 2"):
        trainer().validate(one, DataLoader(data, batch_size=5), verbose=False)


def test_the_optimizer_of_a_config_keeps_its_own_rate():
    rates = set()

    class Rates(L.Callback):
        def on_train_batch_end(self, trainer, *_):
            rates.add(trainer.optimizers[0].param_groups[0]["lr"])

    one = model()
    one.configure_optimizers = lambda: torch.optim.SGD(one.parameters(), lr=0.07)
    fit(one, callbacks=[Rates()])
    assert rates == {0.07}


def test_a_scheduler_of_a_subclass_rules_the_rates():
    rates = []

    class Falling(DeepBeliefNetwork):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

        def on_train_batch_start(self, batch, batch_idx):
            super().on_train_batch_start(batch, batch_idx)
            rates.append(self.trainer.optimizers[0].param_groups[1]["lr"])

    one = model()
    one.__class__ = Falling
    fit(one, batch_size=11)
    assert rates == pytest.approx([0.5, 0.5, 0.25, 0.25, 0.125, 0.125])


def test_biases_are_not_decayed():
    one = model(optimizer=lambda groups: torch.optim.SGD(groups, weight_decay=0.1))
    groups = one.configure_optimizers().param_groups
    assert [(group["weight_decay"], {one.ndim for one in group["params"]}) for group in groups] == [
        (0.1, {2}),
        (0, {1}),
    ]


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
@pytest.mark.parametrize("finetune", ["classifier", "updown"])
def test_precisions(precision, finetune):
    stages = [Stage(epochs=1, lr=0.02, sampler="cd")]
    one = model(finetune=finetune, stages=stages)
    fit(one, precision=precision, batch_size=11)
    assert all(value.isfinite().all() for value in one.state_dict().values())
