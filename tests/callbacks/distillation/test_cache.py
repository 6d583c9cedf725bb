"""A teacher's answers from disk train as the teacher itself, whatever was lost, and only where they are of use."""

import copy

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_accel.callbacks import Distillation, ExactResume
from lightning_accel.callbacks.distillation.cache import AnswerCache
from lightning_accel.callbacks.distillation.loss import TopClasses, divergence, top_classes
from lightning_accel.callbacks.recorded_calls import Call
from tests.callbacks.distillation.test_callback import DATA, QUIET, Own, batches_of, by_hand, fit, teacher_net


def grouped(logits, classes):
    """Return the probabilities of some classes and of all others together."""
    p = logits.softmax(-1)
    top = p.gather(-1, classes)
    return torch.cat([top, 1 - top.sum(-1, keepdim=True)], -1)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("k", [1, 3, 7, 9])
def test_divergence_of_the_top_and_all_others(k, reverse):
    generator = torch.Generator().manual_seed(k)
    student, teacher = (3 * torch.randn(2, 4, 7, generator=generator, dtype=torch.float64) for _ in range(2))
    student.requires_grad_()
    top = top_classes(teacher, k, 2.0)
    found = divergence(student, top, 2.0, reverse=reverse)
    p, q = (grouped(one / 2, top.classes) for one in (teacher, student))
    if k >= 7:
        p, q = p[..., :-1], q[..., :-1]
    p, q = (q, p) if reverse else (p, q)
    expected = 4 * (p * (p.log() - q.log())).sum(-1).mean()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(one, student, retain_graph=True)[0] for one in (found, expected)))
    if k >= 7:
        torch.testing.assert_close(found, divergence(student, teacher, 2.0, reverse=reverse))


def test_what_a_teacher_rules_out_stays_finite():
    student = torch.randn(3, 4, requires_grad=True)
    teacher = torch.randn(3, 4).index_fill(1, torch.tensor([2]), -torch.inf)
    masked = student.index_fill(1, torch.tensor([2]), -torch.inf)
    keep = torch.tensor([0, 1, 3])
    found = divergence(masked, teacher, 1.0, reverse=True)
    torch.testing.assert_close(found, divergence(student[:, keep], teacher[:, keep], 1.0, reverse=True))
    loss = divergence(student, teacher, 1.0, reverse=True)
    loss.backward()
    assert loss > 100  # as good as infinite, and it says in which direction to go
    assert (student.grad[:, 2] > 0).all()


def test_reverse_trains_as_a_loop():
    module, teacher = Own(), teacher_net()
    aim = copy.deepcopy(teacher).double().eval()

    def step(student, batch):
        logits = student.net(batch[0])
        p, q = logits.softmax(-1), aim(batch[0]).softmax(-1)
        return F.cross_entropy(logits, batch[1]) + 0.5 * (p * (p.log() - q.log())).sum(-1).mean()

    expected = by_hand(module, step, batches_of(DATA))
    fit(module, Distillation(teacher, loss="reverse_kl", temperature=1.0))
    torch.testing.assert_close(module.state_dict(), expected, rtol=1e-12, atol=1e-12)


class Counted(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net, self.calls = net, []

    def forward(self, x):
        self.calls.append(len(x))
        return self.net(x)


def weights(**options):
    module, teacher = Own(), Counted(teacher_net())
    torch.manual_seed(0)
    for one in module.net:
        if hasattr(one, "reset_parameters"):
            one.reset_parameters()
    data = options.pop("data", DATA)
    loader = DataLoader(data, 4, shuffle=True, generator=torch.Generator().manual_seed(4))
    callbacks = options.pop("callbacks", ())
    ckpt_path, steps = options.pop("ckpt_path", None), options.pop("max_steps", 9)
    callbacks = [Distillation(teacher, **options), *callbacks]
    trainer = L.Trainer(callbacks=callbacks, precision="64-true", max_steps=steps, **QUIET)
    trainer.fit(module, loader, ckpt_path=ckpt_path, weights_only=True)
    return module.state_dict(), teacher.calls, trainer


@pytest.mark.slow
def test_runs_once_and_trains_the_same(tmp_path):
    plain, calls, _ = weights()
    assert len(calls) == 9
    first, calls, _ = weights(cache=tmp_path / "cache", top_k=5)  # of three classes
    assert len(calls) == 3
    torch.testing.assert_close(first, plain, rtol=1e-6, atol=1e-7)
    again, calls, _ = weights(cache=tmp_path / "cache", top_k=5)
    assert calls == []
    assert all(torch.equal(first[name], again[name]) for name in first)
    (content,) = (tmp_path / "cache").iterdir()
    _, calls, _ = weights(cache=tmp_path / "cache", top_k=5, temperature=2.0)
    assert len(calls) == 3
    content.write_bytes(content.read_bytes()[:-7])  # as after a kill
    cut, calls, _ = weights(cache=tmp_path / "cache", top_k=5)
    assert len(calls) == 1
    assert all(torch.equal(first[name], cut[name]) for name in first)
    damaged = bytearray(content.read_bytes())
    damaged[30] ^= 1
    content.write_bytes(damaged)
    sound, calls, _ = weights(cache=tmp_path / "cache", top_k=5)
    assert len(calls) >= 1
    assert all(torch.equal(first[name], sound[name]) for name in first)


def test_a_resumed_run_ends_with_equal_bits(tmp_path):
    cache = {"cache": tmp_path / "cache", "top_k": 2}
    whole, _, _ = weights(callbacks=[ExactResume()], cache=tmp_path / "other", top_k=2)
    _, _, trainer = weights(callbacks=[ExactResume()], max_steps=4, **cache)
    trainer.save_checkpoint(tmp_path / "4.ckpt")
    resumed, _, _ = weights(callbacks=[ExactResume()], ckpt_path=tmp_path / "4.ckpt", **cache)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


class Noisy(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        x, y = DATA[index]
        return x + torch.randn(5), y


def test_samples_that_change_are_told(tmp_path):
    with pytest.warns(UserWarning, match="no batch of this epoch was among the teacher's answers in .* Take out cache"):
        weights(cache=tmp_path, data=Noisy())


def test_samples_and_processes_share_a_folder(tmp_path):
    teacher = nn.Linear(5, 3)
    one, other = (AnswerCache(tmp_path, 2, 1.0, teacher) for _ in range(2))
    tokens, mask = torch.arange(6).view(3, 2), torch.ones(4)
    call = Call((tokens,), {"mask": mask, "flag": True}, None)
    keys = one.keys_of(call, [2, 9])
    assert len({*keys}) == 3
    assert one.keys_of(Call((tokens.flip(0),), {"mask": mask, "flag": True}, None), [2, 9]) == keys[::-1]
    for changed in ({"mask": mask * 2, "flag": True}, {"mask": mask, "flag": 0}):
        assert not {*one.keys_of(Call((tokens,), changed, None), [2, 9])} & {*keys}
    assert not {*one.keys_of(call, [2, 8])} & {*keys}
    assert not {*AnswerCache(tmp_path, 2, 1.0, nn.Linear(5, 3)).keys_of(call, [2, 9])} & {*keys}
    answers = TopClasses(torch.randn(3, 2, 4), torch.randint(9, (3, 2, 4)))
    one.put(keys[:2], TopClasses(*(part[:2] for part in answers)))
    assert other.get(keys[:2]) is None
    other.find_new()
    assert other.get(keys) is None
    other.put(keys[2:], TopClasses(*(part[2:] for part in answers)))
    found = other.get([keys[2], keys[0]])
    assert torch.equal(found.log_probs, answers.log_probs[[2, 0]])
    assert torch.equal(found.classes, answers.classes[[2, 0]])
    one.close()
    other.close()


def test_what_cannot_work_is_refused(tmp_path):
    with pytest.raises(ValueError, match="cache keeps the most probable classes of the last dimension"):
        Distillation("initial", loss="mse", cache=tmp_path)
    with pytest.raises(ValueError, match="top_k must be at least 1; got 0"):
        Distillation("initial", top_k=0)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(NotADirectoryError, match=r"is a folder; .*file is a file"):
        fit(Own(), Distillation(teacher_net(), cache=file))
    narrow = nn.Sequential(nn.Linear(5, 4))
    with pytest.raises(ValueError, match=r"the teacher gives \(4, 4\) where the student gives \(4, 3\)"):
        fit(Own(), Distillation(narrow, cache=tmp_path))


class Validating(Own):
    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.training_step(batch, batch_idx))


def test_a_validation_step_that_calls_training_step_logs_its_own_loss():
    module = Validating()
    trainer = L.Trainer(callbacks=[Distillation(teacher_net())], precision="64-true", max_steps=3, **QUIET)
    loader = DataLoader(TensorDataset(*DATA.tensors), 12)
    trainer.fit(module, loader, loader)
    module.requires_grad_(False)
    expected = F.cross_entropy(module.net(DATA.tensors[0]), DATA.tensors[1])
    assert float(trainer.callback_metrics["val/loss"]) == pytest.approx(float(expected), abs=1e-6)
