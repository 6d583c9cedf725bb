"""What goes wrong with Lightning's ``ModelPruning``, side by side: each scenario runs with it, and with ours."""

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, ModelPruning, StochasticWeightAveraging
from torch import nn

from lightning_accel.callbacks import ExactResume, Pruning
from lightning_accel.strategies import FullyShardedStrategy
from tests.callbacks.pruning.test_callback import Net, fit, rows, share_of_zeros
from tests.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore")


def theirs(**options):
    options = {"amount": 0.5, "use_lottery_ticket_hypothesis": False} | options
    return ModelPruning("l1_unstructured", parameter_names=["weight"], parameters_to_prune=(), **options)


def ours(**options):
    return Pruning(0.5, **{"begin": 0, "end": 6, "every_n_steps": 6} | options)


def linear_zeros(module):
    values = [one.weight for one in module.modules() if isinstance(one, nn.Linear)]
    return sum(int((value == 0).sum()) for value in values) / sum(value.numel() for value in values)


@pytest.mark.slow
def test_the_share_is_what_was_asked_for_however_many_epochs_there_are():
    """Theirs prunes half of what is left in each epoch."""
    module = Net()
    fit(module, theirs(), max_epochs=8)
    assert linear_zeros(module) > 0.98
    module = Net()
    fit(module, ours(), max_epochs=8)
    assert linear_zeros(module) == pytest.approx(0.5, abs=0.01)


class SaveAfterTwo(L.Callback):
    def __init__(self, path):
        self.path = path

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == 2:
            trainer.save_checkpoint(self.path)


@pytest.mark.sampled(default=1)
@pytest.mark.parametrize("permanent", [True, False])
def test_resumed_runs_have_the_masks(tmp_path, permanent):
    """Theirs loses its masks where zeros were made permanent, and else cannot load its own checkpoint."""
    path = tmp_path / "saved.ckpt"
    pruned_at_first = {"apply_pruning": lambda epoch: epoch == 0, "amount": 0.8, "make_pruning_permanent": permanent}
    fit(Net(), [theirs(**pruned_at_first), SaveAfterTwo(path)], max_epochs=3)
    if permanent:
        module = Net()
        fit(module, theirs(**pruned_at_first), max_epochs=5, ckpt_path=path)
        assert linear_zeros(module) < 0.2
    else:
        with pytest.raises(RuntimeError, match=r"Missing key|Unexpected key"):
            fit(Net(), theirs(**pruned_at_first), max_epochs=5, ckpt_path=path)
    fit(Net(), [ours(), SaveAfterTwo(path), ExactResume()], max_epochs=3)
    module = Net()
    fit(module, [ours(), ExactResume()], max_epochs=5, ckpt_path=path)
    assert linear_zeros(module) == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("make", [theirs, ours])
def test_the_best_checkpoint_is_a_sparse_one(tmp_path, make):
    """The dense model of the first epoch is the best by its figures."""

    class Worse(Net):
        def validation_step(self, batch, batch_idx):
            self.log("val/loss", float(self.current_epoch))

    keeper = ModelCheckpoint(tmp_path, monitor="val/loss")
    options = {"begin": 6, "end": 12} if make is ours else {"apply_pruning": lambda epoch: epoch > 0}
    fit(Worse(), [make(**options), keeper], max_epochs=4, enable_checkpointing=True)
    state = torch.load(keeper.best_model_path, weights_only=True)["state_dict"]
    values = [state[f"net.{number}.weight"] for number in (0, 3, 5)]
    zeros = sum(int((value == 0).sum()) for value in values) / sum(value.numel() for value in values)
    assert zeros == pytest.approx(0.5 if make is ours else 0, abs=0.01)


@pytest.mark.sampled(default=2)
@pytest.mark.parametrize(
    "average", [lambda: EMAWeightAveraging(decay=0.9), lambda: StochasticWeightAveraging(0.01, swa_epoch_start=2)],
    ids=["EMA", "SWA"],
)  # fmt: skip
def test_averages_of_weights_work(average):
    """Theirs changes the order of parameters, which averages go by."""
    with pytest.raises(RuntimeError):
        fit(Net(), [theirs(), average()], max_epochs=4)
    module = Net()
    fit(module, [ours(), average()], max_epochs=4)
    assert linear_zeros(module) == pytest.approx(0.5, abs=0.01)


class Attends(Net):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 3)
        self.attention = nn.MultiheadAttention(8, 2)

    def forward(self, x):
        return self.net(self.attention(x[:, None], x[:, None], x[:, None])[0][:, 0])


def test_attention_is_pruned():
    """Theirs names its weights, and then attention cannot find them."""
    options = {"parameter_names": ["in_proj_weight", "weight"], "amount": 0.5, "use_lottery_ticket_hypothesis": False}
    with pytest.raises(Exception):  # noqa: B017, PT011  # of which kind differs between versions of torch
        fit(Attends(), ModelPruning("l1_unstructured", **options))
    module = Attends()
    fit(module, ours(scope="layer"))
    for value in (module.attention.in_proj_weight, module.attention.out_proj.weight):
        assert int((value == 0).sum()) == value.numel() // 2


class Recurs(Net):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, 3)
        self.lstm = nn.LSTM(4, 6, num_layers=2)

    def forward(self, x):
        return self.net(self.lstm(x.view(-1, 2, 4).transpose(0, 1))[0][-1])


@pytest.mark.slow
def test_recurrent_weights_are_pruned():
    """Theirs passes them by without a word."""
    module = Recurs()
    fit(module, ModelPruning("l1_unstructured", amount=0.5, use_lottery_ticket_hypothesis=False))
    assert all((value != 0).all() for value in module.lstm.parameters())
    module = Recurs()
    fit(module, ours(scope="layer"))
    for name in ("weight_ih_l0", "weight_hh_l0", "weight_ih_l1", "weight_hh_l1"):
        assert int((getattr(module.lstm, name) == 0).sum()) == getattr(module.lstm, name).numel() // 2


def check_random_masks(rank):
    """Each process has drawn other numbers before, as with rows of its own."""
    found = []
    for kind in ("theirs", "ours"):
        made = (
            ModelPruning("random_unstructured", amount=0.5, use_lottery_ticket_hypothesis=False)
            if kind == "theirs"
            else ours(criterion=lambda name, value: torch.rand_like(value))
        )

        class Draw(L.Callback):
            def on_train_batch_start(self, *_):
                torch.rand(rank + 1)

        module = Net()
        fit(module, [Draw(), made], max_epochs=4, strategy="ddp", devices=2)
        found.append(torch.cat([module.net[number].weight.flatten() == 0 for number in (0, 3, 5)]))
    return found


@pytest.mark.slow
def test_random_masks_are_equal_over_processes():
    first, second = run_ranks(check_random_masks)
    assert not first[0].equal(second[0])
    assert first[1].equal(second[1])
    assert 0 < first[1].sum() < first[1].numel()


def check_split_parameters(rank):
    try:
        fit(Net(), theirs(), strategy=FullyShardedStrategy(), devices=2)
        failed = False
    except Exception:
        failed = True
    pruning = ours()
    fit(Net(), pruning, strategy=FullyShardedStrategy(), devices=2)
    return failed, pruning.sparsity()


@pytest.mark.slow
def test_split_parameters_are_pruned():
    for failed, sparsity in run_ranks(check_split_parameters):
        assert failed
        assert sparsity == pytest.approx(0.5, abs=0.01)


def test_names_of_parameters_and_the_size_of_checkpoints_stay(tmp_path):
    """Theirs saves masks as floats beside the weights while it trains; ours adds a bit for each weight."""

    class Wide(Net):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 3))

    sizes, names = {}, {}
    for kind, callback in (("none", []), ("theirs", theirs(make_pruning_permanent=False)), ("ours", ours())):
        module = Wide()
        trainer = fit(module, callback, max_epochs=1)
        trainer.save_checkpoint(tmp_path / "saved.ckpt", weights_only=False)
        sizes[kind] = (tmp_path / "saved.ckpt").stat().st_size
        names[kind] = list(module.state_dict())
    assert names["ours"] == names["none"] != names["theirs"]
    weights = 256 * (8 + 256 + 3)
    assert sizes["theirs"] - sizes["none"] > 4 * weights
    assert sizes["ours"] - sizes["none"] < weights / 8 + 6000


def test_what_is_logged_is_what_is_zero():
    """Theirs counts masks that it made permanent as pruned by nothing (Lightning #13595); there is no log of theirs."""
    module = Net()
    trainer = fit(module, ours(), logger=False)
    assert float(trainer.callback_metrics["pruning/sparsity"]) == pytest.approx(share_of_zeros(module))


def test_memory_does_not_grow_with_each_pruning():
    """Theirs keeps a mask beside each weight, and hooks on each forward pass (#8542)."""
    module = Net()
    pruning = Pruning(0.8, end=16, every_n_steps=1)
    counts = []

    class Count(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            counts.append(len(pruning._masks.pruned) + len(pruning._masks._factors) + len(pruning._masks._gradients))

    fit(module, [pruning, Count()], data=rows())
    assert max(counts) <= 6
