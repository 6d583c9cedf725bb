"""Other batches for any module: larger ones, with their learning rate, those of similar lengths, and less padding."""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, get_args

import lightning as L
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import initial_seed
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.utils.data import DataLoader, IterableDataset

from lightning_accel._private.torch import makes_own_iterators
from lightning_accel.callbacks.ddp_settings import is_ddp
from lightning_accel.callbacks.distillation.callback import Distillation
from lightning_accel.callbacks.expert_losses import ExpertLosses
from lightning_accel.callbacks.length_buckets import length_buckets, why_not_bucketed
from lightning_accel.callbacks.padding import (
    Padding,
    changes_for,
    choose_change,
    has_padding,
    longest_of,
    training_of,
    why_not_padded,
)
from lightning_accel.callbacks.speedups import loaders_of
from lightning_accel.callbacks.trainer_callbacks import callbacks_of, require_own_steps
from lightning_accel.data.samplers import ResumableLoader
from lightning_accel.ops.bounds import require_flags, require_integers
from lightning_accel.ops.names import require_one_of


class Batching(L.Callback):
    """Train any module on larger batches, on samples of similar length, or on batches with less padding.

    ``lightning-accel tune`` finds whether less padding pays and, with ``--allow batch_size,length_bucketed,packed``,
    the others, and writes them to a config; the first two if losses after as many samples are equivalent over seeds.
    Batches of the training loader have ``batch_size_factor`` times as many samples, and so has each update, whatever
    ``accumulate_grad_batches`` is. Options of optimizers change within each update alone, after the gradients are
    computed: schedulers, logs and checkpoints see the learning rate as it was given.

    - SGD takes the learning rate times the factor (linear rule); momentum stays. The warm-up that the source adds for
      the first epochs is left to the run's own scheduler.
    - Adam, AdamW and RMSprop take it times the root of the factor (square-root rule), with each ``beta`` (``alpha`` of
      RMSprop) at ``1 - factor * (1 - beta)`` and ``eps`` over the root. Weight decay stays as given.

    Nothing else is scaled. **A schedule that counts steps sees fewer of them**: ``interval: step``, ``T_max`` or
    ``total_steps`` in steps, ``val_check_interval`` and ``max_steps`` as an int are to be divided by the factor in the
    config; what is counted in epochs, or computed from ``trainer.estimated_stepping_batches``, needs no change.

    Args:
        batch_size_factor: samples of a batch, as a multiple of those that the loader has; 1 for the run as it is.
        length_bucketed: batch samples of similar length, by
            :class:`lightning_accel.data.LengthBatchSampler` with the run's seed, where the loader's collate function
            pads shuffled ones. The length of a sample is that of its first tensor, array or list of numbers with one
            dimension; each process reads all samples once before training. All samples are trained on: ``drop_last``
            is not kept.
        padding: ``trimmed`` leaves out the last columns of a batch that are padding of all its samples, which
            tokenizers with ``padding="max_length"`` make many of; ``packed`` also puts several sequences in a row, as
            long as the longest. The attention mask is the ``attention_mask`` of a mapping or, to be trimmed, the tensor
            of 0 and 1 in a tuple. Packed batches are of transformers' kind, with ``input_ids``, ``labels`` of each
            token and a loss that is a mean over tokens; they get ``position_ids`` and, for encoders, a mask of (R, 1,
            P, P). Before a batch with padding is trained on that has a longer sample than all before, a training step
            in eval mode shows that its loss and gradients are as with padding (under sharded strategies, its loss);
            what the step itself counts in attributes of the module, it counts there, too. Rows of packed batches are
            what Lightning weighs logged values of epochs by, unless ``self.log`` gets a ``batch_size``.

    Raises:
        ValueError: if the factor is less than 1, or ``padding`` is another word; before training, with ``padding``
            beside :class:`Distillation` or :class:`ExpertLosses`, whose losses count it.
        TypeError: before training, if the loader is not a DataLoader of a map-style data set whose batch sampler has a
            ``batch_size``, or if an optimizer has no rule for the factor; with ``length_bucketed``, if the loader does
            not shuffle and pad samples of several lengths; with ``padding``, before the first step, if batches have no
            attention mask of tokens, cannot be packed, or would be trained on otherwise without padding.

    Source: linear: Goyal et al. 2017, Accurate, Large Minibatch SGD, https://arxiv.org/abs/1706.02677, section 2.1.
    Square root: Malladi et al. 2022, On the SDEs and Scaling Rules for Adaptive Gradient Algorithms,
    https://arxiv.org/abs/2205.10287.

    Example:
        >>> import lightning as L
        >>> from lightning_accel.callbacks import Batching
        >>> trainer = L.Trainer(max_epochs=5, callbacks=[Batching(batch_size_factor=4)])
    """

    def __init__(
        self, batch_size_factor: int = 1, length_bucketed: bool = False, padding: Padding | None = None
    ) -> None:
        require_integers(1, batch_size_factor=batch_size_factor)
        require_flags(length_bucketed=length_bucketed)
        if padding is not None:
            require_one_of("padding", padding, get_args(Padding))
        self.batch_size_factor = batch_size_factor
        self.length_bucketed = length_bucketed
        self.padding = padding
        self._changed: list[object] = []  # batch samplers
        self._undo: list[Callable[[], object]] = []

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._restore()  # of a run around this one
        if stage == "fit" and self._changes_loaders:
            self._set_up_loaders(trainer)  # configure_optimizers may ask for the number of steps

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.padding is not None:
            require_own_steps(trainer, pl_module, self._name, "take padding out in your collate function")
            for kind in (Distillation, ExpertLosses):
                if callbacks_of(trainer, kind):
                    raise ValueError(
                        f"{self._name} and {kind.__name__}, whose loss counts padding: it would be another one without "
                        "padding; take one of the two callbacks out"
                    )
            self._take_padding_out(trainer, pl_module, self.padding)
        if not self._changes_loaders:
            return
        if not self._changed:  # another callback may have put its own in the place of ours
            self._set_up_loaders(trainer)
        for optimizer in trainer.optimizers if self.batch_size_factor > 1 else ():
            if reason := why_not_scalable(optimizer, self.batch_size_factor):
                raise TypeError(f"{self._name}: {reason}")
            self._undo.append(scale_updates(optimizer, self.batch_size_factor))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._changes_loaders and not self._changed:
            raise TypeError(
                f"{self._name} found no DataLoader to change before its first iterator: train with "
                "a torch DataLoader, and put this callback behind all others"
            )

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._restore()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._restore()  # Lightning leaves teardown out

    def _restore(self) -> None:
        for undo in reversed(self._undo):
            undo()
        self._undo, self._changed = [], []

    def _set_up_loaders(self, trainer: L.Trainer) -> None:
        strategy = trainer.strategy
        process = strategy.process_dataloader

        def process_dataloader(dataloader: object) -> object:
            for loader in loaders_of(dataloader) if trainer.training else ():
                if loader.batch_sampler not in self._changed:  # each epoch may bring a new one
                    self._change(loader)
            return process(dataloader)

        strategy.process_dataloader = process_dataloader  # type: ignore[method-assign]
        self._undo.append(lambda: vars(strategy).pop("process_dataloader", None))

    def _change(self, loader: DataLoader[Any]) -> None:
        reason = why_not_larger(loader, self.batch_size_factor) if self.batch_size_factor > 1 else ""
        if reason := reason or (why_not_bucketed(loader) if self.length_bucketed else ""):
            raise TypeError(f"{self._name}: {reason}")
        changes = ExitStack()
        self._undo.append(changes.close)
        if self.batch_size_factor > 1:
            changes.enter_context(larger_batches(loader, self.batch_size_factor))
        self._changed.append(loader.batch_sampler)
        if self.length_bucketed:
            changes.enter_context(length_buckets(loader, initial_seed()))
            self._changed.append(loader.batch_sampler)

    def _take_padding_out(self, trainer: L.Trainer, module: L.LightningModule, padding: Padding) -> None:
        """Change each batch of training before it goes to the device, whatever has made it."""
        strategy = trainer.strategy
        move = strategy.batch_to_device
        with_gradients = isinstance(strategy, SingleDeviceStrategy) or is_ddp(strategy)
        changes, longest = changes_for(padding), 0

        def batch_to_device(batch: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal changes, longest
            if not trainer.training:
                return move(batch, *args, **kwargs)
            if reason := why_not_padded(batch, padding):
                raise TypeError(f"{self._name}: {reason}")
            # a model may look at windows of tokens, of which shorter samples than those tell nothing
            if has_padding(batch, padding) and (length := longest_of(batch)) > longest:
                try:
                    name = choose_change(
                        changes, lambda one: training_of(module, move(one, *args, **kwargs), with_gradients), batch
                    )
                except ValueError as error:
                    raise TypeError(
                        f"{self._name} would train {type(module).__name__} otherwise than with padding: {error}. "
                        "Padding has to be behind the tokens, with labels of -100, and the model has to use the mask; "
                        f"or take the argument padding={padding!r} out"
                    ) from error
                changes, longest = {name: changes[name]}, length
            if longest:
                (change,) = changes.values()
                batch = change(batch)
            return move(batch, *args, **kwargs)

        strategy.batch_to_device = batch_to_device  # type: ignore[method-assign]
        self._undo.append(lambda: vars(strategy).pop("batch_to_device", None))

    @property
    def _changes_loaders(self) -> bool:
        return self.batch_size_factor > 1 or self.length_bucketed

    @property
    def _name(self) -> str:
        given = {
            "batch_size_factor": self.batch_size_factor if self.batch_size_factor > 1 else None,
            "length_bucketed": self.length_bucketed or None,
            "padding": self.padding,
        }
        return f"Batching({', '.join(f'{name}={value!r}' for name, value in given.items() if value is not None)})"


@contextmanager
def larger_batches(loader: DataLoader[Any], factor: int) -> Iterator[None]:
    """Let iterators of ``loader`` that begin meanwhile have ``factor`` times as many samples in a batch.

    Its batch sampler is changed in place, and so is a sampler that knows the size of batches.
    """
    sized = [one for one in (loader.batch_sampler, loader.sampler) if isinstance(getattr(one, "batch_size", None), int)]
    before: list[tuple[Any, int]] = [(one, one.batch_size) for one in sized]  # type: ignore[union-attr]
    for one, size in before:
        one.batch_size = size * factor
    try:
        yield
    finally:
        for one, size in before:
            one.batch_size = size


def why_not_larger(loader: DataLoader[Any], factor: int) -> str:
    """Return why batches of ``loader`` cannot have ``factor`` times as many samples, or nothing."""
    if isinstance(loader.dataset, IterableDataset):
        return "the loader has an IterableDataset, whose length and order nobody knows"
    if makes_own_iterators(loader) and not isinstance(loader, ResumableLoader):
        return f"{type(loader).__name__} makes iterators of its own"
    if loader.batch_sampler is None:
        return "the loader has no batch sampler: its dataset or sampler makes the batches"
    kind = type(loader.batch_sampler).__name__
    if not isinstance(getattr(loader.batch_sampler, "batch_size", None), int):
        return f"the loader's batch_sampler, {kind}, has no batch_size that could be changed"
    try:
        before = len(loader)
        with larger_batches(loader, factor):
            after = len(loader)
    except TypeError:
        return f"the loader's batch_sampler, {kind}, has no length"
    if before < factor:
        return f"an epoch has {before} batches, which are less than one of {factor} times the size"
    return "" if after < before else f"the loader's batch_sampler, {kind}, does not follow its batch_size"


def why_not_scalable(optimizer: Optimizer, factor: int) -> str:
    """Return why there is no learning rate that goes with ``factor`` times as many samples, or nothing."""
    name = type(optimizer).__name__
    if not isinstance(optimizer, (*_LINEAR, *_SQUARE_ROOT)):
        return f"{name} has no scaling rule, as SGD, Adam, AdamW and RMSprop have"
    averages = [value for group in optimizer.param_groups for value in _averages(group)]
    lowest = min((value for value in averages if value > 0), default=1.0)
    if isinstance(optimizer, _SQUARE_ROOT) and factor * (1 - lowest) > 1 + 1e-9:
        return f"the square-root rule has no room for {factor} times the batch with a beta of {lowest:g} in {name}"
    return ""


_LINEAR, _SQUARE_ROOT = (SGD,), (Adam, AdamW, RMSprop)


def _averages(group: dict[str, Any]) -> tuple[float, ...]:
    """Return the decay rates of moving averages of gradients."""
    return tuple(group.get("betas", ())) or ((group["alpha"],) if "alpha" in group else ())


def scaled_options(optimizer: Optimizer, group: dict[str, Any], factor: int) -> dict[str, Any]:
    """Return the options of a parameter group for ``factor`` times as many samples, see :class:`Batching`."""
    if isinstance(optimizer, _LINEAR):
        return {"lr": group["lr"] * factor}
    root = math.sqrt(factor)
    averages = tuple(max(0.0, 1 - factor * (1 - beta)) for beta in _averages(group))
    of_averages = {"betas": averages} if "betas" in group else {"alpha": averages[0]}
    return {"lr": group["lr"] * root, "eps": group["eps"] / root} | of_averages


def scale_updates(optimizer: Optimizer, factor: int) -> Callable[[], None]:
    """Change the options of an optimizer within each of its updates, after its closure; return what undoes that."""
    changed: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def scale() -> None:
        restore()  # a step that failed
        for group in optimizer.param_groups:
            scaled = scaled_options(optimizer, group, factor)
            changed.append((group, {name: group[name] for name in scaled}))
            group.update(scaled)

    def restore() -> None:
        for group, given in changed:
            group.update(given)
        changed.clear()

    def before(_: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            scale()
            return None

        def then_scale() -> Any:  # the closure runs the user's step, which may read or set the learning rate
            result = closure()
            scale()
            return result

        return args[:1], kwargs | {"closure": then_scale}

    handles = optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(lambda *_: restore())

    def undo() -> None:
        restore()
        for handle in handles:
            handle.remove()

    return undo
