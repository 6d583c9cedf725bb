"""Contrastive divergence training of RBMs. Shapes: B batch size, C chains, V visible units, H hidden units."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Generator, Tensor
from torch.autograd.function import Function
from torch.optim import SGD, Optimizer

from lightning_accel.nn.boltzmann.rbm import RBM
from lightning_accel.nn.boltzmann.sgd import BernoulliContrast, BernoulliSGD, is_plain, needs_autograd, supported_sgd
from lightning_accel.nn.boltzmann.units import BernoulliVisible
from lightning_accel.ops.bounds import require_at_least, require_integers
from lightning_accel.ops.float32 import without_autocast
from lightning_accel.ops.gibbs import draw_bernoulli, sample_bernoulli

Sampler: TypeAlias = Literal["cd", "pcd"]


class Phase(NamedTuple):
    """Hold visible states, of data or drawn from the model, with activations and means of the hidden units."""

    visible: Tensor  # (B, V)
    activation: Tensor  # (B, H) activations of the hidden units
    hidden: Tensor  # (B, H) means of the hidden units


class _Contrast(NamedTuple):
    """Hold the inputs of the gradient and compute it: data, samples drawn from the model, and offsets."""

    rbm: RBM
    positive: Phase
    negative: Phase  # (C, ...)
    offsets: tuple[Tensor, Tensor] | None  # (V,) and (H,), subtracted from the units
    dtype: torch.dtype  # dtype of the product that gives the gradient of the weights

    def gap(self) -> Tensor:
        """Compute the mean energy of the data minus that of the samples, (), with hidden units at their means."""
        return _mean_energy(self.rbm, self.positive) - _mean_energy(self.rbm, self.negative)

    def gap_with_gradient(self) -> Tensor:
        """Compute :meth:`gap` as an autograd function with the gradient :meth:`gradients`."""
        rbm = self.rbm
        return _EnergyGap.apply(rbm.weight, rbm.visible_bias, rbm.hidden_bias, _log_variance(rbm), self)

    @torch.no_grad()
    def gradients(self, scale: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Compute gradients of weight (H, V), visible bias, hidden bias and log-variance (or None), times ``scale``.

        Data and samples are in one matrix product, as in bfloat16 the difference of two rounded products loses
        precision.
        """
        positive, negative = self.positive, self.negative
        with without_autocast(positive.hidden):
            visible = torch.cat([positive.visible, negative.visible])
            hidden = torch.cat([positive.hidden, negative.hidden])
            share = hidden.new_full((len(hidden),), 1 / len(negative.hidden))
            share[: len(positive.hidden)] = -1 / len(positive.hidden)
            if scale is not None:
                share *= scale
            inputs = self.rbm.visible_units.input(visible)
            by_variance = _by_log_variance(self.rbm, visible, inputs, hidden, share)
            by_visible = share @ inputs
            if self.offsets is not None:
                inputs, hidden = inputs - self.offsets[0], hidden.sub_(self.offsets[1])
            hidden *= share[:, None]
            by_hidden = hidden.sum(dim=0)
            by_weight = (hidden.T.to(self.dtype) @ inputs.to(self.dtype)).to(hidden.dtype)
            if self.offsets is not None:
                by_visible -= self.offsets[1] @ by_weight
                by_hidden -= by_weight @ self.offsets[0]
            return by_weight, by_visible, by_hidden, by_variance


_ACTIVATIONS = {"hidden_activation", "visible_activation"}  # which a user may replace


class _Found(NamedTuple):
    """Hold the gap and its gradient, already computed, for Bernoulli units."""

    value: Tensor  # ()
    by_parameters: tuple[Tensor, Tensor, Tensor]  # weight, visible bias, hidden bias

    def gap(self) -> Tensor:
        return self.value

    def gradients(self, scale: Tensor) -> tuple[Tensor | None, ...]:
        return *(scale * one for one in self.by_parameters), None


class ContrastiveDivergence:
    """Estimate the gradient of the log-likelihood of an RBM, with samples drawn from the model by Gibbs sampling.

    Calling the object with an :class:`~lightning_accel.RBM` and a batch of data draws samples and returns the gap
    between the mean energies of data and samples: a scalar whose gradient, computed in closed form, is that of
    ``free_energy(data).mean() - free_energy(samples).mean()``. A ``training_step`` can return it like a loss, but its
    value does not measure the quality of the model. For small models, :meth:`train_` processes many mini-batches in
    one call.

    The object holds the Markov chains and the random number generator, separately in each process. To resume a run with
    the same numbers, save the :meth:`state_dict` of every process.

    Args:
        sampler: ``cd`` starts ``steps`` Gibbs steps from the data; ``pcd`` continues persistent chains.
        steps: Gibbs steps for each gradient.
        num_chains: number of chains of ``pcd`` over all processes, independent of the batch size.
        centering: number of data samples, over all processes, in the running means that are subtracted from the units;
            a larger batch uses its own means. 0 for no centering. Centering learns densities faster and features worse;
            means over few samples are harmful.
        seed: seed of the generator; the rank is added to it.

    Raises:
        TypeError: if an option has another type.
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
        centering: float = 100,
        seed: int = 0,
    ) -> None:
        if sampler not in ("cd", "pcd"):
            raise ValueError(f"sampler must be 'cd' or 'pcd'; got {sampler!r}")
        require_integers(1, steps=steps, num_chains=num_chains)
        require_at_least(0, centering=centering)
        require_integers(0, seed=seed)
        if 0 < centering < 1:
            raise ValueError(f"centering must be at least 1 row of data, or 0 for none; got {centering}")
        self.sampler = sampler
        self.steps = steps
        self.num_chains = num_chains
        self.centering = centering
        self.seed = seed
        self.chains: Tensor | None = None  # hidden states (C, H)
        self.visible_offset: Tensor | None = None  # (V,) running mean of the units' inputs
        self.hidden_offset: Tensor | None = None  # (H,)
        self._generator: Generator | None = None
        self._last_gap: Tensor | None = None
        self._work: BernoulliContrast | None = None  # buffers of the last call

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_work": None}  # whose tensors share memory, which pickle does not keep

    def __call__(self, rbm: RBM, visible: Tensor) -> Tensor:
        """Draw samples; return the gap between the mean energies of data (B, V) and samples, (), with its gradient."""
        is_served = visible.device.type == "cpu" and not _autocast_dtype(visible.device) and is_plain(rbm)
        is_own = type(self) is ContrastiveDivergence and type(rbm) is RBM and not _ACTIVATIONS & vars(rbm).keys()
        if not is_served or not is_own or not len(visible) or visible.shape[1:] != rbm.weight.shape[1:]:
            return self._contrast(rbm, visible).gap_with_gradient()
        with torch.no_grad():
            found = self._differentiate_at_once(rbm, visible)
        return _EnergyGap.apply(rbm.weight, rbm.visible_bias, rbm.hidden_bias, None, found)

    @torch.no_grad()
    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's compiler does not take its updates of views
    def train_(self, rbm: RBM, visible: Tensor, batch_size: int, optimizer: Optimizer) -> Tensor:
        """Update ``rbm`` once per mini-batch of ``batch_size`` rows of ``visible`` (N, V), in their order.

        It is equivalent to the loop ``optimizer.zero_grad(); self(rbm, rows).backward(); optimizer.step()``, but
        without autograd unless a parameter has hooks or a parametrization. With Bernoulli units,
        :class:`torch.optim.SGD` without Nesterov momentum and step hooks, one process and no autocast, weights and
        momentum are updated in place, without calls of the optimizer; on a GPU, random numbers are drawn for many
        mini-batches at once then, and differ from those of the loop. The last mini-batch always calls
        ``optimizer.step``, so that schedulers notice a step; Lightning counts each call of this method as one step.
        Gradients are averaged over processes, which need the same number of mini-batches.

        Returns:
            Mean over mini-batches of the gap between the mean energies of data and samples, ().

        Raises:
            ValueError: if ``visible`` is empty, or if training has diverged so that the gap is not finite; on a GPU
                this is raised at the next call, to avoid waiting for the device.
        """
        if batch_size < 1 or not len(visible):
            raise ValueError(f"train_ needs rows and a batch_size of at least 1; got {len(visible)} and {batch_size}")
        self._require_finite()
        batches = visible.to(rbm.weight).split(batch_size)
        inner = getattr(optimizer, "optimizer", optimizer)  # the optimizer inside Lightning's wrapper
        sgd = None if _autocast_dtype(rbm.weight.device) else supported_sgd(rbm, inner)
        if sgd is None or _world_size() > 1 or len(batches) < 3:
            gaps = [self._update_(rbm, rows, inner) for rows in batches[:-1]]
            gaps.append(self._update_(rbm, batches[-1], optimizer))
        else:
            gaps = [] if self._has_state(sgd, rbm) else [self._update_(rbm, batches[0], inner)]
            gaps += self._update_in_place_(rbm, batches[len(gaps) :], sgd, optimizer)
        self._last_gap = torch.stack(gaps).mean()
        if not visible.is_cuda:
            self._require_finite()
        return self._last_gap

    def _update_(self, rbm: RBM, rows: Tensor, optimizer: Optimizer) -> Tensor:
        """Update ``rbm`` by one step of the optimizer; return the gap."""
        if needs_autograd(rbm):
            return self._update_by_autograd_(rbm, rows, optimizer)
        contrast = self._contrast(rbm, rows)
        gap = contrast.gap()
        parameters = rbm.weight, rbm.visible_bias, rbm.hidden_bias, _log_variance(rbm)
        pairs = [
            (parameter, gradient)
            for parameter, gradient in zip(parameters, contrast.gradients(), strict=True)
            if parameter is not None and gradient is not None and parameter.requires_grad
        ]
        optimizer.zero_grad()  # gradients of parameters outside the RBM
        for (parameter, _), gradient in zip(pairs, _average([gradient for _, gradient in pairs]), strict=True):
            parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()
        torch.clear_autocast_cache()  # it holds casts of the old weights
        return gap

    def _update_by_autograd_(self, rbm: RBM, rows: Tensor, optimizer: Optimizer) -> Tensor:
        """Update ``rbm`` through autograd, so that hooks and parametrizations see each gradient; return the gap."""
        optimizer.zero_grad()
        with torch.enable_grad():
            gap = self(rbm, rows)
            gap.backward()
        gradients = [one.grad for one in rbm.parameters() if one.grad is not None]
        for gradient, mean in zip(gradients, _average(gradients), strict=True):
            gradient.copy_(mean)
        optimizer.step()
        torch.clear_autocast_cache()
        return gap.detach()

    def _has_state(self, sgd: SGD, rbm: RBM) -> bool:
        """Return whether a first update has created all state of the training."""
        needed = [self.chains] if self.sampler == "pcd" else []
        needed += [self.visible_offset, self.hidden_offset] if self.centering else []
        if any(group["momentum"] for group in sgd.param_groups):
            needed += [
                sgd.state.get(one, {}).get("momentum_buffer") for one in (rbm.weight, rbm.visible_bias, rbm.hidden_bias)
            ]
        return all(one is not None for one in needed)

    def _update_in_place_(self, rbm: RBM, batches: Sequence[Tensor], sgd: SGD, optimizer: Optimizer) -> list[Tensor]:
        """Update once per mini-batch, the last (maybe smaller) one by the optimizer; return their gaps."""
        chains = self.chains if self.sampler == "pcd" else None
        work = BernoulliSGD(rbm, sgd, len(batches[0]), chains, self.steps)
        generator = self.generator(rbm.weight.device)
        gaps = []
        for rows, noise in zip(batches[:-1], work.noise(len(batches) - 1, generator), strict=True):
            gaps.append(self._differentiate(work, rows, noise))
            work.update_()
        work.allocate(len(batches[-1]))
        gaps.append(self._differentiate(work, batches[-1], next(work.noise(1, generator))))
        optimizer.zero_grad()
        work.write_back_()
        optimizer.step()
        self.chains = None if chains is None else work.chains
        return gaps

    def _differentiate_at_once(self, rbm: RBM, rows: Tensor) -> "_Found":
        """Compute gap and gradient in few calls of torch; update chains and offsets."""
        chains = self._start_chains(rbm).to(rbm.weight) if self.sampler == "pcd" else None
        rows = rows.to(rbm.weight.dtype)
        work = self._work
        if work is None or not work.begin(rbm, rows, chains, self.steps):
            self._work = work = BernoulliContrast(rbm, len(rows), chains, self.steps)
        (noise,) = work.noise(1, self.generator(rbm.weight.device))
        gap = self._differentiate(work, rows, noise)
        self.chains = None if chains is None else work.chains.clone()
        return _Found(gap, work.gradients)

    def _start_chains(self, rbm: RBM) -> Tensor:
        """Return the persistent chains (C, H), drawn from independent units at first."""
        if self.chains is None:
            size = -(-self.num_chains // _world_size())
            self.chains = sample_bernoulli(rbm.hidden_bias.expand(size, -1), self.generator(rbm.weight.device))
        return self.chains

    def _differentiate(self, work: BernoulliContrast, rows: Tensor, noise: list[Tensor]) -> Tensor:
        """Compute the gradient in ``work``; return the gap."""
        self._update_means(*work.phases(rows, noise))
        gap = work.differentiate()
        if (offsets := self._offsets()) is not None:
            work.center(*offsets)
        return gap

    def _contrast(self, rbm: RBM, visible: Tensor) -> _Contrast:
        """Draw samples and update the running means with the data."""
        visible = visible.to(torch.promote_types(rbm.weight.dtype, torch.float32))
        with torch.no_grad():
            positive = _phase(rbm, visible)
            negative = self.draw(rbm, positive)
            self._update_means(rbm.visible_units.input(visible), positive.hidden)
        dtype = _autocast_dtype(visible.device) or rbm.weight.dtype
        return _Contrast(rbm, positive, negative, self._offsets(), dtype)

    @torch.no_grad()
    def draw(self, rbm: RBM, positive: Phase) -> Phase:
        """Draw the next samples of the model; the sampler ``cd`` starts at the ``positive`` phase of the data."""
        generator = self.generator(rbm.weight.device)
        persistent = self.sampler == "pcd"
        hidden = self._start_chains(rbm) if persistent else None
        negative = positive
        for _ in range(self.steps):
            hidden = draw_bernoulli(negative.hidden, generator) if hidden is None else hidden
            negative = _phase(rbm, _draw_visible(rbm, hidden, generator))
            hidden = draw_bernoulli(negative.hidden, generator) if persistent else None
        self.chains = hidden
        return negative

    def generator(self, device: torch.device) -> Generator:
        """Return the random number generator of this process."""
        if self._generator is None or self._generator.device.type != device.type:
            self._generator = Generator(device).manual_seed(self.seed + _rank())
        return self._generator

    def _offsets(self) -> tuple[Tensor, Tensor] | None:
        if self.visible_offset is None or self.hidden_offset is None:
            return None
        return self.visible_offset, self.hidden_offset

    def _update_means(self, inputs: Tensor, hidden: Tensor) -> None:
        """Update the offsets with the data (B, V) and its hidden means (B, H) of all processes."""
        if not self.centering:
            return
        size = inputs.shape[1]
        means = torch.cat([inputs.mean(dim=0), hidden.mean(dim=0)])
        if _world_size() > 1:
            dist.all_reduce(means)
            means /= _world_size()
        rate = min(1, len(inputs) * _world_size() / self.centering)
        self.visible_offset = _update_mean(self.visible_offset, means[:size], rate)
        self.hidden_offset = _update_mean(self.hidden_offset, means[size:], rate)

    def _require_finite(self) -> None:
        if self._last_gap is not None and not self._last_gap.isfinite():
            self._last_gap = None
            raise ValueError(
                "training has diverged: the gap of energies of data and samples is not finite. Take a smaller learning "
                "rate, or look for NaN in the data (RBM.require_support)"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return chains, running means and generator state of this process, as tensors on the CPU."""
        tensors = {name: getattr(self, name) for name in _STATE_TENSORS}
        state = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items() if tensor is not None}
        if self._generator is not None:
            state["generator"] = self._generator.get_state()
        return state

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Restore the state that :meth:`state_dict` returned."""
        for name in _STATE_TENSORS:
            setattr(self, name, state[name].to(device, copy=True) if name in state else None)
        self._generator = None
        if "generator" in state:
            self.generator(device).set_state(state["generator"])


_STATE_TENSORS = ("chains", "visible_offset", "hidden_offset")


def _phase(rbm: RBM, visible: Tensor) -> Phase:
    activation = rbm.hidden_activation(visible)
    return Phase(visible, activation, activation.sigmoid())


def _draw_visible(rbm: RBM, hidden: Tensor, generator: Generator) -> Tensor:
    activation = rbm.visible_activation(hidden)
    if isinstance(rbm.visible_units, BernoulliVisible):  # draw the same random numbers as BernoulliSGD
        return draw_bernoulli(rbm.visible_units.mean(activation), generator)
    return rbm.visible_units.sample(activation, generator)


def _update_mean(before: Tensor | None, now: Tensor, rate: float) -> Tensor:
    return now if before is None else before.lerp(now, rate)


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _average(tensors: list[Tensor]) -> Sequence[Tensor]:
    """Average tensors over processes by one all-reduce."""
    if _world_size() == 1:
        return tensors
    flat = torch.cat([one.flatten() for one in tensors])
    dist.all_reduce(flat)
    parts = (flat / _world_size()).split([one.numel() for one in tensors])
    return [part.view_as(one) for part, one in zip(parts, tensors, strict=True)]


def _autocast_dtype(device: torch.device) -> torch.dtype | None:
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


class _EnergyGap(Function):
    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        visible_bias: Tensor,
        hidden_bias: Tensor,
        log_variance: Tensor | None,
        contrast: "_Contrast | _Found",
    ) -> Tensor:
        ctx.contrast = contrast
        return contrast.gap()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Any, ...]:
        return *ctx.contrast.gradients(scale), None


def _log_variance(rbm: RBM) -> Tensor | None:
    """Return the log-variance of the Gaussian visible units, which come first, or None."""
    return next(rbm.visible_units.parameters(), None)


def _by_log_variance(rbm: RBM, visible: Tensor, inputs: Tensor, hidden: Tensor, share: Tensor) -> Tensor | None:
    log_variance = _log_variance(rbm)
    if log_variance is None or not log_variance.requires_grad:
        return None
    size = len(log_variance)
    own = -0.5 * (visible[:, :size] - rbm.visible_bias[:size]).square() * (-log_variance).exp()
    return -(share @ (own + inputs[:, :size] * (hidden @ rbm.weight[:, :size].to(hidden.dtype))))


def _mean_energy(rbm: RBM, phase: Phase) -> Tensor:
    interaction = torch.dot(phase.hidden.flatten(), phase.activation.flatten()) / len(phase.hidden)
    return rbm.visible_units.energy(phase.visible, rbm.visible_bias).mean() - interaction
