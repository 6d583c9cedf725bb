from pathlib import Path

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_accel import ExactResume, SequenceDataModule, SequenceModel
from lightning_accel.callbacks import WeightedAccumulation
from lightning_accel.data import GeneratedSequences
from lightning_accel.data.sequences.batch import IGNORED, SequenceBatch
from lightning_accel.models import RecurrentLayers
from lightning_accel.models.rnn import forecast
from tests.ranks import run_ranks

SGD = lambda parameters: torch.optim.SGD(parameters, lr=0.5)  # noqa: E731
BLOCK = {"residual": True, "conv_kernel": 3, "feed_forward_dim": 7}
LENGTHS = torch.tensor([4, 1, 6, 3, 0, 6, 2, 5])


def make(kind: str = "classification", **options) -> SequenceModel:
    torch.manual_seed(1)
    sizes = {
        "classification": {"num_classes": 3},
        "regression": {"num_targets": 1},
        "labelling": {"num_classes": 3},
        "forecasting": {},
    }[kind]
    layers = {"hidden_dim": 5} | {name: options.pop(name) for name in vars(RecurrentLayers()) if name in options}
    others = {"num_features": 2, "target_kind": kind, "optimizer": SGD} | sizes | options
    return SequenceModel(**others, layers=RecurrentLayers(**layers))


def make_batch(kind: str = "classification", rows: slice = slice(None)) -> SequenceBatch:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(8, 6, 2, generator=generator)
    x[torch.arange(6) >= LENGTHS[:, None]] = 0
    target = None
    if kind == "classification":
        target = torch.randint(3, (8,), generator=generator)
    elif kind == "regression":
        target = torch.randn(8, generator=generator)
    elif kind == "labelling":
        target = torch.randint(3, (8, 6), generator=generator)
        target[torch.arange(6) >= LENGTHS[:, None]] = IGNORED
    return SequenceBatch(x[rows], LENGTHS[rows], None if target is None else target[rows])


def trainer(**options) -> L.Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "accelerator": "cpu", "max_epochs": 1, "use_distributed_sampler": False}
    return L.Trainer(**(quiet | options))


def loader(batches) -> DataLoader:
    return DataLoader(list(batches), batch_size=None)


class TestLoss:
    def by_rows(self, model: SequenceModel, batch: SequenceBatch, kind: str) -> torch.Tensor:
        """Each row alone, without padding, in a loop."""
        losses = []
        for row, length in enumerate(batch.lengths.tolist()):
            x = batch.x[row : row + 1, :length]
            if kind == "classification" or kind == "regression":
                if not length:
                    x = batch.x[row : row + 1, :1]
                scores = model(x, batch.lengths[row : row + 1]).scores[0]
                own = (
                    F.cross_entropy(scores, batch.target[row])
                    if kind == "classification"
                    else scores - batch.target[row]
                )
                losses.append(own.reshape(1) if kind == "classification" else own.square())
            elif kind == "labelling" and length:
                scores = model(x).scores[0]
                losses.append(F.cross_entropy(scores, batch.target[row, :length], reduction="none"))
            elif kind == "forecasting" and length > 1:
                losses.append((model(x).scores[0, :-1] - x[0, 1:]).square().flatten())
        return torch.cat(losses).mean()

    @pytest.mark.parametrize("kind", ["classification", "regression", "labelling", "forecasting"])
    def test_is_mean_over_all_that_is_valid(self, kind):
        model, batch = make(kind), make_batch(kind)
        expected = self.by_rows(model, batch, kind)
        torch.testing.assert_close(model.training_step(batch, 0)["loss"], expected)

    @pytest.mark.parametrize("kind", ["classification", "regression", "labelling", "forecasting"])
    @pytest.mark.parametrize("layers", [{}, {"residual": True}, BLOCK], ids=["plain", "residual", "block"])
    def test_padding_of_nan_changes_nothing(self, kind, layers):
        model, batch = make(kind, num_layers=2, **layers), make_batch(kind)
        model.training_step(batch, 0)["loss"].backward()
        expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        model.zero_grad()
        x = batch.x.clone()
        x[torch.arange(6) >= LENGTHS[:, None]] = torch.nan
        model.training_step(batch._replace(x=x), 0)["loss"].backward()
        torch.testing.assert_close({name: one.grad for name, one in model.named_parameters()}, expected)

    def test_missing_values_count_for_nothing(self):
        model, batch = make("regression"), make_batch("regression")
        kept = model.training_step(make_batch("regression", slice(0, 5)), 0)["loss"]
        target = torch.where(torch.arange(8) < 5, batch.target, torch.nan)
        torch.testing.assert_close(model.training_step(batch._replace(target=target), 0)["loss"], kept)

    def test_wrong_shape_of_target_is_refused(self):
        batch = make_batch("classification")
        with pytest.raises(ValueError, match=r"must be \(8, 6\) integers in \[0, 3\).*; got \(8,\)"):
            make("labelling").training_step(batch, 0)
        with pytest.raises(ValueError, match="needs a target"):
            make("classification").training_step(batch._replace(target=None), 0)


def fit_parts(
    model: SequenceModel, parts: list[SequenceBatch], ckpt_path: object = None, **options
) -> dict[str, torch.Tensor]:
    trainer(**options).fit(model, loader(parts), ckpt_path=ckpt_path)
    return {name: whole(value).clone() for name, value in model.state_dict().items()}


def whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


HALVES = [slice(0, 4), slice(4, 8)]
PARTS = [slice(0, 1), slice(1, 8)]  # unequal in rows and in steps


def check_parts(rank, kind, options):
    return fit_parts(make(kind), [make_batch(kind, PARTS[rank])] * 2, devices=2, **options)


KINDS = ["labelling", "classification", "regression", "forecasting"]
CASES = [(kind, strategy) for strategy in ("ddp", "accel_fsdp2") for kind in KINDS]


@pytest.mark.parametrize(
    ("kind", "strategy"), [CASES[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES[1:])]
)
def test_processes_of_unequal_parts_equal_one(kind, strategy):
    expected = fit_parts(make(kind), [make_batch(kind)] * 2)
    for actual in run_ranks(check_parts, kind, {"strategy": strategy}):
        torch.testing.assert_close(actual, expected)


def check_accumulation(rank):
    quarters = [make_batch("labelling", slice(start, stop)) for start, stop in [(0, 1), (1, 3), (3, 4), (4, 8)]]
    options = {"strategy": "ddp", "devices": 2, "accumulate_grad_batches": 2, "callbacks": [WeightedAccumulation()]}
    return fit_parts(make("labelling"), quarters[2 * rank : 2 * rank + 2], **options)


@pytest.mark.slow
def test_weighted_accumulation_of_unequal_parts_equals_one_batch():
    expected = fit_parts(make("labelling"), [make_batch("labelling")])
    for actual in run_ranks(check_accumulation):
        torch.testing.assert_close(actual, expected)


class Scaled(L.LightningDataModule):
    """Targets, and in forecasting features, of another unit."""

    target_kind = "regression"
    target_mean, target_std = [100.0], [50.0]

    def train_dataloader(self):
        batch = make_batch("regression")
        return loader([batch._replace(target=batch.target * 50 + 100)] * 2)

    val_dataloader = train_dataloader


def test_values_are_learnt_in_standard_deviations_and_told_in_their_own_unit(tmp_path):
    plain = make("regression")
    fit_parts(plain, [make_batch("regression")] * 2)
    model = make("regression")
    run = trainer()
    run.fit(model, Scaled())
    batch = make_batch("regression")
    torch.testing.assert_close(model.head.weight, plain.head.weight)
    value = model.predict_step(batch, 0)["value"]
    torch.testing.assert_close(value, plain.predict_step(batch, 0)["value"] * 50 + 100)
    (figures,) = run.validate(model, Scaled(), verbose=False)
    assert figures["val/mse"] == pytest.approx(figures["val/loss"] * 2500, rel=1e-5)
    run.save_checkpoint(tmp_path / "model.ckpt")
    again = SequenceModel.load_from_checkpoint(tmp_path / "model.ckpt", weights_only=True)
    torch.testing.assert_close(again.predict_step(batch, 0)["value"], value)


@pytest.mark.parametrize("kind", ["classification", "regression", "labelling", "forecasting"])
def test_evaluation_is_the_mean_over_all_valid(kind):
    model = make(kind)
    parts = [make_batch(kind, one) for one in PARTS]
    run = trainer()
    (figures,) = run.validate(model, loader(parts), verbose=False)
    whole = model.training_step(make_batch(kind), 0)["loss"].item()
    assert figures["val/loss"] == pytest.approx(whole, rel=1e-5)
    name = "val/mse" if kind in ("regression", "forecasting") else "val/accuracy"
    assert (figures[name] == pytest.approx(whole, rel=1e-5)) if name == "val/mse" else (0 <= figures[name] <= 1)
    if kind == "forecasting":
        rows = [x[:length] for part in parts for x, length in zip(part.x, part.lengths.tolist(), strict=True)]
        by_hand = torch.cat([(row[1:] - row[:-1]).flatten() for row in rows]).square().mean().item()
        assert figures["val/mse_if_repeated"] == pytest.approx(by_hand, rel=1e-5)


class TestPrediction:
    def test_classes_have_names_and_probabilities(self):
        model, batch = make(class_names=["a", "b", "c"]), make_batch()
        answer = model.predict_step(batch, 0)
        scores = model(batch.x, batch.lengths).scores.softmax(-1)
        assert answer["class"] == ["abc"[i] for i in scores.argmax(1).tolist()]
        torch.testing.assert_close(answer["probability"], scores.amax(1))
        torch.testing.assert_close(answer["probabilities"], scores)

    def test_labels_of_steps_end_with_the_row(self):
        model, batch = make("labelling"), make_batch("labelling")
        labels = model.predict_step(batch, 0)["labels"]
        assert [len(row) for row in labels] == LENGTHS.tolist()
        assert labels[3] == model(batch.x[3:4, :3]).scores[0].argmax(-1).tolist()

    def test_forecast_feeds_back_what_it_says(self):
        model, batch = make("forecasting", horizon=3, num_layers=2), make_batch("forecasting")
        ahead = forecast(model, batch.x, batch.lengths, 3)
        for row in (0, 2, 6):
            x = batch.x[row : row + 1, : LENGTHS[row]]
            for step in range(3):
                x = torch.cat([x, model(x).scores[:, -1:]], dim=1)
                torch.testing.assert_close(ahead[row, step], x[0, -1])
        assert set(model.predict_step(batch, 0)) == {"value_0", "value_1"}

    def test_forecast_of_tokens(self):
        model = make("forecasting", num_features=None, vocab_size=7, horizon=4)
        tokens = torch.randint(7, (2, 5))
        assert model.predict_step(SequenceBatch(tokens, torch.tensor([5, 2])), 0)["token"].shape == (2, 4)

    @pytest.mark.parametrize("kind", ["classification", "labelling", "forecasting"])
    @pytest.mark.parametrize("cell", ["gru", "lstm", "mingru"])
    def test_step_equals_forward(self, kind, cell):
        layers = BLOCK if kind == "labelling" else {}
        model, x = make(kind, cell=cell, num_layers=2, **layers).eval(), torch.randn(3, 4, 2)
        state = None
        for t in range(4):
            scores, state = model.step(x[:, t], state)
        whole = model(x).scores
        torch.testing.assert_close(scores, whole if kind == "classification" else whole[:, -1])


class TestSizes:
    def test_come_from_the_datamodule(self, tmp_path):
        class Data(L.LightningDataModule):
            num_features, num_classes, target_kind = 2, 3, "classification"
            class_names = ("a", "b", "c")

            def train_dataloader(self):
                return loader([make_batch()])

        model = SequenceModel(layers=RecurrentLayers(hidden_dim=5))
        run = trainer()
        run.fit(model, Data())
        run.save_checkpoint(tmp_path / "model.ckpt")
        again = SequenceModel.load_from_checkpoint(tmp_path / "model.ckpt", weights_only=True)
        assert again.class_names == ["a", "b", "c"]
        batch = make_batch()
        torch.testing.assert_close(again(batch.x, batch.lengths).scores, model(batch.x, batch.lengths).scores)
        with pytest.raises(ValueError, match=r"num_classes=4.*Data has num_classes=3"):
            trainer().fit(SequenceModel(num_classes=4), Data())

    def test_missing_ones_are_named(self):
        with pytest.raises(
            ValueError, match="needs target_kind, one of classification, regression, labelling, forecasting; got None"
        ):
            trainer().fit(SequenceModel(2), loader([make_batch()]))
        with pytest.raises(ValueError, match="num_classes of classes"):
            trainer().fit(SequenceModel(2, target_kind="classification"), loader([make_batch()]))
        with pytest.raises(ValueError, match="would see what it forecasts"):
            make("forecasting", bidirectional=True)

    @pytest.mark.parametrize(
        ("layers", "message"),
        [
            ({"conv_kernel": 4}, "conv_kernel=4 needs residual=True"),
            (BLOCK | {"conv_kernel": 1}, "conv_kernel must be 0, for none, or an integer from 2 on; got 1"),
            (BLOCK | {"conv_kernel": 2.5}, "an integer from 2 on; got 2.5"),
            (BLOCK | {"feed_forward_dim": -1}, "feed_forward_dim must be 0, for none, or an integer from 1 on; got -1"),
        ],
    )
    def test_parts_of_a_block_that_cannot_be(self, layers, message):
        with pytest.raises(ValueError, match=message):
            make(**layers)


@pytest.mark.parametrize("options", [{}, {"num_layers": 3, **BLOCK, "bidirectional": True, "pooling": "mean"}])
def test_every_parameter_is_used(options):
    for kind in ("classification", "labelling"):
        model = make(kind, **options)
        model.training_step(make_batch(kind), 0)["loss"].backward()
        assert all(parameter.grad is not None for parameter in model.parameters())


def test_one_batch_can_be_overfitted():
    model, batch = make(hidden_dim=16), make_batch()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(150):
        optimizer.zero_grad()
        loss = model.training_step(batch, 0)["loss"]
        loss.backward()
        optimizer.step()
    labels = model(batch.x, batch.lengths).scores.argmax(1)
    assert (labels == batch.target)[LENGTHS > 0].all()


def cut(batch: SequenceBatch, sizes: list[int]) -> list[SequenceBatch]:
    """Rows in chunks of so many steps; rows that have ended are left out, and the others change their order."""
    chunks, start, before = [], 0, None
    for size in sizes:
        rows = [row for row in range(len(batch.x)) if before is None or batch.lengths[row] > start]
        rows = rows if before is None else rows[::-1]
        carried = torch.tensor([-1 if before is None else before.index(row) for row in rows])
        target = batch.target[rows]
        if batch.target.ndim == 1:
            missing = torch.nan if target.is_floating_point() else IGNORED
            target = torch.where(batch.lengths[rows] <= start + size, target, missing)
        else:
            target = target[:, start : start + size]
        lengths = (batch.lengths[rows] - start).clamp(0, size)
        chunks.append(SequenceBatch(batch.x[rows, start : start + size], lengths, target, carried))
        start, before = start + size, rows
    return chunks


def stop_and_go_on(chunks: list[SequenceBatch], path: Path, **options) -> list[dict[str, torch.Tensor]]:
    """Weights after three chunks, and after the third alone, from what was saved before it."""

    def run(chunks, ckpt_path=None):
        keeper = ModelCheckpoint(path.parent, filename=path.stem, every_n_train_steps=2)
        more = {"callbacks": [keeper], "enable_checkpointing": True, **options}
        return fit_parts(make("labelling"), chunks, ckpt_path, **more)

    # a plain loader starts anew where a run resumes, and the Trainer takes one batch of it
    return [run(chunks), run(chunks[2:] * 3, path)]


class TestTruncation:
    @pytest.mark.parametrize(("cell", "layers"), [("gru", {}), ("lstm", BLOCK), ("mingru", BLOCK)])
    def test_chunks_score_as_the_whole(self, cell, layers):
        model, batch = make("labelling", cell=cell, num_layers=2, **layers), make_batch("labelling")
        whole = model(batch.x, batch.lengths).scores
        rows, start = list(range(8)), 0
        for chunk in cut(batch, [2, 1, 3]):
            rows = [rows[i] for i in chunk.carried] if start else rows
            scores, inside = model._scores(chunk, "train"), chunk.target != IGNORED
            steps = chunk.x.shape[1]
            torch.testing.assert_close(scores[inside], whole[rows, start : start + steps][inside])
            start += steps

    @pytest.mark.parametrize("kind", ["labelling", "classification", "regression"])
    def test_trains_as_a_truncated_loop(self, kind):
        chunks = cut(make_batch(kind), [2, 4]) * 2
        trained = fit_parts(make(kind, cell="lstm"), chunks)
        model = make(kind, cell="lstm")
        optimizer = SGD(model.parameters())
        rnn = model.blocks[0].rnn
        state = None
        for chunk in chunks:
            begins = bool((chunk.carried == -1).all())
            state = None if begins else tuple(one.detach()[:, chunk.carried] for one in state)
            output, pooled, state = rnn(chunk.x, chunk.lengths, state)
            scores = model.head(output if kind == "labelling" else pooled)
            if kind == "regression":
                valid = ~chunk.target.isnan()
                loss = (scores[valid, 0] - chunk.target[valid]).square().mean()
            else:
                valid = chunk.target != IGNORED
                loss = F.cross_entropy(scores[valid], chunk.target[valid])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        torch.testing.assert_close(trained, dict(model.state_dict()))

    @pytest.mark.filterwarnings("ignore::UserWarning")
    def test_a_run_that_is_stopped_between_chunks_goes_on(self, tmp_path):
        through, resumed = stop_and_go_on(cut(make_batch("labelling"), [2, 1, 3]), tmp_path / "two.ckpt")
        assert torch.load(tmp_path / "two.ckpt", weights_only=True)["carried_state"]
        assert all(torch.equal(resumed[name], through[name]) for name in through)

    def test_rows_that_are_not_there_are_refused(self):
        model, chunks = make("labelling"), cut(make_batch("labelling"), [2, 4])
        model.training_step(chunks[0], 0)
        with pytest.raises(ValueError, match="names row 8 of the batch before, which had 8 rows"):
            model.training_step(chunks[1]._replace(carried=chunks[1].carried * 0 + 8), 1)

    def test_evaluation_leaves_the_state_of_training(self):
        model, chunks = make("labelling"), cut(make_batch("labelling"), [2, 4])
        model.training_step(chunks[0], 0)
        expected = model.training_step(chunks[1], 1)["loss"]
        model.training_step(chunks[0], 0)
        model._masked_loss(chunks[0]._replace(x=chunks[0].x + 1), "val")
        torch.testing.assert_close(model.training_step(chunks[1], 1)["loss"], expected)

    @pytest.mark.parametrize(
        ("options", "found"), [({"bidirectional": True}, "bidirectional=True"), ({"pooling": "mean"}, "pooling='mean'")]
    )
    def test_what_needs_the_whole_sequence_is_refused(self, options, found):
        class Data(L.LightningDataModule):
            chunk_steps = 2

            def train_dataloader(self):
                raise AssertionError("training began")

        with pytest.raises(ValueError, match=f"cannot have {found}"):
            trainer().fit(make(**options), Data())
        with pytest.raises(ValueError, match=f"cannot have {found}"):
            make(**options).training_step(cut(make_batch(), [2, 4])[0], 0)

    @pytest.mark.parametrize("callbacks", [[], [ExactResume()]], ids=["alone", "ExactResume"])
    def test_a_datamodule_that_cuts_sequences_is_trained_on_and_resumed_within_one(self, tmp_path, callbacks):
        def run(max_steps, ckpt_path=None):
            torch.manual_seed(1)
            data = SequenceDataModule(
                task="adding",
                generated=GeneratedSequences(length=32, num_sequences=80),
                global_batch_size=20,
                chunk_steps=6,
            )
            model = SequenceModel(layers=RecurrentLayers(hidden_dim=8, cell="lstm"), optimizer=SGD)
            fitted = trainer(max_epochs=-1, max_steps=max_steps, limit_val_batches=0, callbacks=callbacks)
            fitted.fit(model, data, ckpt_path=ckpt_path, weights_only=True if ckpt_path else None)
            return model

        whole = run(11)
        assert len(whole.trainer.train_dataloader) == 18  # 3 batches in 6 chunks each: the 8th step is within one
        run(8).trainer.save_checkpoint(tmp_path / "stopped.ckpt")
        resumed = run(11, tmp_path / "stopped.ckpt")
        for name, value in whole.state_dict().items():
            assert value.equal(resumed.state_dict()[name]), name

    def test_strategies_that_split_rows_are_refused(self):
        chunks = cut(make_batch(), [2, 4])
        with pytest.raises(ValueError, match="under DataParallelStrategy, which splits batches by rows"):
            trainer(strategy="accel_dp", devices=2).fit(make(), loader(chunks))


def check_stop_and_go_on(rank, strategy, folder):
    chunks = cut(make_batch("labelling", HALVES[rank]), [2, 1, 3])
    return stop_and_go_on(chunks, folder / "two.ckpt", strategy=strategy, devices=2)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "accel_fsdp2"])
def test_states_of_all_processes_are_restored(strategy, tmp_path):
    for through, resumed in run_ranks(check_stop_and_go_on, strategy, tmp_path):
        assert all(torch.equal(resumed[name], through[name]) for name in through)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # Lightning's
def test_another_number_of_processes_starts_from_zeros(tmp_path):
    chunks = cut(make_batch("labelling"), [2, 4])
    first = trainer(max_steps=1)
    first.fit(make("labelling"), loader(chunks))
    first.save_checkpoint(tmp_path / "one.ckpt")
    saved = torch.load(tmp_path / "one.ckpt", weights_only=True)
    torch.save({**saved, "carried_state": saved["carried_state"] * 2}, tmp_path / "two.ckpt")
    with pytest.warns(UserWarning, match=r"in 2 processes, this run has 1.*zeros"):
        fit_parts(make("labelling"), chunks, ckpt_path=tmp_path / "two.ckpt")
