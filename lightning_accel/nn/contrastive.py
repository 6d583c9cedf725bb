"""Training of restricted Boltzmann machines by sampling. Shapes: B rows, C chains, V visible units, H hidden units."""

from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Generator, Tensor
from torch.autograd.function import Function, FunctionCtx

from lightning_accel.nn.rbm import RBM

Sampler: TypeAlias = Literal["cd", "pcd", "tempering"]


_ACTIVITY_RATE = 0.1  # of the running mean that a sparsity target is compared with (Hinton 2012, section 11)


class Phase(NamedTuple):
    """Rows of data, or of the model's own samples, and what the hidden units make of them."""

    visible: Tensor  # (B, V)
    activation: Tensor  # (B, H) of the hidden units
    hidden: Tensor  # (B, H) their means


class ContrastiveDivergence:
    """The gradient of the log-likelihood of an RBM, up to the samples that stand for the model's own distribution.

    Calling it with an :class:`~lightning_accel.nn.RBM` and rows of data draws samples and returns the gap of the mean
    energies of data and samples: a scalar whose gradient, computed in closed form, is that of
    ``free_energy(data).mean() - free_energy(samples).mean()``. So a ``training_step`` returns it like a loss, and
    whatever applies to losses applies to it; it does not tell how good the model is.

    Chains of samples are this object's own, one set in each process, as is the generator that draws all samples: put
    :meth:`state_dict` into checkpoints, of every process, for runs that resume with the same numbers.

    Args:
        sampler: ``cd`` starts ``steps`` Gibbs steps from the data; ``pcd`` goes on with chains of its own;
            ``tempering`` with chains at several temperatures, which exchange states.
        steps: Gibbs steps for each gradient.
        num_chains: of ``pcd`` and ``tempering``, over all processes; whatever the size of a batch.
        num_temperatures: of ``tempering``.
        centering: rate in (0, 1] at which the means that are subtracted from the units follow the data's; 0 for none.
            Centering learns densities faster and features worse.
        sparsity_target: mean of the hidden units to strive for; None for none.
        sparsity_weight: what the distance from it counts for.
        seed: of the generator; processes add their number to it.

    Raises:
        ValueError: if a number is out of range.

    Source: Tieleman 2008, Training Restricted Boltzmann Machines using Approximations to the Likelihood Gradient;
    Melchior, Fischer and Wiskott 2016, How to Center Deep Boltzmann Machines, eq. 18 to 20
    """

    def __init__(
        self,
        sampler: Sampler = "pcd",
        steps: int = 1,
        num_chains: int = 100,
        *,
        num_temperatures: int = 10,
        centering: float = 0.01,
        sparsity_target: float | None = None,
        sparsity_weight: float = 0.1,
        seed: int = 0,
    ) -> None:
        if sampler not in ("cd", "pcd", "tempering"):
            raise ValueError(f"sampler must be 'cd', 'pcd' or 'tempering'; got {sampler!r}")
        if min(steps, num_chains) < 1 or num_temperatures < 2:
            raise ValueError(
                "steps and num_chains must be at least 1, num_temperatures at least 2; got "
                f"steps={steps}, num_chains={num_chains}, num_temperatures={num_temperatures}"
            )
        if not 0 <= centering <= 1:
            raise ValueError(f"centering must lie in [0, 1]; got {centering}")
        self.sampler = sampler
        self.steps = steps
        self.num_chains = num_chains
        self.num_temperatures = num_temperatures
        self.centering = centering
        self.sparsity_target = sparsity_target
        self.sparsity_weight = sparsity_weight
        self.seed = seed
        self.chains: Tensor | None = None  # hidden states: (C, H), of tempering (temperatures, C, H), the first at 1
        self.visible_offset: Tensor | None = None  # (V,) of the units' inputs
        self.hidden_offset: Tensor | None = None  # (H,)
        self.activity: Tensor | None = None  # (H,) running mean of the hidden units, for sparsity
        self._generator: Generator | None = None

    def __call__(self, rbm: RBM, visible: Tensor) -> Tensor:
        """Draw samples; return the gap of the mean energies of rows (B, V) and samples, (), with its gradient."""
        with torch.no_grad():
            positive = _phase(rbm, visible)
            negative = self.draw(rbm, positive)
            self._follow(rbm, positive)
        log_variance = getattr(rbm.visible_units, "log_variance", None)
        return _EnergyGap.apply(
            rbm.weight, rbm.visible_bias, rbm.hidden_bias, log_variance, rbm, positive, negative, self
        )

    @torch.no_grad()
    def draw(self, rbm: RBM, positive: Phase) -> Phase:
        """The next samples of the model; those of ``cd`` begin at the data's ``positive`` phase."""
        generator = self.generator(rbm.weight.device)
        if self.sampler == "tempering":
            return self._draw_tempered(rbm, generator)
        if self.sampler == "cd":
            hidden = rbm.hidden_units.sample(positive.activation, generator)
        else:
            hidden = self._chains_of(rbm, (self._num_own_chains(),), generator)
        for _ in range(self.steps):
            negative = _phase(rbm, rbm.sample_visible(hidden, generator))
            hidden = rbm.hidden_units.sample(negative.activation, generator)
        self.chains = hidden if self.sampler == "pcd" else None
        return negative

    def _draw_tempered(self, rbm: RBM, generator: Generator) -> Phase:
        """Gibbs steps in which weights and hidden biases count for 1, ..., 0, then exchanges between neighbours."""
        shape = self.num_temperatures, self._num_own_chains()
        hidden = self._chains_of(rbm, shape, generator)  # (T, C, H)
        scale = torch.linspace(1, 0, self.num_temperatures, device=hidden.device)[:, None, None]
        for _ in range(self.steps):
            visible = rbm.visible_units.sample(
                rbm.visible_bias + scale * (rbm.visible_activation(hidden) - rbm.visible_bias), generator
            )
            visible, activation = _exchange(rbm, visible, rbm.hidden_activation(visible), scale, generator)
            hidden = rbm.hidden_units.sample(scale * activation, generator)
        self.chains = hidden
        return Phase(visible[0], activation[0], rbm.hidden_units.mean(activation[0]))

    def generator(self, device: torch.device) -> Generator:
        """What draws the samples of this process."""
        if self._generator is None or self._generator.device.type != device.type:
            self._generator = Generator(device).manual_seed(self.seed + _rank())
        return self._generator

    def _num_own_chains(self) -> int:
        return -(-self.num_chains // _world_size())

    def _chains_of(self, rbm: RBM, shape: tuple[int, ...], generator: Generator) -> Tensor:
        """The hidden states to go on from; the first are those of independent units."""
        if self.chains is None:
            bias = rbm.hidden_bias.expand(*shape, -1)
            self.chains = rbm.hidden_units.sample(bias, generator)
        return self.chains

    def _follow(self, rbm: RBM, positive: Phase) -> None:
        """Let offsets and activity follow the data of all processes."""
        if not self.centering and self.sparsity_target is None:
            return
        size = rbm.num_visible
        means = torch.cat([rbm.visible_units.input(positive.visible).mean(dim=0), positive.hidden.mean(dim=0)])
        if _world_size() > 1:
            dist.all_reduce(means)
            means /= _world_size()
        if self.centering:
            self.visible_offset = _moved(self.visible_offset, means[:size], self.centering)
            self.hidden_offset = _moved(self.hidden_offset, means[size:], self.centering)
        if self.sparsity_target is not None:
            self.activity = _moved(self.activity, means[size:], _ACTIVITY_RATE)

    def state_dict(self) -> dict[str, Any]:
        """Chains, running means and the generator's state of this process; plain tensors on the CPU."""
        tensors = {name: getattr(self, name) for name in _TENSORS}
        state = {name: tensor.cpu() for name, tensor in tensors.items() if tensor is not None}
        if self._generator is not None:
            state["generator"] = self._generator.get_state()
        return state

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Go on from what :meth:`state_dict` told."""
        for name in _TENSORS:
            setattr(self, name, state[name].to(device) if name in state else None)
        self._generator = None
        if "generator" in state:
            self.generator(device).set_state(state["generator"])


_TENSORS = ("chains", "visible_offset", "hidden_offset", "activity")


class _EnergyGap(Function):
    """Mean energy of data less that of samples, with the hidden units at their means."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        weight: Tensor,
        visible_bias: Tensor,
        hidden_bias: Tensor,
        log_variance: Tensor | None,
        rbm: RBM,
        positive: Phase,
        negative: Phase,
        training: ContrastiveDivergence,
    ) -> Tensor:
        ctx.drawn = rbm, positive, negative, training  # type: ignore[attr-defined]
        return _mean_energy(rbm, positive) - _mean_energy(rbm, negative)

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Any, ...]:
        gradients = contrastive_gradients(*ctx.drawn)
        return *(None if one is None else one * scale for one in gradients), None, None, None, None


def contrastive_gradients(
    rbm: RBM, positive: Phase, negative: Phase, training: ContrastiveDivergence
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of the gap of free energies by weight (H, V), visible bias, hidden bias and log-variance (V,).

    Centred (Melchior et al. 2016, eq. 18 to 20), and with the pull towards the sparsity target (Hinton 2012, section
    11), if ``training`` says so.
    """
    units = rbm.visible_units
    inputs, model_inputs = units.input(positive.visible), units.input(negative.visible)
    hidden, model_hidden = positive.hidden, negative.hidden
    by_visible = model_inputs.mean(dim=0) - inputs.mean(dim=0)
    by_hidden = model_hidden.mean(dim=0) - hidden.mean(dim=0)
    by_variance = None
    log_variance = getattr(units, "log_variance", None)
    if log_variance is not None and log_variance.requires_grad:
        by_variance = _by_log_variance(rbm, positive) - _by_log_variance(rbm, negative)
    visible_offset, hidden_offset = training.visible_offset, training.hidden_offset
    if visible_offset is not None and hidden_offset is not None:
        inputs, model_inputs = inputs - visible_offset, model_inputs - visible_offset
        hidden, model_hidden = hidden - hidden_offset, model_hidden - hidden_offset
    by_weight = (model_hidden / len(model_hidden)).T @ model_inputs - (hidden / len(hidden)).T @ inputs
    if visible_offset is not None and hidden_offset is not None:
        by_visible = by_visible - hidden_offset @ by_weight
        by_hidden = by_hidden - by_weight @ visible_offset
    if training.activity is not None and training.sparsity_target is not None:
        pull = training.sparsity_weight * (training.activity - training.sparsity_target)
        by_hidden = by_hidden + pull
        by_weight = by_weight + torch.outer(pull, units.input(positive.visible).mean(dim=0))
    return by_weight, by_visible, by_hidden, by_variance


def _by_log_variance(rbm: RBM, phase: Phase) -> Tensor:
    """Mean gradient of the free energy of Gaussian visible units by the log of their variances, (V,)."""
    inputs = rbm.visible_units.input(phase.visible)
    precision = (-rbm.visible_units.log_variance).exp()  # type: ignore[operator]
    own = -0.5 * (phase.visible - rbm.visible_bias).square() * precision
    return (own + inputs * (phase.hidden @ rbm.weight)).mean(dim=0)


def _phase(rbm: RBM, visible: Tensor) -> Phase:
    activation = rbm.hidden_activation(visible)
    return Phase(visible, activation, rbm.hidden_units.mean(activation))


def _mean_energy(rbm: RBM, phase: Phase) -> Tensor:
    interaction = (phase.hidden * phase.activation).sum(dim=-1)
    own = rbm.visible_units.energy(phase.visible, rbm.visible_bias)
    return (own - interaction + rbm.hidden_units.base(phase.hidden)).mean()


def _exchange(
    rbm: RBM, visible: Tensor, activation: Tensor, scale: Tensor, generator: Generator
) -> tuple[Tensor, Tensor]:
    """Swap states (T, C, V) and their activations (T, C, H) of neighbouring temperatures, by Metropolis."""
    for first in (0, 1):
        low = torch.arange(first, len(scale) - 1, 2, device=scale.device)
        high = low + 1
        log_p = [
            rbm.hidden_units.log_partition(scale[at] * activation[of]).sum(dim=-1)
            for at, of in ((low, high), (high, low), (low, low), (high, high))
        ]
        gain = log_p[0] + log_p[1] - log_p[2] - log_p[3]  # (pairs, C)
        swap = torch.empty_like(gain).uniform_(generator=generator).log() < gain
        order = torch.arange(len(scale), device=scale.device)[:, None].repeat(1, visible.shape[1])
        order[low], order[high] = torch.where(swap, order[high], order[low]), torch.where(swap, order[low], order[high])
        chain = torch.arange(visible.shape[1], device=scale.device)
        visible, activation = visible[order, chain], activation[order, chain]
    return visible, activation


def _moved(before: Tensor | None, now: Tensor, rate: float) -> Tensor:
    return now if before is None else before.lerp(now, rate)


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
