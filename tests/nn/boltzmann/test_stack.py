"""Deep belief networks against sums over all states, written with energies alone."""

import copy
import itertools
import math
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_accel.nn import RBM, ContrastiveDivergence, RBMStack, UpDown
from lightning_accel.nn.boltzmann.contrastive import Phase


class LogZ(NamedTuple):
    estimate: Tensor
    lower: Tensor
    upper: Tensor


def all_states(size: int) -> Tensor:
    return torch.tensor(list(itertools.product([0.0, 1.0], repeat=size)), dtype=torch.float64)


def randomised(module, scale: float = 1.0):
    module.double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=scale)
    return module


def make_stack(*sizes: int, num_labels: int = 0, scale: float = 1.0) -> RBMStack:
    last = len(sizes) - 2
    rbms = [
        RBM(below, above, num_labels=num_labels if layer == last else 0)
        for layer, (below, above) in enumerate(itertools.pairwise(sizes))
    ]
    return randomised(RBMStack(rbms), scale)


def energies(rbm: RBM, visible: Tensor, hidden: Tensor) -> Tensor:
    """(B, J) of (B, V) and (J, H)."""
    return torch.stack([rbm.energy(visible, one.expand(len(visible), -1)) for one in hidden], dim=1)


def log_joint_of_top(top: RBM) -> tuple[Tensor, Tensor, Tensor]:
    """States below (S, H), labels as (C, C) one-hot, and log p (S, C); without labels C is 1 and they are (1, 0)."""
    below = all_states(top.num_visible - top.num_labels)
    labels = torch.eye(top.num_labels, dtype=torch.float64) if top.num_labels else torch.zeros(1, 0)
    hidden = all_states(top.num_hidden)
    scores = torch.stack(
        [-energies(top, torch.cat([below, label.expand(len(below), -1)], dim=1), hidden) for label in labels], dim=1
    ).logsumexp(dim=2)
    return below, labels, scores - scores.flatten().logsumexp(dim=0)


def log_prob_of_all(stack: RBMStack) -> Tensor:
    """The log p of all visible states beside each label, (2**V, C)."""
    states, _, log_p = log_joint_of_top(stack.layers[-1])
    for rbm in reversed(stack.layers[:-1]):
        lower = all_states(rbm.num_visible)
        given = (-energies(rbm, lower, states)).log_softmax(dim=0)  # (lower, upper)
        log_p = (given[:, :, None] + log_p).logsumexp(dim=1)
        states = lower
    return log_p


def exact_log_z(top: RBM) -> LogZ:
    if top.num_labels:
        visible = [F.one_hot(torch.tensor(c), top.num_labels).double() for c in range(top.num_labels)]
        below = all_states(top.num_visible - top.num_labels)
        states = torch.cat([torch.cat([below, one.expand(len(below), -1)], dim=1) for one in visible])
    else:
        states = all_states(top.num_visible)
    log_z = (-energies(top, states, all_states(top.num_hidden))).flatten().logsumexp(dim=0).detach()
    return LogZ(log_z, log_z - 0.25, log_z + 0.5)


def close(one: Tensor, other: Tensor, atol: float = 1e-10) -> None:
    torch.testing.assert_close(one, other, atol=atol, rtol=0)


def chi_square(drawn: Tensor, probability: Tensor) -> float:
    """Excess of the statistic over its mean in standard deviations."""
    counts = torch.bincount(drawn, minlength=len(probability)).double()
    expected = probability * len(drawn)
    statistic = ((counts - expected).square() / expected).sum()
    freedom = len(probability) - 1
    return float((statistic - freedom) / math.sqrt(2 * freedom))


def numbers_of(states: Tensor) -> Tensor:
    """The place of each row in all_states."""
    return (states @ (2 ** torch.arange(states.shape[1] - 1, -1, -1)).to(states)).long()


@pytest.mark.parametrize("num_labels", [0, 3])
def test_a_tied_layer_keeps_the_distribution(num_labels):
    stack = make_stack(5, 4, 5, 4, num_labels=num_labels)
    below = log_prob_of_all(RBMStack(stack.layers[:1])).logsumexp(dim=1)
    stack.start_from_below_(1)
    close(log_prob_of_all(RBMStack(stack.layers[:2])).logsumexp(dim=1), below)
    stack.start_from_below_(2)
    close(log_prob_of_all(stack).logsumexp(dim=1), below)
    if num_labels:
        close(stack.class_log_prob(all_states(5)), torch.full((32, 3), -math.log(3), dtype=torch.float64))


def test_bound_of_a_tied_layer_is_the_log_probability():
    stack = make_stack(5, 4, 5)
    stack.start_from_below_(1)
    bound = stack.log_prob_bound(all_states(5), exact_log_z(stack.top), num_samples=3)
    close(bound.estimate, log_prob_of_all(stack).logsumexp(dim=1).detach())
    close(bound.standard_error, torch.zeros(32, dtype=torch.float64))


@pytest.mark.parametrize("num_labels", [0, 3])
def test_bound_of_one_layer_is_the_log_probability(num_labels):
    stack = make_stack(5, 4, num_labels=num_labels)
    bound = stack.log_prob_bound(all_states(5), exact_log_z(stack.top))
    close(bound.estimate, log_prob_of_all(stack).logsumexp(dim=1).detach())
    close(bound.lower, bound.estimate - 0.5)
    close(bound.upper, bound.estimate + 0.25)
    assert (bound.standard_error == 0).all()


@pytest.mark.sampled(default=1)
@pytest.mark.parametrize("untied", [False, True])
@pytest.mark.parametrize("labels", [None, pytest.param(torch.tensor([2, 0, 1, 1]), marks=pytest.mark.slow)])
def test_bound_is_short_of_the_log_probability_by_the_divergence(untied, labels):
    stack = make_stack(5, 4, 3, num_labels=3)
    if untied:
        stack.untie_()
        randomised(stack.recognition)
    visible = all_states(5)[[3, 7, 20, 30]]
    with torch.no_grad():
        bound = stack.log_prob_bound(visible, exact_log_z(stack.top), labels=labels, num_samples=1000)
        bottom, _ = stack.layers
        below, _, log_p_top = log_joint_of_top(stack.top)
        activation = stack.recognition[0](visible) if untied else bottom.hidden_activation(visible)
        log_q = torch.stack(
            [-F.binary_cross_entropy_with_logits(activation, s.expand(4, -1), reduction="none").sum(1) for s in below],
            1,
        )
        given = (-energies(bottom, all_states(5), below)).log_softmax(dim=0)[numbers_of(visible)]
        top = log_p_top.logsumexp(dim=1) if labels is None else log_p_top[:, labels].T
        exact = (log_q.exp() * (given + top - log_q)).sum(dim=1)
    assert ((bound.estimate - exact).abs() < 4 * bound.standard_error).all()
    assert bound.standard_error.max() < 0.4
    every = log_prob_of_all(stack)[numbers_of(visible)]
    assert (exact < (every.logsumexp(dim=1) if labels is None else every[torch.arange(4), labels])).all()


@pytest.mark.slow
def test_bound_of_three_layers():
    stack = make_stack(5, 3, 4, 2)
    visible = all_states(5)
    with torch.no_grad():
        bound = stack.log_prob_bound(visible, exact_log_z(stack.top), num_samples=2000)
        first, second, top = stack.layers
        one, two = all_states(3), all_states(4)
        q_one = (-energies(first, visible, one)).log_softmax(dim=1)[:, :, None]
        q_two = (-energies(second, one, two)).log_softmax(dim=1)
        p_one = (-energies(first, visible, one)).log_softmax(dim=0)[:, :, None]
        p_two = (-energies(second, one, two)).log_softmax(dim=0)
        log_p_top = log_joint_of_top(top)[2][:, 0]
        exact = ((q_one + q_two).exp() * (p_one + p_two + log_p_top - q_one - q_two)).sum(dim=(1, 2))
    assert ((bound.estimate - exact).abs() < 4 * bound.standard_error).all()
    assert (exact < log_prob_of_all(stack).logsumexp(dim=1)).all()


@pytest.mark.parametrize("sizes", [(5, 4), (5, 4, 3)])
def test_class_log_prob_is_exact_given_the_states_below(sizes):
    stack = make_stack(*sizes, num_labels=3)
    visible = all_states(5)
    if len(sizes) == 2:
        exact = log_prob_of_all(stack).log_softmax(dim=1)
    else:
        below = stack.transform(visible, 1)
        labels = torch.eye(3, dtype=torch.float64)
        joint = [-energies(stack.top, torch.cat([below, one.expand(32, -1)], 1), all_states(3)) for one in labels]
        exact = torch.stack([one.logsumexp(dim=1) for one in joint], dim=1).log_softmax(dim=1)
    close(stack.class_log_prob(visible), exact)
    for label in range(3):
        energy = stack.top.free_energy(
            stack.join_labels(stack.transform(visible, len(sizes) - 2), torch.full((32,), label))
        )
        close(stack.label_scores(stack.transform(visible, len(sizes) - 2))[:, label], -energy)


def test_transform_chains_means():
    first, second = RBM(5, 4, visible="gaussian", learn_variance=True), RBM(4, 3)
    stack = randomised(RBMStack([first, second]))
    visible = torch.randn(6, 5, dtype=torch.float64)
    close(stack.transform(visible), second(first(visible)))
    close(stack(visible), stack.transform(visible, 2))
    close(stack.transform(visible, 1), first(visible))
    close(stack.transform(visible, 0), visible)
    close(
        stack.reconstruct(visible),
        first.visible_activation(second.visible_activation(second(first(visible))).sigmoid()),
    )
    close(stack.reconstruct(visible, 1), first.reconstruct(visible))


def test_labels_are_unknown_upward():
    stack = make_stack(5, 4, num_labels=3)
    visible = all_states(5)
    close(stack.transform(visible), stack.top(torch.cat([visible, torch.full((32, 3), 1 / 3)], dim=1)), 1e-7)
    assert stack.reconstruct(visible).shape == (32, 5)


def test_sample_hidden_draws_labels():
    stack = make_stack(4, 3, num_labels=2)
    visible = torch.tensor([1.0, 0, 0, 1]).double()
    below, labels, hidden = visible[None], torch.eye(2, dtype=torch.float64), all_states(3)
    joint = torch.stack([-energies(stack.top, torch.cat([below, one[None]], dim=1), hidden)[0] for one in labels])
    exact = joint.flatten().softmax(dim=0).view(2, -1).sum(dim=0)
    drawn = stack.sample_hidden(visible.expand(20000, -1))
    assert chi_square(numbers_of(drawn), exact.detach()) < 4


def test_unknown_labels_are_drawn_given_the_states():
    stack = make_stack(4, 3, num_labels=3)
    states = torch.tensor([1.0, 0, 0, 1]).double().expand(20000, -1)
    known = torch.arange(20000) % 4 == 0
    joined = stack.join_labels(states, torch.where(known, 2, -100), torch.Generator().manual_seed(0))
    assert joined[:, :4].equal(states)
    assert (joined[known, 4:] == torch.tensor([0.0, 0, 1])).all()
    hidden, labels = all_states(3), torch.eye(3, dtype=torch.float64)
    scores = -energies(stack.top, torch.cat([states[:3], labels], dim=1), hidden).detach()
    exact = scores.logsumexp(dim=1).softmax(dim=0)
    assert chi_square(joined[~known, 4:].argmax(dim=1), exact) < 4


def test_the_bound_sums_over_unknown_labels():
    stack, visible = make_stack(4, 3, num_labels=2), all_states(4)
    log_z = LogZ(*torch.zeros(3))
    labels = torch.arange(16) % 2
    given, summed = (stack.log_prob_bound(visible, log_z, labels=one).estimate for one in (labels, None))
    mixed = stack.log_prob_bound(visible, log_z, labels=labels.where(labels > 0, -100)).estimate
    close(mixed, torch.where(labels > 0, given, summed))
    assert (summed > given).all()


@pytest.mark.parametrize("untied", [False, True])
@pytest.mark.parametrize(
    "rbms",
    [
        (RBM(5, 4), RBM(4, 3)),
        (RBM(5, 4, visible="gaussian", learn_variance=True), RBM(4, 3, num_labels=2)),
    ],
)
def test_mlp_computes_transform(rbms, untied):
    stack = randomised(RBMStack(rbms))
    if untied:
        before = stack.transform(torch.ones(1, 5).double())
        stack.untie_()
        close(stack.transform(torch.ones(1, 5).double()), before)
        randomised(stack.recognition)
    visible = torch.rand(6, 5, dtype=torch.float64)
    mlp = stack.to_mlp()
    close(mlp(visible), stack.transform(visible))
    copied = stack.to_mlp()
    assert all(parameter.requires_grad for parameter in copied.parameters())
    with torch.no_grad():
        mlp[0].weight.zero_()
    close(copied(visible), stack.transform(visible))


@pytest.mark.parametrize("sizes", [(4, 3), (4, 3, 2)])
def test_samples_follow_the_distribution(sizes):
    stack = make_stack(*sizes, scale=0.8)
    drawn = stack.sample(20000, steps=40)
    assert chi_square(numbers_of(drawn), log_prob_of_all(stack).logsumexp(dim=1).exp().detach()) < 4


@pytest.mark.parametrize("sizes", [(4, 3), (4, 3, 2)])
def test_samples_of_a_class(sizes):
    stack = make_stack(*sizes, num_labels=3, scale=1.1)
    exact = log_prob_of_all(stack).softmax(dim=0).detach()
    drawn = stack.sample(40000, steps=40, labels=torch.arange(40000) % 2 * 2)
    assert chi_square(numbers_of(drawn[::2]), exact[:, 0]) < 4
    assert chi_square(numbers_of(drawn[1::2]), exact[:, 2]) < 4
    assert chi_square(numbers_of(drawn[1::2]), exact[:, 0]) > 10


@pytest.mark.parametrize("num_labels", [0, 3])
def test_one_layer_paints_in_exactly(num_labels):
    stack = make_stack(4, 3, num_labels=num_labels, scale=0.8)
    nan = math.nan
    labels = torch.full((20000,), 2) if num_labels else None
    drawn = stack.sample(20000, steps=40, clamp=torch.tensor([nan, 1.0, nan, 0.0]), labels=labels)
    assert (drawn[:, 1] == 1).all()
    assert (drawn[:, 3] == 0).all()
    every = all_states(4)
    here = (every[:, 1] == 1) & (every[:, 3] == 0)
    exact = log_prob_of_all(stack)[here, -1].softmax(dim=0).detach()
    assert chi_square(numbers_of(drawn[:, [0, 2]]), exact) < 4


def test_stacks_paint_in():
    """The way up is nearly the posterior under small weights, and so samples are nearly right."""
    stack = make_stack(4, 3, 4, scale=0.8)
    stack.start_from_below_(1)
    clamp = torch.tensor([[math.nan, 1.0, math.nan, 0.0]]).expand(5000, -1)
    drawn = stack.sample(5000, steps=40, clamp=clamp)
    every = all_states(4)
    here = (every[:, 1] == 1) & (every[:, 3] == 0)
    exact = log_prob_of_all(stack).logsumexp(dim=1)[here].softmax(dim=0).detach()
    share = torch.bincount(numbers_of(drawn[:, [0, 2]]), minlength=4) / 5000
    assert (share - exact).abs().sum() / 2 < 0.1
    assert (drawn[:, [1, 3]] == torch.tensor([1.0, 0.0])).all()


def test_samples_repeat_with_a_generator():
    stack = make_stack(5, 4, 3, num_labels=3)
    one, other = (
        stack.sample(
            7, 3, labels=torch.arange(7) % 3, clamp=torch.tensor([math.nan] * 4 + [1.0]),
            generator=torch.Generator().manual_seed(3),
        )
        for _ in range(2)
    )  # fmt: skip
    assert one.equal(other)


def bars_and_stripes(size: int) -> Tensor:
    rows = all_states(size)[:, :, None].expand(-1, size, size)
    return torch.cat([rows, rows.transpose(1, 2)]).flatten(1).unique(dim=0)


def test_updown_gradients_are_the_delta_rules():
    stack = make_stack(5, 4, 3, num_labels=2)
    stack.untie_()
    randomised(stack.recognition)
    visible, labels = all_states(5)[[3, 7, 20, 30, 11, 12]], torch.tensor([0, 1, 1, 0, 1, 0])
    updown = UpDown(ContrastiveDivergence("cd", steps=2, centering=0, seed=5))
    updown(stack, visible, labels).backward()

    bottom, top = stack.layers
    again = ContrastiveDivergence("cd", steps=2, centering=0, seed=5)
    generator = again.generator(visible.device)
    with torch.no_grad():
        between = (
            torch.empty(6, 4).double().uniform_(generator=generator) < stack.recognition[0](visible).sigmoid()
        ).double()
        expected = bottom.visible_activation(between).sigmoid() - visible
        close(bottom.weight.grad, between.T @ expected / 6)
        close(bottom.visible_bias.grad, expected.mean(dim=0))
        assert bottom.hidden_bias.grad is None
    data = stack.join_labels(between, labels)
    gap = again(top, data)
    for own, grad in zip(
        (top.weight, top.visible_bias, top.hidden_bias), torch.autograd.grad(gap, list(top.parameters())), strict=True
    ):
        close(own.grad, grad)
    with torch.no_grad():
        dream = again.draw(top, Phase(data, top.hidden_activation(data), top(data))).visible[:, :4]
        lower = bottom.sample_visible(dream, generator)
        wrong = stack.recognition[0](lower).sigmoid() - dream
        close(stack.recognition[0].weight.grad, wrong.T @ lower / 6)
        close(stack.recognition[0].bias.grad, wrong.mean(dim=0))


def exact_bound(stack, visible):
    """The bound of log p, and log p itself, of a stack of two, summed over all states in float64, (B,) each."""
    stack = copy.deepcopy(stack).double()
    bottom, top = stack.layers
    hidden = all_states(bottom.num_hidden)
    activation = visible.double() @ bottom.weight.T + bottom.hidden_bias
    log_q = activation @ hidden.T - F.softplus(activation).sum(dim=1, keepdim=True)
    down = hidden @ bottom.weight + bottom.visible_bias
    log_down = visible.double() @ down.T - F.softplus(down).sum(dim=1)
    log_top = -top.free_energy(hidden)
    joint = log_down + log_top - log_top.logsumexp(dim=0)
    return (log_q.exp() * (joint - log_q)).sum(dim=1).detach(), joint.logsumexp(dim=1).detach()


def test_a_second_machine_of_a_teacher_raises_the_bound_more_on_samples_than_on_means():
    """Of a network of two layers, of which the lower one is known, as its likelihood is."""
    generator = torch.Generator().manual_seed(2)
    teacher, visible = RBMStack([RBM(9, 6), RBM(6, 9)]), all_states(9)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.copy_(1.5 * torch.randn(parameter.shape, generator=generator))
    probability = exact_bound(teacher, visible)[1].exp()
    data = visible[torch.multinomial(probability, 2000, replacement=True, generator=generator)].float()

    def judged(stack: RBMStack) -> Tensor:
        return torch.stack([probability @ figure for figure in exact_bound(stack, visible)])

    found = []
    for on_samples in (True, False):
        stack = copy.deepcopy(teacher)
        stack.start_from_below_(1)
        alone = judged(stack)
        close(alone[0], alone[1], 1e-6)
        train, optimizer = ContrastiveDivergence(seed=1), torch.optim.SGD(stack.top.parameters(), lr=0.3)
        for epoch in range(30):
            optimizer.param_groups[0]["lr"] = 0.3 * (1 - epoch / 30)
            rows = stack.sample_hidden(data, 1, generator) if on_samples else stack.transform(data, 1).detach()
            train.train_(stack.top, rows, 50, optimizer)
        found.append(judged(stack))
    samples, means = found
    assert (samples > alone + 2).all()
    assert samples[0] > means[0] + 0.02
    assert samples[1] > means[1] + 0.05


def test_updown_draws_unknown_labels_by_its_own_generator():
    stack = make_stack(5, 4, 3, num_labels=3)
    stack.untie_()
    losses = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        labels = torch.full((32,), -100)
        losses.append(UpDown(ContrastiveDivergence("cd", seed=5))(stack, all_states(5), labels))
    close(*losses)


@pytest.mark.slow
def test_updown_improves_a_trained_stack():
    data = bars_and_stripes(3).float()
    stack = RBMStack([RBM(9, 6), RBM(6, 9)], untied=True)
    for layer, rbm in enumerate(stack.layers):
        train = ContrastiveDivergence("cd", centering=0, seed=layer)
        optimizer = torch.optim.SGD(rbm.parameters(), lr=0.1)
        for _ in range(1500):
            optimizer.zero_grad()
            train(rbm, stack.sample_hidden(data, layer, train.generator(data.device))).backward()
            optimizer.step()
        stack.untie_()

    def judged() -> tuple[float, float]:
        with torch.no_grad():
            log_z = (-stack.top.free_energy(all_states(6).float())).logsumexp(dim=0)
            bound = stack.log_prob_bound(data, LogZ(log_z, log_z, log_z), num_samples=200)
            exact = log_prob_of_all(stack).logsumexp(dim=1)[numbers_of(data)]
            return float(exact.sum()), float(bound.estimate.sum())

    before = judged()
    updown = UpDown(ContrastiveDivergence("pcd", steps=1, num_chains=50, centering=0))
    optimizer = torch.optim.SGD(stack.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, 2000)
    for _ in range(2000):
        optimizer.zero_grad()
        updown(stack, data).backward()
        optimizer.step()
        schedule.step()
    after = judged()
    assert after[0] > before[0] + 5
    assert after[1] > before[1] + 5


def test_untied_weights_are_restored():
    stack = make_stack(5, 4, 3)
    stack.untie_()
    randomised(stack.recognition)
    other = RBMStack([RBM(5, 4), RBM(4, 3)], untied=True).double()
    other.load_state_dict(stack.state_dict())
    close(other.transform(all_states(5)), stack.transform(all_states(5)))
    stack.untie_()
    close(stack.transform(all_states(5)), RBMStack(stack.layers).transform(all_states(5)))


@pytest.mark.slow
def test_bfloat16_regions_keep_likelihoods():
    stack = make_stack(5, 4, 3, num_labels=2).float()
    visible = all_states(5).float()
    log_z = LogZ(*torch.zeros(3))
    exact = stack.label_scores(visible[:, :4])
    bound = stack.log_prob_bound(visible, log_z, generator=torch.Generator().manual_seed(0), num_samples=500).estimate
    with torch.autocast("cpu", torch.bfloat16):
        assert stack.label_scores(visible[:, :4]).equal(exact)
        rough = stack.log_prob_bound(visible, log_z, generator=torch.Generator().manual_seed(0), num_samples=500)
    assert ((rough.estimate - bound).abs() < 6 * rough.standard_error).all()


NAN = math.nan


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RBMStack([]), "at least one RBM; got none"),
        (
            lambda: RBMStack([RBM(6, 4), RBM(5, 3)]),
            "RBM 1 of the stack has 5 visible units and stands on 4 hidden ones",
        ),
        (lambda: RBMStack([RBM(6, 4), RBM(3, 3, num_labels=1)]), "make its num_visible=4"),
        (lambda: RBMStack([RBM(6, 4, num_labels=2), RBM(4, 3)]), "only the top RBM may have labels; RBM 0 has num_lab"),
        (lambda: RBMStack([RBM(6, 4), RBM(4, 3, visible="gaussian")]), "visible='gaussian' and stands on hidden units"),
    ],
)
def test_refuses_layers_that_do_not_fit(make, message):
    with pytest.raises(ValueError, match=message):
        make()


STACK = RBMStack([RBM(6, 4), RBM(4, 3, num_labels=2)])
PLAIN = RBMStack([RBM(6, 4), RBM(4, 3)])
ROWS = torch.ones(2, 6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: STACK.transform(torch.ones(2, 8)), r"takes rows \(B, 6\), labels apart; got \(2, 8\)"),
        (lambda: PLAIN.transform(torch.ones(6)), r"takes rows \(B, 6\); got \(6,\)"),
        (lambda: PLAIN.transform(ROWS, 3), r"num_layers must lie in \[0, 2\], the RBMs of the stack; got 3"),
        (lambda: PLAIN.require_support(ROWS * 2), "Bernoulli visible units take values in"),
        (lambda: PLAIN.class_log_prob(ROWS), "class_log_prob needs labels: give the top RBM num_labels"),
        (lambda: PLAIN.join_labels(torch.ones(2, 4), torch.tensor([0, 1])), "the top RBM has no labels"),
        (lambda: STACK.join_labels(torch.ones(2, 4), torch.tensor([0, 2])), r"must lie in \[0, 2\); got 0 to 2"),
        (lambda: STACK.join_labels(torch.ones(2, 4), torch.tensor([0.0, 1])), r"\(2,\) integers.*torch.float32"),
        (lambda: STACK.sample(2, 0), "must be at least 1; got num_samples=2, steps=0"),
        (
            lambda: STACK.sample(2, 1, labels=torch.tensor([1])),
            r"labels must be \(2,\), one for each sample; got \(1,\)",
        ),
        (lambda: STACK.sample(2, 1, clamp=torch.ones(3, 6)), r"clamp must be \(6,\) or \(2, 6\), NaN where"),
        (lambda: STACK.sample(2, 1, clamp=torch.tensor([NAN, 7, 1, 1, 1, 1])), "clamp does not fit.*Bernoulli visible"),
        (lambda: PLAIN.start_from_below_(0), "an RBM above another, from 1 to 1; got 0"),
        (lambda: PLAIN.start_from_below_(1), "num_hidden=3 above 6 visible units"),
        (
            lambda: RBMStack([RBM(3, 4, visible="gaussian"), RBM(4, 3)]).start_from_below_(1),
            "if all units are 'bernoulli'; got visible='gaussian'",
        ),
        (lambda: PLAIN.log_prob_bound(ROWS, LogZ(*torch.zeros(3)), num_samples=0), "num_samples must be at least 1"),
        (lambda: UpDown()(PLAIN, ROWS), r"call untie_\(\) of the stack first"),
        (
            lambda: UpDown()(RBMStack([RBM(6, 4), RBM(4, 3, num_labels=2)], untied=True), ROWS),
            "the top RBM has 2 labels: pass labels",
        ),
    ],
)
def test_refuses_what_it_cannot_do(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_supports_rows_without_their_labels():
    RBMStack([RBM(6, 4, num_labels=3)]).require_support(ROWS)
    STACK.require_support(ROWS)
