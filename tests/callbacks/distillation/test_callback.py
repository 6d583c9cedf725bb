"""Distilled runs are compared with loops that know no Trainer, and, resumed or split, with whole ones."""

import copy
import warnings
from collections import UserDict
from functools import partial
from types import MethodType

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.cli import LightningArgumentParser
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_accel import Classifier, MoEClassifier, MoELanguageModel, SequenceModel
from lightning_accel.callbacks import Distillation, ExactResume, Pruning
from lightning_accel.callbacks.deployment.copies import WholeCopy
from lightning_accel.callbacks.deployment.deployed import find_deployed
from lightning_accel.callbacks.distillation.loss import denominator_ratio, divergence, position_mask, squared_error
from lightning_accel.callbacks.recorded_calls import CallRecorder
from lightning_accel.data.sequences.batch import IGNORED
from lightning_accel.models import Experts, RecurrentLayers
from lightning_accel.strategies.replicas import Replica
from tests.ranks import run_ranks
from tests.strategies.trained import Rows, make

SGD = partial(torch.optim.SGD, lr=0.5)
DATA = TensorDataset(torch.randn(12, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3)),
                     torch.arange(12) % 3)  # fmt: skip
FLOATS = TensorDataset(DATA.tensors[0].float(), DATA.tensors[1])
QUIET = {
    "accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
    "enable_checkpointing": False, "num_sanity_val_steps": 0,
}  # fmt: skip


class Own(L.LightningModule):
    """Knows nothing of us; calls its network, never itself."""

    def __init__(self, dropout=0.0, width=7):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Dropout(dropout), nn.Linear(width, 3))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return SGD(self.parameters())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))

    def forward(self, x):
        return self.layers(x)


def teacher_net(seed=5):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(5, 9), nn.Dropout(0.5), nn.Tanh(), nn.Linear(9, 3))


def fit(module, *callbacks, data=DATA, batch_size=4, ckpt_path=None, **options):
    options = {"max_steps": 6, "max_epochs": -1, "precision": "64-true", **options}
    trainer = L.Trainer(callbacks=list(callbacks), **QUIET | options)
    loader = data if isinstance(data, L.LightningDataModule) else DataLoader(data, batch_size)
    trainer.fit(module, loader, ckpt_path=ckpt_path)
    return trainer


def by_hand(module, step, batches, optimizer=SGD):
    """Weights after training ``module`` on ``step``, its loss, alone."""
    module = copy.deepcopy(module).double()
    optimizer = optimizer(module.parameters())
    for batch in batches:
        optimizer.zero_grad()
        step(module, batch).backward()
        optimizer.step()
    return module.state_dict()


def kl(student, teacher, temperature):
    """Through probabilities, position by position."""
    p, q = (teacher / temperature).softmax(-1), (student / temperature).softmax(-1)
    return (p * (p.log() - q.log())).sum(-1) * temperature**2


def batches_of(data, size=4, times=2):
    return [batch for _ in range(times) for batch in DataLoader(data, size)]


def test_weights_are_those_of_a_loop():
    module, teacher = Own(), teacher_net()
    aim = copy.deepcopy(teacher).double().eval()

    def step(student, batch):
        logits = student.net(batch[0])
        return F.cross_entropy(logits, batch[1]) + 0.7 * kl(logits, aim(batch[0]), 3.0).mean()

    expected = by_hand(module, step, batches_of(DATA))
    trainer = fit(module, Distillation(teacher, weight=0.7, temperature=3.0))
    torch.testing.assert_close(module.state_dict(), expected, rtol=1e-12, atol=1e-12)
    with torch.no_grad():  # what is logged is of the last step, before it
        assert trainer.callback_metrics["train/distillation_loss"] > 0


def test_probabilities_of_values_are_refused():
    class OfValues(Own):
        def training_step(self, batch, batch_idx):
            return self.net(batch[0]).square().mean()

    module, teacher = OfValues(), teacher_net()
    module.net[-1], teacher[-1] = nn.Linear(7, 1), nn.Linear(9, 1)
    with pytest.raises(ValueError, match=r"probabilities of two or more classes.*shape \(4, 1\). Set loss='mse'"):
        fit(module, Distillation(teacher))


def test_accumulated_steps_are_those_of_a_loop():
    module, teacher = Own(), teacher_net()
    aim = copy.deepcopy(teacher).double().eval()

    def step(student, batch):
        logits = student.net(batch[0])
        return F.cross_entropy(logits, batch[1]) + 0.5 * kl(logits, aim(batch[0]), 4.0).mean()

    expected = by_hand(module, step, batches_of(DATA, 6, 3))
    fit(module, Distillation(teacher), batch_size=2, accumulate_grad_batches=3)
    torch.testing.assert_close(module.state_dict(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("loss", ["mse", lambda student, teacher: (student - teacher).abs().sum()])
def test_other_distances(loss):
    module, teacher = Own(), teacher_net()
    aim = copy.deepcopy(teacher).double().eval()

    def step(student, batch):
        values = student.net(batch[0])
        far = values - aim(batch[0])
        return F.cross_entropy(values, batch[1]) + 0.5 * (far.square().mean() if loss == "mse" else far.abs().sum())

    expected = by_hand(module, step, batches_of(DATA))
    fit(module, Distillation(teacher, loss=loss))
    torch.testing.assert_close(module.state_dict(), expected, rtol=1e-12, atol=1e-12)


def sequence_model(seed, **options):
    torch.manual_seed(seed)
    sizes = {"vocab_size": 11, "num_classes": 3, "dim": 6, "layers": RecurrentLayers(hidden_dim=8), **options}
    return SequenceModel(**sizes, target_kind="labelling", optimizer=SGD)


def test_padding_counts_for_nothing():
    lengths = torch.tensor([1, 4, 6, 2, 3, 6])
    tokens = torch.randint(11, (6, 6))
    labels = torch.randint(3, (6, 6)).masked_fill(torch.arange(6) >= lengths[:, None], IGNORED)
    labels[2, 1] = IGNORED  # and one within a row
    module, teacher = sequence_model(1), sequence_model(2, layers=RecurrentLayers(hidden_dim=12))
    aim = copy.deepcopy(teacher).double().eval()
    valid = labels != IGNORED

    def step(student, batch):
        x, lengths, target = batch
        scores = student(x, lengths).scores[valid]
        far = kl(scores, aim(x, lengths).scores[valid], 4.0)
        return F.cross_entropy(scores, target[valid]) + 0.5 * far.mean()

    data = TensorDataset(tokens, lengths, labels)
    expected = by_hand(module, step, batches_of(data, 6, 3))
    fit(module, Distillation(teacher), data=data, batch_size=6, max_steps=3)
    torch.testing.assert_close(module.state_dict(), expected, rtol=1e-10, atol=1e-10)


def test_every_token_of_a_language_model_counts():
    def model(seed, layers):
        torch.manual_seed(seed)
        options = {"experts": Experts(4, hidden_dim=6, balance_weight=0.0, z_weight=0.0), "optimizer": SGD}
        return MoELanguageModel(11, dim=8, num_layers=layers, attention={"num_heads": 2}, **options)

    module, teacher = model(1, 1), model(2, 2)
    aim = copy.deepcopy(teacher).double().eval()

    def step(student, batch):
        logits, _ = student(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        return loss + 0.5 * kl(logits, aim(batch[:, :-1]).logits, 4.0).mean()

    tokens = torch.randint(11, (4, 7))
    data = [tokens[:2], tokens[2:]]
    expected = by_hand(module, step, data)
    trainer = L.Trainer(callbacks=[Distillation(teacher)], precision="64-true", max_epochs=1, **QUIET)
    trainer.fit(module, DataLoader(data, batch_size=None))
    for name, value in expected.items():
        if value.is_floating_point():
            torch.testing.assert_close(module.state_dict()[name], value, rtol=1e-6, atol=1e-7)  # float32 inside


@pytest.mark.slow
def test_classifiers_teach_each_other():
    torch.manual_seed(2)
    teacher = MoEClassifier(5, 3, dim=8, experts=Experts(4, hidden_dim=6))
    for module in (Classifier(5, 3, hidden_dims=[4], optimizer=SGD), MoEClassifier(5, 3, dim=8, optimizer=SGD)):
        before = copy.deepcopy(module.state_dict())
        trainer = fit(module, Distillation(copy.deepcopy(teacher)))
        assert trainer.callback_metrics["train/distillation_loss"].isfinite()
        assert any(not value.equal(before[name]) for name, value in module.state_dict().items())
    (own, aim), keep = torch.randn(2, 4, 3), torch.tensor([True, False, True, True])
    expected = kl(own[keep], aim[keep], 2.0).mean()
    torch.testing.assert_close(divergence(own, aim, 2.0, keep=keep), expected)
    torch.testing.assert_close(divergence(own.T, aim.T, 2.0, class_dim=0, keep=keep), expected)
    steps = [[True, False, False], [True, True, True]]
    assert position_mask(torch.Size([2, 3]), torch.tensor([1, 3]), None, IGNORED).tolist() == steps
    ignored = torch.tensor([4, IGNORED])
    assert position_mask(torch.Size([2]), torch.tensor([1, 3]), ignored, IGNORED).tolist() == [True, False]
    wrapped = UserDict({"labels": ignored})  # as a BatchEncoding of transformers is
    assert position_mask(torch.Size([2]), None, wrapped, IGNORED).tolist() == [True, False]
    aim[:, 1] = own[:, 1] = -torch.inf  # a class that is masked out
    assert divergence(own, aim, 2.0).isfinite()
    assert squared_error(own[:, [0]], own[:, [0]] + 2, keep) == 4


def test_the_denominator_is_that_of_the_step_s_loss():
    keep = torch.tensor([[True, True, False], [True, False, False]])
    assert denominator_ratio(keep, 4.0) == 0.75  # 3 positions here, 4 in the mean over processes
    assert denominator_ratio(keep, 2.5) == torch.tensor(3 / 2.5)
    assert denominator_ratio(keep, 1.9) == torch.tensor(2 / 1.9)  # 2 samples, closer than 3 positions
    assert denominator_ratio(keep, 0.0) == denominator_ratio(None, 4.0) == denominator_ratio(keep, None) == 1


class Watches(L.Callback):
    """What the module looks like in mid-run."""

    copy = None

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.names = set(dict(pl_module.named_modules()))
        self.state = set(pl_module.state_dict())
        self.copy = self.copy or copy.deepcopy(pl_module)
        optimizer = trainer.optimizers[0]
        self.optimized = {id(one) for group in optimizer.param_groups for one in group["params"]}

    def on_fit_end(self, trainer, pl_module):
        self.at_end = WholeCopy(pl_module).make(trainer, pl_module)


def test_the_teacher_is_no_part_of_the_module():
    module, teacher, watches = Own(), teacher_net(), Watches()
    names, state = set(dict(module.named_modules())), set(module.state_dict())
    fit(module, Distillation(teacher), watches)
    assert watches.names == names
    assert watches.state == state
    assert watches.optimized == {id(one) for one in module.parameters()}
    for one in (module, watches.at_end):
        assert "training_step" not in vars(one)
        assert not any(part._forward_hooks for part in one.modules())
    assert all(value.grad is None for value in teacher.parameters())
    batch = DATA[:4]
    copied = watches.copy.training_step(batch, 0)  # of a copy, after the run, with no teacher
    assert copied == F.cross_entropy(watches.copy.net(batch[0]), batch[1])
    assert copied != F.cross_entropy(module.net(batch[0]), batch[1])
    loader = DataLoader(DATA, 4)
    assert find_deployed(watches.at_end, loader).name == "net"


def test_calls_of_copies_are_not_recorded():
    net, recorder = Net(), CallRecorder()
    recorder.watch(net, ["", "layers"])
    twin = copy.deepcopy(net)
    with recorder.recording() as calls:
        twin(torch.ones(2, 5))
        assert not calls
        net(torch.ones(2, 5))
    net(torch.ones(2, 5))
    assert {name: len(found) for name, found in calls.items()} == {"": 1, "layers": 1}


def test_replicas_take_the_step_with_them():
    module = Own()
    module.training_step = MethodType(Own.training_step, module)
    replica = Replica(module, torch.device("cpu")).module
    assert replica.training_step.__self__ is replica


def test_it_is_taken_off_after_an_exception():
    class Fails(Own):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2:
                raise RuntimeError("planted")
            return super().training_step(batch, batch_idx)

    module = Fails()
    with pytest.raises(RuntimeError, match="planted"):
        fit(module, Distillation(teacher_net()))
    assert "training_step" not in vars(module)
    assert not any(part._forward_hooks for part in module.modules())


def test_a_step_of_somebody_elses_is_kept():
    module = Own()
    given = []

    def training_step(batch, batch_idx):
        given.append(batch_idx)
        return Own.training_step(module, batch, batch_idx)

    module.training_step = training_step
    fit(module, Distillation(teacher_net()))
    assert given == [0, 1, 2, 0, 1, 2]
    assert module.training_step is training_step


@pytest.mark.filterwarnings("ignore:.*returned `None`")
def test_steps_that_return_a_dict_or_nothing():
    class Returns(Own):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx == 1 else {"loss": loss, "more": 3}

    class Sees(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            assert (outputs.get("more") == 3) is (batch_idx != 1), outputs

    module, teacher = Returns(), teacher_net()
    aim = copy.deepcopy(teacher).double().eval()

    def step(student, batch):
        logits = student.net(batch[0])
        return F.cross_entropy(logits, batch[1]) + 0.5 * kl(logits, aim(batch[0]), 4.0).mean()

    batches = batches_of(DATA)
    expected = by_hand(module, step, [batches[number] for number in (0, 2, 3, 5)])
    fit(module, Distillation(teacher), Sees(), max_steps=-1, max_epochs=2)
    torch.testing.assert_close(module.state_dict(), expected, rtol=1e-12, atol=1e-12)


def test_the_teacher_is_given_back_as_it_was():
    teacher = teacher_net().train()
    teacher[0].requires_grad_(False)
    for _ in range(2):  # and serves another run
        fit(Own(), Distillation(teacher))
        assert teacher.training
        assert [one.requires_grad for one in teacher[0].parameters()] == [False, False]
        assert all(one.requires_grad for one in teacher[-1].parameters())


def test_no_gradient_flows_through_the_teacher():
    """Not even to what the student computes its inputs by."""

    class Deeper(Own):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(5, 5)

        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self.net(self.first(batch[0])), batch[1])

    module, teacher = Deeper(), teacher_net()
    aim = copy.deepcopy(teacher).double().eval()

    def step(student, batch):
        hidden = student.first(batch[0])
        logits = student.net(hidden)
        return F.cross_entropy(logits, batch[1]) + 0.5 * kl(logits, aim(hidden).detach(), 4.0).mean()

    expected = by_hand(module, step, batches_of(DATA))
    fit(module, Distillation(teacher))
    torch.testing.assert_close(module.state_dict(), expected, rtol=1e-12, atol=1e-12)


def test_two_views_of_a_batch_are_compared_each():
    class Twice(Own):
        def training_step(self, batch, batch_idx):
            x, target = batch
            return F.cross_entropy(self.net(x), target) + F.cross_entropy(self.net(-x), target)

    module, teacher = Twice(), teacher_net()
    aim = copy.deepcopy(teacher).double().eval()

    def step(student, batch):
        x, target = batch
        terms = [F.cross_entropy(student.net(one), target) for one in (x, -x)]
        far = [kl(student.net(one), aim(one), 4.0).mean() for one in (x, -x)]
        return sum(terms) + 0.5 * sum(far) / 2

    expected = by_hand(module, step, batches_of(DATA))
    fit(module, Distillation(teacher))
    torch.testing.assert_close(module.state_dict(), expected, rtol=1e-12, atol=1e-12)


def test_initial_is_the_student_at_the_start():
    module = Own()
    aim = copy.deepcopy(module).double()

    def step(student, batch):
        logits = student.net(batch[0])
        return F.cross_entropy(logits, batch[1]) + 2.0 * kl(logits, aim.net(batch[0]), 4.0).mean()

    expected = by_hand(module, step, batches_of(DATA))
    fit(module, Distillation("initial", weight=2.0))
    torch.testing.assert_close(module.state_dict(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("order", [1, -1], ids=["pruned first", "taught first"])
def test_dense_is_the_student_before_it_is_pruned(order):
    """And until then there is no teacher."""
    alone, module, data = Own(), Own(), FLOATS
    module.load_state_dict(alone.state_dict())
    options = {"data": data, "precision": "32-true"}
    fit(alone, max_steps=2, **options)
    distillation, pruning = Distillation("dense", weight=2.0), Pruning(0.5, schedule="one_shot", begin=2)
    distances = []

    class Watching(L.Callback):
        def on_train_batch_end(self, trainer, *_):
            distances.append(trainer.logged_metrics.get("train/distillation_loss"))

    fit(module, *[distillation, pruning][::order], Watching(), max_steps=4, **options)
    torch.testing.assert_close(distillation._teacher.module.state_dict(), alone.state_dict())
    assert [one is None for one in distances] == [True, True, False, False]
    assert distances[2] > 0  # of the same weights, but for those that are pruned


class Validated(Own):
    def validation_step(self, batch, batch_idx):
        self.net(batch[0])


@pytest.mark.sampled(default=1)
@pytest.mark.filterwarnings("ignore:.*no `val_dataloader`")
@pytest.mark.parametrize("structure", ["unstructured", "channel"])
def test_a_dense_teacher_is_kept_for_a_run_that_goes_on(tmp_path, structure):
    """Also of a student that is smaller by then."""
    ends = []
    for begin in (1, 3):  # before and after the run is cut

        def parts(begin=begin):
            pruning = Pruning(0.5, structure=structure, schedule="one_shot", begin=begin)
            return ExactResume(), Distillation("dense", weight=2.0), pruning

        options = {"data": FLOATS, "precision": "32-true"}
        whole, resumed, path = Validated(), Validated(), tmp_path / f"{begin}.ckpt"
        resumed.load_state_dict(whole.state_dict())
        fit(whole, *parts(), SaveAt(path, 2), **options)
        fit(resumed, *parts(), ckpt_path=path, **options)
        torch.testing.assert_close(resumed.state_dict(), whole.state_dict(), rtol=0, atol=0)
        torch.load(path, weights_only=True)
        ends.append(whole.net[0].weight)
    assert not torch.equal(*ends)


def test_a_dense_teacher_needs_what_changes_the_student():
    with pytest.raises(ValueError, match=r"teacher='dense'.*add Pruning or Quantization.*teacher='initial'"):
        fit(Own(), Distillation("dense"))


def test_a_weight_of_zero_changes_nothing():
    """The teacher draws no numbers, and leaves the student in training mode."""
    ends = []
    for callbacks in ([], [Distillation("initial", weight=0.0)]):
        torch.manual_seed(5)
        module = Own(dropout=0.5)
        fit(module, *callbacks)
        ends.append(module.state_dict())
    torch.testing.assert_close(*ends, rtol=0, atol=0)


class SaveAt(L.Callback):
    def __init__(self, path, step):
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def test_resumed_runs_have_the_same_teacher(tmp_path):
    data, options = FLOATS, {"precision": "32-true"}  # Lightning rounds weights of 64-true when it resumes
    whole = Own(dropout=0.3)
    distillation = Distillation("initial", weight=3.0)
    fit(whole, ExactResume(), distillation, SaveAt(tmp_path / "2.ckpt", 2), data=data, **options)
    resumed = Own(dropout=0.3)
    again = Distillation("initial", weight=3.0)
    fit(resumed, ExactResume(), again, data=data, ckpt_path=tmp_path / "2.ckpt", **options)
    torch.testing.assert_close(resumed.state_dict(), whole.state_dict(), rtol=0, atol=0)
    torch.load(tmp_path / "2.ckpt", weights_only=True)


@pytest.mark.slow
def test_teachers_are_loaded_without_pickle(tmp_path):
    torch.manual_seed(3)
    one = Classifier(5, 3, hidden_dims=[9])
    named = {"_class_path": "lightning_accel.Classifier", "num_features": 5, "num_classes": 3, "hidden_dims": [9]}
    head = {"state_dict": one.state_dict(), "pytorch-lightning_version": L.__version__}
    torch.save({**head, "hyper_parameters": {**named, "_instantiator": "lightning.pytorch.cli.instantiate_module"}},
               tmp_path / "named.ckpt")  # fmt: skip
    torch.save(head, tmp_path / "plain.ckpt")
    torch.save(one.state_dict(), tmp_path / "weights.pt")
    ends = []
    for callback in [
        Distillation(one),
        Distillation(tmp_path / "named.ckpt"),
        Distillation(Classifier(5, 3, hidden_dims=[9]), checkpoint=tmp_path / "plain.ckpt"),
        Distillation(Classifier(5, 3, hidden_dims=[9]), checkpoint=tmp_path / "weights.pt"),
    ]:
        torch.manual_seed(1)
        module = Classifier(5, 3, hidden_dims=[4], optimizer=SGD)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fit(module, callback)
        ends.append(module.state_dict())
    for other in ends[1:]:
        torch.testing.assert_close(other, ends[0], rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"plain.ckpt does not say which class.*checkpoint='.*plain.ckpt'"):
        fit(Own(), Distillation(tmp_path / "plain.ckpt"))


@pytest.mark.slow
def test_a_config_builds_the_teacher():
    parser = LightningArgumentParser(exit_on_error=False)
    parser.add_lightning_class_args(L.Trainer, "trainer")
    for teacher in ("initial", {"class_path": "lightning_accel.Classifier", "init_args": {"hidden_dims": [9]}}):
        options = {"teacher": teacher, "temperature": 2.0}
        callback = {"class_path": "lightning_accel.callbacks.Distillation", "init_args": options}
        config = parser.parse_object({"trainer": {"callbacks": [callback]}})
        made = parser.instantiate(config).trainer.callbacks[0]
        assert isinstance(made, Distillation)
        assert made.teacher == "initial" or made.teacher.network[1].out_features == 9
        assert made.temperature == 2.0


@pytest.mark.sampled(default=1)
@pytest.mark.parametrize("in_place", [True, False])
def test_a_compiled_submodule_is_not_compiled_again(in_place):
    """With no compiler behind it: what is counted is how often its code is looked at, with the callback and without."""
    seen, counts, ends = [], [], []

    def backend(graph, inputs):
        seen.append(graph)
        return graph.forward

    for callbacks, compiled in (
        ([], True),
        ([Distillation(teacher_net())], True),
        ([Distillation(teacher_net())], False),
    ):
        torch._dynamo.reset()
        seen.clear()
        torch.manual_seed(1)
        module = Own()
        net = module.net = Net()
        if compiled and in_place:
            module.net.compile(backend=backend)
        elif compiled:
            module.net = torch.compile(module.net, backend=backend)
        fit(module, *callbacks)
        counts.append(len(seen))
        ends.append(net.state_dict())
    assert counts[0] == counts[1] > 0
    torch.testing.assert_close(ends[1], ends[2], rtol=1e-12, atol=1e-12)
    torch._dynamo.reset()


def test_autocast_reaches_the_teacher_and_not_the_distance():
    seen = []

    class Sees(nn.Linear):
        def forward(self, x):
            out = super().forward(x)
            seen.append((out.dtype, out.requires_grad, self.training))
            return out

    def distance(student, teacher):
        seen.append(torch.is_autocast_enabled("cpu"))
        return (student.float() - teacher.float()).square().mean()

    teacher = Sees(5, 3).train()
    fit(Own(), Distillation(teacher, loss=distance), data=FLOATS, precision="bf16-mixed", max_steps=1)
    assert seen == [(torch.bfloat16, False, False), False]


def test_what_cannot_work_is_refused(tmp_path):
    for options, message in [
        ({"weight": -1.0}, "weight must be at least 0; got -1.0"),
        ({"temperature": 0.0}, "temperature must be above 0; got 0.0"),
        ({"loss": "ce"}, "loss must be 'kl', 'reverse_kl', 'mse' or a function; got 'ce'"),
        ({"checkpoint": "a.ckpt"}, "checkpoint holds weights for a module, but teacher is 'initial'"),
    ]:
        with pytest.raises(ValueError, match=message):
            Distillation("initial", **options)
    with pytest.raises(FileNotFoundError, match=r"no checkpoint none.ckpt of a teacher; name a .ckpt file"):
        fit(Own(), Distillation("none.ckpt"))
    module = Own()
    with pytest.raises(ValueError, match="share weights, which would be frozen; write teacher='initial'"):
        fit(module, Distillation(module.net))
    with pytest.raises(ValueError, match="the student Own has no submodule 'nets'; give one of its own, such as net"):
        fit(Own(), Distillation(teacher_net(), module="nets"))

    class ByHand(Own):
        automatic_optimization = False

    with pytest.raises(TypeError, match="needs automatic optimization, but ByHand optimizes by hand; take"):
        fit(ByHand(), Distillation(teacher_net()))


def test_teachers_that_do_not_fit_are_rejected_by_the_first_step():
    for make_teacher, message in [
        (lambda: Distillation(nn.Linear(5, 4)), r"the teacher gives \(4, 4\) where the student gives \(4, 3\)"),
        (
            lambda: Distillation(teacher_net(), module="net.3"),
            r"the teacher Sequential must take what the student's submodule 'net.3' is called with, \(4, 7\) float64, "
            "and fails with RuntimeError: mat1 and mat2",
        ),
        (
            lambda: Distillation(nn.Bilinear(5, 5, 3)),
            r"the teacher Bilinear must take .* 'net' .*, \(4, 5\) float64, and fails with TypeError: .*'input2'; give",
        ),
        (
            lambda: Distillation(L.LightningModule()),
            "the teacher LightningModule has no forward, and no submodule 'net'",
        ),
    ]:
        module = Own()
        before = copy.deepcopy(module.state_dict())
        with pytest.raises((ValueError, TypeError), match=message):
            fit(module, make_teacher())
        torch.testing.assert_close(module.double().state_dict(), {k: v.double() for k, v in before.items()})


def test_a_step_that_calls_nothing_is_told():
    class Silent(Own):
        def training_step(self, batch, batch_idx):
            return (batch[0] @ self.net[0].weight.T).square().mean()

    with pytest.raises(ValueError, match=r"Silent does not call a module with parameters, so there is no output"):
        fit(Silent(), Distillation(teacher_net()))
    with pytest.raises(ValueError, match=r"does not call 'net.2', so"):
        fit(Silent(), Distillation(teacher_net(), module="net.2"))


# ---- several devices


def run_split(name, teacher="initial", rows=8, ckpt_path=None, saver=(), **options):
    module, data = make(name, SGD)
    if teacher != "initial":
        with torch.random.fork_rng():
            teacher = make(name)[0]
            torch.manual_seed(7)
            for value in teacher.parameters():
                nn.init.normal_(value, std=0.3)
    callbacks = [ExactResume(), Distillation(teacher, weight=2.0), *saver]
    trainer = L.Trainer(callbacks=callbacks, **QUIET | {"max_steps": 4, "max_epochs": -1, **options})
    trainer.fit(module, Rows(data, rows), ckpt_path=ckpt_path)
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in module.state_dict().items()
        if value.is_floating_point()
    }


def check_split(rank, name, strategy, folder):
    for teacher in ("initial", "other"):
        path = folder / f"{teacher}.ckpt"
        split = run_split(name, teacher, saver=[SaveAt(path, 2)], strategy=strategy, devices=2)
        whole = run_split(name, teacher, rows=16)
        torch.testing.assert_close(split, whole, rtol=1e-4, atol=1e-5)
        resumed = run_split(name, teacher, strategy=strategy, devices=2, ckpt_path=path)
        torch.testing.assert_close(resumed, split, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("accel_fsdp2", marks=pytest.mark.slow)])
def test_processes_train_as_one(tmp_path, strategy):
    run_ranks(check_split, "plain", strategy, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("classifier", "ddp"),
        ("language_model", "accel_fsdp2"),
        pytest.param("sequence", "ddp", marks=pytest.mark.weekly),
        pytest.param("sequence", "accel_fsdp2", marks=pytest.mark.weekly),
        pytest.param("classifier", "accel_fsdp2", marks=pytest.mark.weekly),
        pytest.param("language_model", "ddp", marks=pytest.mark.weekly),
    ],
)
def test_processes_train_our_own_as_one(tmp_path, name, strategy):
    run_ranks(check_split, name, strategy, tmp_path)


@pytest.mark.slow
def test_devices_of_one_process_train_as_one():
    for name in ("plain", "classifier"):
        split = run_split(name, "other", strategy="accel_dp", devices=2, rows=16)
        torch.testing.assert_close(split, run_split(name, "other", rows=16), rtol=1e-4, atol=1e-5)


def check_refused(rank):
    for strategy, error, message in [
        ("accel_pipeline", TypeError, "does not work under accel_pipeline"),
        ("model_parallel", ValueError, "needs a whole copy of the student, which ModelParallelStrategy does not"),
    ]:
        made = L.pytorch.strategies.ModelParallelStrategy() if strategy == "model_parallel" else strategy
        with pytest.raises(error, match=message):
            run_split("plain", strategy=made, devices=2)


def test_strategies_that_cannot_copy_are_refused():
    run_ranks(check_refused)
