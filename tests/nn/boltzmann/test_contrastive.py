import copy
import pickle
import warnings

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_accel.nn import RBM, ContrastiveDivergence
from lightning_accel.nn.boltzmann import contrastive
from lightning_accel.nn.boltzmann import sgd as contrastive_sgd
from tests.ranks import run_ranks

PAIRS = {
    "bernoulli": {},
    "gaussian": {"visible": "gaussian", "learn_variance": True},
    "labels": {"num_labels": 2},
    "gaussian with labels": {"visible": "gaussian", "learn_variance": True, "num_labels": 2},
}


class GeneralSGD(torch.optim.SGD):
    """What train_ does not know, so that it goes the general way."""


def make_rbm(units="bernoulli", dtype=torch.float64):
    rbm = RBM(6, 4, **PAIRS[units]).to(dtype)
    for parameter in rbm.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return rbm


def rows_for(rbm, num_rows=7):
    return rbm.visible_units.sample(torch.randn(num_rows, rbm.num_visible, dtype=rbm.weight.dtype)).detach()


def parameters_of(rbm):
    return [parameter for parameter in rbm.parameters() if parameter.requires_grad]


def gradients_of(rbm):
    return [parameter.grad for parameter in parameters_of(rbm)]


def free_energy_gap(rbm, rows, samples):
    return rbm.free_energy(rows).mean() - rbm.free_energy(samples).mean()


def samples_of(training, rbm, rows):
    """The samples that the next call will draw."""
    training = copy.copy(training)
    generator = training.generator(rows.device)
    training._generator = torch.Generator().set_state(generator.get_state())
    return training._contrast(rbm, rows).negative.visible


@pytest.mark.parametrize("units", PAIRS)
@pytest.mark.parametrize("sampler", ["cd", "pcd"])
def test_gradient_is_that_of_the_gap_of_free_energies(units, sampler):
    rbm = make_rbm(units)
    rows = rows_for(rbm)
    training = ContrastiveDivergence(sampler, steps=2, num_chains=5, centering=0)
    for _ in range(2):  # the second with chains and moments of the first
        samples = samples_of(training, rbm, rows)
        expected = torch.autograd.grad(free_energy_gap(rbm, rows, samples), parameters_of(rbm))
        rbm.zero_grad()
        training(rbm, rows).backward()
        torch.testing.assert_close(gradients_of(rbm), list(expected))


def test_gap_is_of_the_mean_energies():
    rbm = make_rbm()
    rows = rows_for(rbm)
    training = ContrastiveDivergence(num_chains=5)
    samples = samples_of(training, rbm, rows)
    energies = [rbm.energy(visible, rbm(visible)).mean() for visible in (rows, samples)]
    torch.testing.assert_close(training(rbm, rows), energies[0] - energies[1])


@pytest.mark.parametrize("units", PAIRS)
def test_centred_gradient_is_that_by_the_centred_parameters(units):
    """With units less their offsets, biases are others; what descends there, told in the RBM's own parameters."""
    rbm = make_rbm(units)
    rows = rows_for(rbm)
    training = ContrastiveDivergence(num_chains=5, centering=50)
    training(rbm, rows_for(rbm))
    samples = samples_of(training, rbm, rows)
    training(rbm, rows).backward()
    by_visible, by_hidden = training.visible_offset, training.hidden_offset

    centred_visible = (rbm.visible_bias + by_hidden @ rbm.weight).detach().requires_grad_()
    centred_hidden = (rbm.hidden_bias + rbm.weight @ by_visible).detach().requires_grad_()
    weight = rbm.weight.detach().clone().requires_grad_()
    rest = {name: p.detach().clone().requires_grad_() for name, p in rbm.named_parameters() if "log_variance" in name}
    values = {
        "weight": weight,
        "visible_bias": centred_visible - by_hidden @ weight,
        "hidden_bias": centred_hidden - weight @ by_visible,
        **rest,
    }

    def energies(visible):
        return torch.func.functional_call(Method(rbm, "free_energy"), prefixed(values), visible).mean()

    loss = energies(rows) - energies(samples)
    by_weight, by_b, by_c, *others = torch.autograd.grad(
        loss, [weight, centred_visible, centred_hidden, *rest.values()]
    )
    # a small step there: b = b' - offset @ W, and so its change
    expected = [by_weight, by_b - by_hidden @ by_weight, by_c - by_weight @ by_visible, *others]
    actual = [rbm.weight.grad, rbm.visible_bias.grad, rbm.hidden_bias.grad]
    actual += [p.grad for name, p in rbm.named_parameters() if "log_variance" in name]
    torch.testing.assert_close(actual, expected)


class Method(torch.nn.Module):
    def __init__(self, rbm, name):
        super().__init__()
        self.rbm, self.name = rbm, name

    def forward(self, *args):
        return getattr(self.rbm, self.name)(*args)


def prefixed(values):
    return {f"rbm.{name}": value for name, value in values.items()}


def test_offsets_follow_the_data():
    rbm = make_rbm()
    training = ContrastiveDivergence(centering=50 / 3)
    first, second = rows_for(rbm), rows_for(rbm, 5)
    training(rbm, first)
    torch.testing.assert_close(training.visible_offset, first.mean(dim=0))
    training(rbm, second)
    torch.testing.assert_close(training.visible_offset, 0.7 * first.mean(dim=0) + 0.3 * second.mean(dim=0))
    hidden = [rbm(rows).mean(dim=0).detach() for rows in (first, second)]
    torch.testing.assert_close(training.hidden_offset, 0.7 * hidden[0] + 0.3 * hidden[1])
    third = rows_for(rbm, 17)
    training(rbm, third)
    torch.testing.assert_close(training.visible_offset, third.mean(dim=0))


@pytest.mark.parametrize("sampler", ["cd", "pcd"])
def test_calls_reuse_buffers_only_where_they_fit(sampler, monkeypatch):
    """Every call gives what the general path gives, which allocates all anew."""
    rbms = [make_rbm(), make_rbm()]
    rows = [rows_for(rbms[0], size) for size in (7, 7, 7, 5, 5, 5, 7)]
    found = []
    for general in (False, True):
        if general:
            monkeypatch.setattr(contrastive, "is_plain", lambda rbm: False)
        training = ContrastiveDivergence(sampler, num_chains=5, centering=30)
        gaps = []
        for number, batch in enumerate(rows):
            if number == 4:
                training.steps = 2
            if number == 2:
                training.load_state_dict(training.state_dict() | {"chains": torch.ones(5, 4)}, torch.device("cpu"))
            with torch.inference_mode(number == 0):
                gap = training(rbms[number % 2], batch)
            if number:
                gaps.append(gap)
        sum(gaps).backward()  # of all calls, when buffers have changed
        found.append([gaps, training.state_dict(), [gradients_of(rbm) for rbm in rbms]])
        for rbm in rbms:
            rbm.zero_grad()
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("kind", ["accumulated", "scaled", "retained", "twice"])
def test_serves_what_is_done_to_losses(kind):
    rbm = make_rbm()
    rows = rows_for(rbm)
    training = ContrastiveDivergence(num_chains=5, centering=30)
    single = copy.deepcopy(training)
    single(rbm, rows).backward()
    once = [gradient.clone() for gradient in gradients_of(rbm)]
    single(rbm, rows).backward()
    both = gradients_of(rbm)
    rbm.zero_grad()
    if kind == "accumulated":
        sum([training(rbm, rows), training(rbm, rows)]).backward()
        torch.testing.assert_close(gradients_of(rbm), both)  # each with the offsets of its own call
    elif kind == "scaled":
        (training(rbm, rows) * 1024 / 4).backward()
        torch.testing.assert_close(gradients_of(rbm), [256 * gradient for gradient in once])
    elif kind == "retained":
        gap = training(rbm, rows)
        gap.backward(retain_graph=True)
        gap.backward()
        torch.testing.assert_close(gradients_of(rbm), [2 * gradient for gradient in once])
    else:
        gap = training(rbm, rows)
        training(rbm, rows)
        gap.backward()
        torch.testing.assert_close(gradients_of(rbm), once)


@pytest.mark.parametrize("sampler", ["cd", "pcd"])
def test_number_of_chains_has_nothing_to_do_with_the_rows(sampler):
    rbm = make_rbm()
    training = ContrastiveDivergence(sampler, num_chains=5)
    for num_rows in (7, 3):
        rows = rows_for(rbm, num_rows)
        assert len(samples_of(training, rbm, rows)) == (num_rows if sampler == "cd" else 5)
        training(rbm, rows)
    shape = {"cd": None, "pcd": (5, 4)}[sampler]
    assert (training.chains.shape if shape else training.chains) == shape


def test_frozen_parameters_stay():
    rbm = make_rbm("gaussian")
    rbm.visible_units.log_variance.requires_grad_(False)
    rbm.hidden_bias.requires_grad_(False)
    before = copy.deepcopy(rbm.state_dict())
    optimizer = torch.optim.SGD(rbm.parameters(), lr=0.1)
    ContrastiveDivergence(num_chains=5).train_(rbm, rows_for(rbm), 3, optimizer)
    torch.testing.assert_close(rbm.hidden_bias, before["hidden_bias"], rtol=0, atol=0)
    assert (rbm.weight != before["weight"]).all()
    rbm.zero_grad()
    ContrastiveDivergence(num_chains=5)(rbm, rows_for(rbm)).backward()
    assert rbm.hidden_bias.grad is None
    assert rbm.visible_units.log_variance.grad is None


def by_hand(training, rbm, rows, batch_size, optimizer):
    gaps = []
    for batch in rows.split(batch_size):
        optimizer.zero_grad()
        gap = training(rbm, batch)
        gap.backward()
        optimizer.step()
        gaps.append(gap.detach())
    return torch.stack(gaps).mean()


SETTINGS = [
    {"sampler": "cd"},
    {"sampler": "cd", "steps": 3, "centering": 20},
    {"sampler": "pcd", "steps": 2},
    {"sampler": "pcd", "centering": 20},
]


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("kind", [torch.optim.SGD, GeneralSGD])
def test_train_equals_the_loop(settings, momentum, kind, monkeypatch):
    """Of weights, optimizer, chains and moments, over calls with a ragged last batch; the draws are the same ones."""
    monkeypatch.setattr(contrastive_sgd, "_NOISE", 200)  # for one or two mini-batches at a time, not all
    states = []
    for train in (ContrastiveDivergence.train_, by_hand):
        torch.manual_seed(0)
        rbm = make_rbm()
        rows = rows_for(rbm, 47)
        groups = [
            {"params": [rbm.weight], "weight_decay": 0.01},
            {"params": [rbm.visible_bias], "momentum": 0.2 * momentum},
            {"params": [rbm.hidden_bias], "lr": 0.05},
        ]
        optimizer = kind(groups, lr=0.1, momentum=momentum)
        training = ContrastiveDivergence(**{"num_chains": 5, "centering": 0, **settings})
        gaps = [train(training, rbm, rows, 10, optimizer) for _ in range(2)]
        optimizer.param_groups[0]["lr"] = 0.02  # what schedulers do
        gaps.append(train(training, rbm, rows[:30], 6, optimizer))
        state = training.state_dict()
        states.append((rbm.state_dict(), optimizer.state_dict()["state"], state, gaps))
    assert states[0][2].pop("generator").equal(states[1][2].pop("generator"))
    torch.testing.assert_close(states[0], states[1])


@pytest.mark.parametrize("units", PAIRS)
def test_train_equals_the_loop_with_any_units_and_optimizer(units):
    states = []
    for train in (ContrastiveDivergence.train_, by_hand):
        torch.manual_seed(0)
        rbm = make_rbm(units)
        rows = rows_for(rbm, 17)
        optimizer = torch.optim.AdamW(rbm.parameters(), lr=0.01)
        gap = train(ContrastiveDivergence(num_chains=5), rbm, rows, 5, optimizer)
        states.append((rbm.state_dict(), optimizer.state_dict()["state"], gap))
    torch.testing.assert_close(states[0], states[1])


class Doubled(torch.nn.Module):
    def forward(self, value):
        return 2 * value


def watch_optimizer(rbm, optimizer, seen):
    def clamp(*_):
        seen.append(rbm.weight.detach().clone())
        for parameter in rbm.parameters():
            parameter.data.clamp_(-0.3, 0.3)

    return optimizer.register_step_post_hook(clamp)


def watch_all_optimizers(rbm, optimizer, seen):
    return register_optimizer_step_pre_hook(lambda *_: seen.append(rbm.weight.detach().clone()))


def watch_step(rbm, optimizer, seen):
    plain_step = optimizer.step

    def step(closure=None):
        seen.append(rbm.weight.detach().clone())
        return plain_step(closure)

    optimizer.step = step


def watch_gradient(rbm, optimizer, seen):
    def halve(grad):
        seen.append(grad.clone())
        return grad / 2

    rbm.weight.register_hook(halve)


def watch_accumulation(rbm, optimizer, seen):
    rbm.hidden_bias.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))


def watch_parametrization(rbm, optimizer, seen):
    torch.nn.utils.parametrize.register_parametrization(rbm, "weight", Doubled())
    rbm.parametrizations.weight.original.register_hook(lambda grad: seen.append(grad.clone()))


WATCHES = [watch_optimizer, watch_all_optimizers, watch_step, watch_gradient, watch_accumulation, watch_parametrization]


@pytest.mark.parametrize("watch", WATCHES)
def test_train_hides_nothing_from_hooks(watch):
    def run(train):
        torch.manual_seed(0)
        rbm, seen = make_rbm(), []
        optimizer = torch.optim.SGD(rbm.parameters(), lr=0.1, momentum=0.5)
        handle = watch(rbm, optimizer, seen)
        train(ContrastiveDivergence("pcd", num_chains=5, seed=1), rbm, rows_for(rbm, 20), 4, optimizer)
        if handle is not None:
            handle.remove()
        return seen, parameters_of(rbm)

    (seen, weights), (expected_seen, expected_weights) = run(ContrastiveDivergence.train_), run(by_hand)
    assert len(seen) == 5
    torch.testing.assert_close(seen, expected_seen)
    torch.testing.assert_close(weights, expected_weights)


def test_train_in_place_is_what_bernoulli_units_and_sgd_get(monkeypatch):
    """Else the tests above compare the general way with itself."""
    rbm = make_rbm()
    optimizer = torch.optim.SGD(rbm.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # which wraps the optimizer's step
    steps, update_ = [], contrastive_sgd.BernoulliSGD.update_
    monkeypatch.setattr(contrastive_sgd.BernoulliSGD, "update_", lambda self: (steps.append(1), update_(self)))
    training = ContrastiveDivergence(num_chains=5)
    training.train_(rbm, rows_for(rbm, 40), 4, optimizer)
    assert len(steps) == 8  # the first one sets chains and offsets up, the last is the optimizer's own
    training.train_(rbm, rows_for(rbm, 40), 4, optimizer)
    assert len(steps) == 8 + 9


@pytest.mark.parametrize("kind", [torch.optim.SGD, GeneralSGD])
def test_train_leaves_other_parameters_alone(kind):
    rbm, other = make_rbm(), make_rbm()
    other.weight.grad = torch.ones_like(other.weight)
    before = other.weight.detach().clone()
    optimizer = kind([*rbm.parameters(), *other.parameters()], lr=0.1)
    ContrastiveDivergence("cd", centering=0).train_(rbm, rows_for(rbm), 2, optimizer)
    torch.testing.assert_close(other.weight.detach(), before, rtol=0, atol=0)


def test_train_satisfies_schedulers():
    rbm = make_rbm()
    optimizer = torch.optim.SGD(rbm.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, 2)
    ContrastiveDivergence().train_(rbm, rows_for(rbm, 40), 4, optimizer)
    scheduler.step()  # warns if the optimizer has made no step
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.075)


class TrainingByTrain(L.LightningModule):
    def __init__(self, kind):
        super().__init__()
        self.automatic_optimization = False
        self.rbm, self.kind = make_rbm(dtype=torch.float32), kind
        self.contrast = ContrastiveDivergence(num_chains=5)

    def training_step(self, batch, batch_idx):
        self.contrast.train_(self.rbm, batch, 3, self.optimizers())

    def configure_optimizers(self):
        return self.kind(self.rbm.parameters(), lr=0.1, momentum=0.5)


@pytest.mark.parametrize("kind", [torch.optim.SGD, GeneralSGD])
def test_lightning_counts_calls_of_train(kind, tmp_path):
    module = TrainingByTrain(kind)
    rows = rows_for(module.rbm, 30)
    twin = copy.deepcopy(module.rbm)
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers")
        trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=15))
    assert trainer.global_step == 4
    training, optimizer = ContrastiveDivergence(num_chains=5), kind(twin.parameters(), lr=0.1, momentum=0.5)
    for _ in range(2):
        by_hand(training, twin, rows, 3, optimizer)
    torch.testing.assert_close(module.rbm.state_dict(), twin.state_dict())


@pytest.mark.parametrize("sampler", ["cd", "pcd"])
def test_state_goes_on_with_the_same_draws(sampler):
    rbm = make_rbm(dtype=torch.float32)
    rows = rows_for(rbm, 40)
    training, resumed = (ContrastiveDivergence(sampler, num_chains=5, seed=3) for _ in range(2))
    optimizer = torch.optim.SGD(rbm.parameters(), lr=0.1, momentum=0.5)
    training.train_(rbm, rows, 6, optimizer)
    state = training.state_dict()
    saved = copy.deepcopy(state)
    resumed.load_state_dict(state, torch.device("cpu"))
    twin = copy.deepcopy(rbm)
    twin_optimizer = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.5)
    twin_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    training.train_(rbm, rows, 6, optimizer)
    torch.testing.assert_close(state, saved, rtol=0, atol=0)  # it is a copy
    resumed.train_(twin, rows, 6, twin_optimizer)
    torch.testing.assert_close(twin.state_dict(), rbm.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(resumed.state_dict(), training.state_dict(), rtol=0, atol=0)


def check_ranks(rank, general):
    torch.manual_seed(0)
    rbm = make_rbm()
    rows = rows_for(rbm, 48)
    kind = GeneralSGD if general else torch.optim.SGD
    optimizer = kind(rbm.parameters(), lr=0.1, momentum=0.5)
    training = ContrastiveDivergence(num_chains=5, centering=50)
    training.train_(rbm, rows[rank::2], 4, optimizer)
    own = [None, None]
    samples = samples_of(training, rbm, rows[rank::2])
    dist.all_gather_object(own, samples)
    offsets = training.hidden_offset, training.visible_offset
    rbm.zero_grad()
    training(rbm, rows[rank::2]).backward()
    return rbm.state_dict(), offsets, training.chains, rbm.weight.grad, own


@pytest.mark.parametrize("general", [False, True])
def test_processes_agree_but_for_their_chains(general):
    first, second = run_ranks(check_ranks, general)
    torch.testing.assert_close(first[:2], second[:2], rtol=0, atol=0)
    assert len(first[2]) == len(second[2]) == 3  # 5 over two processes
    assert not first[2].equal(second[2])


def check_average(rank):
    """One step of two processes is the step with the mean of their gradients."""
    torch.manual_seed(0)
    rbm = make_rbm()
    rows = rows_for(rbm, 8)[rank::2]
    training = ContrastiveDivergence(num_chains=6, centering=0)
    twin = copy.deepcopy(rbm)
    free_energy_gap(twin, rows, samples_of(training, rbm, rows)).backward()
    gradients = [torch.zeros_like(twin.weight) for _ in range(2)]
    dist.all_gather(gradients, twin.weight.grad)
    before = rbm.weight.detach().clone()
    training.train_(rbm, rows, 4, torch.optim.SGD(rbm.parameters(), lr=0.1))
    torch.testing.assert_close(rbm.weight.detach(), before - 0.1 * sum(gradients) / 2)


def test_processes_average_their_gradients():
    run_ranks(check_average)


@pytest.mark.parametrize("units", ["bernoulli", "gaussian"])
def test_autocast_rounds_little(units):
    """float32 gradients to bfloat16's precision, of the difference of data and samples, not of each."""
    rbm = make_rbm(units, dtype=torch.float32)
    rows = rows_for(rbm, 200)
    training = ContrastiveDivergence(num_chains=150, centering=0)
    samples = samples_of(training, rbm, rows)
    with torch.autocast("cpu", torch.bfloat16):
        contrast = training._contrast(rbm, rows)
        gap = contrast.gap_with_gradient()
    assert gap.dtype == torch.float32
    assert contrast.dtype == torch.bfloat16
    gap.backward()
    expected = torch.autograd.grad(free_energy_gap(rbm, rows, contrast.negative.visible), parameters_of(rbm))
    for found, exact in zip(gradients_of(rbm), expected, strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, exact, rtol=0.02, atol=0.02)
    assert samples.shape == contrast.negative.visible.shape


def test_autocast_of_train_uses_the_weights_of_each_step():
    """Autocast keeps its copies of weights until the context ends."""
    weights = []
    for at_once in (True, False):
        torch.manual_seed(0)
        rbm = make_rbm(dtype=torch.float32)
        rows, optimizer = rows_for(rbm, 60), torch.optim.SGD(rbm.parameters(), lr=0.5)
        training = ContrastiveDivergence("cd")
        if not at_once:
            for batch in rows.split(5):
                with torch.autocast("cpu", torch.bfloat16):
                    gap = training(rbm, batch)
                optimizer.zero_grad()
                gap.backward()
                optimizer.step()
        else:
            with torch.autocast("cpu", torch.bfloat16):
                training.train_(rbm, rows, 5, optimizer)
        weights.append(rbm.state_dict())
    torch.testing.assert_close(weights[0], weights[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampler": "gibbs"}, "sampler must be"),
        ({"steps": 0}, "steps must be at least 1; got 0"),
        ({"num_chains": 0}, "num_chains must be at least 1; got 0"),
        ({"centering": 0.5}, "centering must be at least 1 row"),
        ({"centering": float("nan")}, "centering must be"),
    ],
)
def test_refuses_numbers_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        ContrastiveDivergence(**options)


@pytest.mark.parametrize("kind", [torch.optim.SGD, GeneralSGD])
@pytest.mark.parametrize("fault", ["data", "learning rate"])
def test_says_that_training_has_diverged(kind, fault):
    rbm = make_rbm()
    rows = rows_for(rbm, 40)
    if fault == "data":
        rows[11, 2] = torch.nan
    optimizer = kind(rbm.parameters(), lr=1e308 if fault == "learning rate" else 0.1)
    with pytest.raises(ValueError, match="training has diverged"):
        ContrastiveDivergence(num_chains=5).train_(rbm, rows, 4, optimizer)


@pytest.mark.parametrize(("num_rows", "batch_size"), [(0, 4), (4, 0)])
def test_train_needs_rows(num_rows, batch_size):
    rbm = make_rbm()
    with pytest.raises(ValueError, match="needs rows"):
        ContrastiveDivergence().train_(rbm, rows_for(rbm, num_rows), batch_size, torch.optim.SGD(rbm.parameters()))


def test_a_pickled_sampler_goes_on_as_the_original():
    rows, rbm = torch.rand(5, 6).round(), RBM(6, 4)
    original = ContrastiveDivergence(sampler="pcd", num_chains=3)
    original(rbm, rows)
    copied = pickle.loads(pickle.dumps(original))
    before = original.chains
    kept = before.clone()
    gaps = [[one(rbm, rows).item() for _ in range(3)] for one in (original, copied)]
    assert gaps[0] == gaps[1]
    assert len(set(gaps[0])) == 3
    assert torch.equal(before, kept)  # a later call changes no earlier chains


def test_rbms_with_activations_of_their_own_and_odd_rows_are_sampled_step_by_step():
    class Cool(RBM):
        def hidden_activation(self, visible):
            return super().hidden_activation(visible) / 4

    rows = torch.rand(5, 6).round()
    gaps = []
    for kind in (RBM, Cool):
        torch.manual_seed(0)
        rbm = kind(6, 4, initial_std=1.0)
        gaps.append(ContrastiveDivergence(centering=0)(rbm, rows).item())
    assert gaps[0] != pytest.approx(gaps[1], rel=1e-3)
    with pytest.raises(ValueError, match=r"takes rows \(..., 6\); got \(5, 1\)"):
        ContrastiveDivergence()(RBM(6, 4), rows[:, :1])
