"""Distillation of a teacher into the module that is trained."""

import math
from collections.abc import Callable, Mapping
from functools import wraps
from os import PathLike
from types import MethodType
from typing import Any, Literal, cast

import lightning as L
import torch
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn

from lightning_accel._private.lightning import has_trainer
from lightning_accel.callbacks.compression_phase import current_phase
from lightning_accel.callbacks.deployment.copies import WholeCopy
from lightning_accel.callbacks.distillation.cache import AnswerCache
from lightning_accel.callbacks.distillation.loss import (
    TopClasses,
    denominator_ratio,
    divergence,
    lengths_in,
    output_tensor,
    position_mask,
    squared_error,
    top_classes,
)
from lightning_accel.callbacks.distillation.teacher import Teacher, load_teacher, load_weights
from lightning_accel.callbacks.recorded_calls import Call, CallRecorder, Calls, callable_parts, outermost
from lightning_accel.callbacks.trainer_callbacks import require_own_steps
from lightning_accel.ops.bounds import local_path, require_above, require_at_least, require_integers

_COPIES_OF_STUDENT = "initial", "dense"  # teachers that are copies of the student
_DIVERGENCES = "kl", "reverse_kl"
_NAMED_LOSSES = *_DIVERGENCES, "mse"


class Distillation(L.Callback):
    """Add the distance between the outputs of a LightningModule and of a teacher to the training loss.

    ``training_step`` stays unchanged. While it runs, the inputs and the output of the module that it calls are
    recorded: ``self(x)``, else the submodule with the most parameters. The teacher gets the same inputs, under the same
    autocast, in evaluation mode; the step's loss becomes ``loss + weight * distance``. The distance is logged as
    ``train/distillation_loss``. Outputs are tensors, or hold one as ``logits``, ``scores`` or their first. Steps past
    the end of a sequence, where ``forward`` has a parameter ``lengths``, and positions whose class is ``ignore_index``
    are left out. If a step calls the module several times, the distance is the mean over calls. All processes weigh the
    same, unless the step returns the denominator of its mean loss as ``weight``; the distance is then divided by the
    same number.

    The teacher is not part of the module: optimizers, strategies and checkpoints do not see it. Every device holds all
    of it. With ``teacher="initial"`` it is a copy of the module at the start of training, such as a pretrained one;
    with ``teacher="dense"``, a copy from just before ``Pruning`` or ``Quantization`` first changes the module in this
    run, and until then no distance is added. Its weights are saved in checkpoints, so that a resumed run uses the same
    one. Carried recurrent states are those of the student, so that truncated back-propagation through time needs a
    teacher with states of the same shapes.

    Args:
        teacher: a module that takes the same inputs; the path of a checkpoint that names its class, as those of
            ``lightning-accel fit`` do; ``"initial"``; or ``"dense"``. If the step calls a submodule, a LightningModule
            contributes its submodule of the same name.
        checkpoint: checkpoint with the weights for a ``teacher`` given as a module: of a Trainer, or a file of weights
            alone.
        weight: factor of the distance in the loss.
        temperature: divisor of the logits; higher values put more weight on how the teacher ranks wrong classes.
        loss: ``kl`` for logits, see :func:`~lightning_accel.callbacks.distillation.loss.divergence`; ``reverse_kl``,
            which punishes what the teacher finds improbable, as suits the generation of text; ``mse`` for values; or a
            function of the student's and the teacher's outputs, restricted to positions that are not ignored.
        module: name of the submodule whose output is compared, ``""`` for the module itself, to override the rule
            above.
        class_dim: dimension of the classes; 1 for images of logits.
        ignore_index: class that marks positions to ignore.
        cache: folder in which the teacher's ``top_k`` most probable classes are kept for each sample, so that it runs
            in the first epoch alone, and not at all in a later run with the same samples; 8 bytes for each class at
            each position. The divergence is that of these classes and of all others together. For samples that are the
            same in each epoch, without random changes.
        top_k: number of classes in the ``cache``.

    Raises:
        ValueError: if an argument is out of range; before training, if the student shares weights with the teacher, a
            submodule does not exist, a strategy cannot copy the student, or nothing in the Trainer would change a
            ``"dense"`` one; in the first step, if the teacher cannot take the student's inputs, or shapes differ.
        TypeError: before training, with manual optimization or under ``accel_pipeline``; in the first step, if outputs
            hold no tensor, or ``training_step`` returns no loss.
        FileNotFoundError: before training, if there is no such checkpoint.
        NotADirectoryError: before the first step, if ``cache`` is a file.

    Source: Hinton, Vinyals and Dean 2015, Distilling the Knowledge in a Neural Network,
    https://arxiv.org/abs/1503.02531; ``reverse_kl``: Gu et al. 2023, MiniLLM, https://arxiv.org/abs/2306.08543.

    Example:
        >>> import lightning as L
        >>> from lightning_accel import Distillation
        >>> from lightning_accel import Classifier
        >>> teacher = Classifier(num_features=64, num_classes=10, hidden_dims=[512])
        >>> trainer = L.Trainer(max_epochs=5, callbacks=[Distillation(teacher, temperature=2.0)])
    """

    def __init__(
        self,
        teacher: nn.Module | str | PathLike[str],
        *,
        checkpoint: str | PathLike[str] | None = None,
        weight: float = 0.5,
        temperature: float = 4.0,
        loss: Literal["kl", "reverse_kl", "mse"] | Callable[[Tensor, Tensor], Tensor] = "kl",
        module: str | None = None,
        class_dim: int = -1,
        ignore_index: int = -100,
        cache: str | PathLike[str] | None = None,
        top_k: int = 64,
    ) -> None:
        require_at_least(0, weight=weight)
        require_above(0, temperature=temperature)
        if not all(map(math.isfinite, (weight, temperature))):
            raise ValueError(f"weight and temperature must be finite; got weight={weight}, temperature={temperature}")
        if loss not in _NAMED_LOSSES and not callable(loss):
            raise ValueError(f"loss must be 'kl', 'reverse_kl', 'mse' or a function; got {loss!r}")
        if cache is not None and (loss not in _DIVERGENCES or class_dim != -1):
            raise ValueError(
                f"cache keeps the most probable classes of the last dimension, for loss='kl' or 'reverse_kl'; got "
                f"loss={loss!r}, class_dim={class_dim}"
            )
        require_integers(1, top_k=top_k)
        require_integers(-(1 << 62), class_dim=class_dim, ignore_index=ignore_index)
        if checkpoint is not None and not isinstance(teacher, nn.Module):
            raise ValueError(f"checkpoint holds weights for a module, but teacher is {teacher!r}; give the module")
        if not isinstance(teacher, nn.Module) and teacher not in _COPIES_OF_STUDENT:
            teacher = local_path(teacher, "a teacher that is no module")
        self.teacher = teacher
        self.checkpoint = None if checkpoint is None else local_path(checkpoint, "checkpoint")
        self.weight, self.temperature, self.loss = weight, temperature, loss
        self.module = module
        self.class_dim, self.ignore_index = class_dim, ignore_index
        self.cache, self.top_k = None if cache is None else local_path(cache, "cache"), top_k
        self._answers: AnswerCache | None = None
        self._copy: WholeCopy | None = None
        self._teacher: Teacher | None = None
        self._saved: dict[str, Any] = {}  # the teacher's weights from a checkpoint
        self._reset()

    def _reset(self) -> None:
        self._recorder = CallRecorder()
        self._student: str | None = self.module
        self._replaced: Any = None  # a training_step that others had set on the instance
        self._wrapped_step: MethodType | None = None

    # ---- before training

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._saved = {}
        advice = "add lightning_accel.callbacks.distillation.loss.divergence(...) to the loss there"
        require_own_steps(trainer, pl_module, "Distillation", advice)
        if self.teacher == "dense" and not current_phase(trainer):
            raise ValueError(
                "teacher='dense' is the student before it is pruned or quantized, and nothing in the Trainer does "
                "that; add Pruning or Quantization(mode='qat'), or write teacher='initial' or a checkpoint"
            )
        if self.teacher in _COPIES_OF_STUDENT:
            self._teacher = None
            self._copy = _make_copy(trainer, pl_module, self.teacher)
            return
        if isinstance(self.teacher, nn.Module):
            if {id(one) for one in self.teacher.parameters()} & {id(one) for one in pl_module.parameters()}:
                raise ValueError(
                    "the teacher and the student share weights, which would be frozen; write teacher='initial' for a "
                    "copy of the student"
                )
            module = self.teacher
            if self.checkpoint is not None:
                load_weights(module, self.checkpoint)
        else:
            module = load_teacher(self.teacher)
        self._teacher = Teacher(module)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Copy the student before other callbacks change it, unless a strategy loads its weights later."""
        if not (trainer.ckpt_path and trainer.strategy.restore_checkpoint_after_setup):
            self._make_initial_teacher(trainer, pl_module)

    def before_model_changes(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """See :func:`~lightning_accel.callbacks.compression_phase.announce_change`."""
        if self.teacher == "dense" and self._copy is not None:
            self._make_own_teacher(trainer, pl_module)
            self._place(trainer, pl_module)

    def _make_initial_teacher(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._copy is not None and (self.teacher == "initial" or self._saved):
            self._make_own_teacher(trainer, pl_module)

    def _make_own_teacher(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert self._copy is not None
        if self._saved:  # of the shapes of a new module, from which the student may have lost channels
            made = self._copy.with_original_shapes()
            for name, buffer in pl_module.named_buffers():  # including those not in state_dict
                if buffer.shape == (own := made.get_buffer(name)).shape:
                    own.copy_(buffer)
            made.load_state_dict(self._saved["weights"], assign=True)  # in the dtypes of the checkpoint
        else:
            made = cast(L.LightningModule, self._copy.make(trainer, pl_module, everywhere=True))
        self._copy, self._saved = None, {}
        self._teacher = Teacher(made)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._make_initial_teacher(trainer, pl_module)
        self._require_module(pl_module)
        if self._teacher is not None:
            self._place(trainer, pl_module)
        self._wrap_step(pl_module)

    def _require_module(self, pl_module: L.LightningModule) -> None:
        if self.module is not None and self.module not in dict(pl_module.named_modules()):
            children = ", ".join(name for name, _ in pl_module.named_children())
            raise ValueError(
                f"the student {type(pl_module).__name__} has no submodule {self.module!r}; give one of its own, such "
                f"as {children}"
            )

    def _place(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert self._teacher is not None
        self._teacher.place(trainer.strategy.root_device, _common_dtype(pl_module))
        if self.cache is not None:
            self._close_cache()
            self._answers = AnswerCache(self.cache, self.top_k, self.temperature, self._teacher.module)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._answers is not None:
            self._answers.find_new()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._answers is not None and self._answers.misses and not self._answers.hits and trainer.current_epoch:
            rank_zero_warn(
                f"no batch of this epoch was among the teacher's answers in {self.cache}, which grow without use: "
                "samples change from epoch to epoch, as by random crops. Take out cache"
            )
        if self._answers is not None:
            self._answers.hits = self._answers.misses = 0

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: object) -> None:
        self._recorder.watch(pl_module, callable_parts(pl_module) if self._student is None else [self._student])

    # ---- the step

    def _wrap_step(self, pl_module: L.LightningModule) -> None:
        self._reset()
        self._replaced = vars(pl_module).get("training_step")
        original = type(pl_module).training_step if self._replaced is None else _to_function(self._replaced, pl_module)

        @wraps(original)
        def training_step(module: L.LightningModule, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
            is_training = self._wrapped_step is not None and has_trainer(module) and module.trainer.training
            if not is_training or self._teacher is None:  # a copy, called by validation_step, or still dense
                return original(module, *args, **kwargs)
            with self._recorder.recording() as calls:
                output = original(module, *args, **kwargs)
            return self._add_distance(output, module, calls, args)

        self._wrapped_step = MethodType(training_step, pl_module)
        vars(pl_module)["training_step"] = self._wrapped_step

    def _add_distance(self, output: STEP_OUTPUT, module: L.LightningModule, calls: Calls, batch: Any) -> STEP_OUTPUT:
        if output is None:
            return None
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor):
            raise TypeError(
                f"Distillation needs a loss from training_step of {type(module).__name__}, a tensor or a dict with "
                f"'loss'; it returned {type(output).__name__}"
            )
        weight = output.get("weight") if isinstance(output, Mapping) else None
        distance = self._distance(module, calls, batch, weight)
        module.log("train/distillation_loss", distance.detach())
        total = loss + self.weight * distance.to(loss.device)
        return {**output, "loss": total} if isinstance(output, Mapping) else total

    def _distance(self, module: L.LightningModule, calls: Calls, batch: Any, weight: Any) -> Tensor:
        if self._student is None:
            self._student = outermost(calls, module)
        found = calls.get(self._student or "")
        if not found:
            raise ValueError(
                f"training_step of {type(module).__name__} does not call "
                + ("a module with parameters" if self._student is None else repr(self._student))
                + ", so there is no output to compare with the teacher's; name what it calls: module='net'"
            )
        assert self._student is not None
        assert self._teacher is not None
        terms = []
        for call in found:
            terms.append(self._compare(module.get_submodule(self._student), call, batch, weight))
        return torch.stack(terms).mean()

    def _answer(self, call: Call, own: Tensor, device: torch.device) -> Tensor | TopClasses:
        """Return the teacher's output, or its most probable classes, from the cache if all samples are in it."""
        assert self._teacher is not None
        assert self._student is not None
        keys = [] if self._answers is None else self._answers.keys_of(call, own.shape[1:])
        found = None if self._answers is None else self._answers.get(keys)
        if found is None:
            output = output_tensor(self._teacher.run(call, self._student, device), "the teacher")
            if own.shape != output.shape and self.loss in _NAMED_LOSSES:
                raise ValueError(
                    f"the teacher gives {tuple(output.shape)} where the student gives {tuple(own.shape)}; it must be "
                    "of the same task, with as many outputs"
                )
            if self._answers is None:
                return output
            if len(output) != len(keys):
                raise ValueError(
                    f"cache keeps answers sample by sample, and the teacher gives {len(output)} for {len(keys)} "
                    "samples; take out cache"
                )
            found = top_classes(output, self.top_k, self.temperature)
            found = found._replace(log_probs=found.log_probs.float())  # as they come back from the cache
            self._answers.put(keys, found)
        return TopClasses(*(one.to(device) for one in found))

    def _compare(self, module: nn.Module, call: Call, batch: Any, weight: Any) -> Tensor:
        own = output_tensor(call.output, "the student")
        if self.loss in _DIVERGENCES and (own.ndim < 2 or own.shape[self.class_dim] < 2):
            raise ValueError(
                f"loss={self.loss!r} of Distillation compares probabilities of two or more classes; the student gives "
                f"values of shape {tuple(own.shape)}. Set loss='mse'"
            )
        aim = self._answer(call, own, own.device)
        lengths = lengths_in(module, call.args, call.kwargs)
        shape = own.select(self.class_dim, 0).shape if self.loss in _DIVERGENCES else own.shape
        keep = position_mask(shape, lengths, batch, self.ignore_index)
        if keep is None and self.loss == "mse" and own.ndim > 1:  # several values per position
            keep = position_mask(own.shape[:-1], lengths, batch, self.ignore_index)
        keep = None if keep is None else keep.to(own.device)
        with torch.autocast(own.device.type, enabled=False):
            share = denominator_ratio(keep, weight)
            if self.loss in _DIVERGENCES:
                is_reverse = self.loss == "reverse_kl"
                return share * divergence(own, aim, self.temperature, self.class_dim, keep, is_reverse)
            assert isinstance(aim, Tensor)
            if self.loss == "mse":
                return share * squared_error(own, aim, keep)
            assert callable(self.loss)
            return share * (self.loss(own, aim) if keep is None else self.loss(own[keep], aim[keep]))

    # ---- after training

    def _restore_step(self, pl_module: L.LightningModule) -> None:
        if self._wrapped_step is not None and vars(pl_module).get("training_step") is self._wrapped_step:
            del vars(pl_module)["training_step"]
            if self._replaced is not None:
                vars(pl_module)["training_step"] = self._replaced
        self._recorder.close()
        self._close_cache()
        if self._teacher is not None:
            self._teacher.release()
        self._reset()

    def _close_cache(self) -> None:
        if self._answers is not None:
            self._answers.close()
            self._answers = None

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Restore ``training_step`` before other callbacks copy, convert or export the module."""
        self._restore_step(pl_module)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._restore_step(pl_module)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._restore_step(pl_module)

    def state_dict(self) -> dict[str, Any]:
        if self.teacher not in _COPIES_OF_STUDENT or self._teacher is None:
            return {"initial": self._saved}
        weights = {name: value.cpu() for name, value in self._teacher.module.state_dict().items()}
        return {"initial": {"weights": weights}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict["initial"] if self.teacher in _COPIES_OF_STUDENT else {}


def _make_copy(trainer: L.Trainer, pl_module: L.LightningModule, teacher: object) -> WholeCopy:
    if isinstance(trainer.strategy, FSDPStrategy | ModelParallelStrategy):
        raise ValueError(
            f"teacher={teacher!r} needs a whole copy of the student, which {type(trainer.strategy).__name__} does not "
            "give; train with 'accel_fsdp2', or give the path of a checkpoint of the student"
        )
    if type(pl_module).configure_model is not L.LightningModule.configure_model:
        pl_module.configure_model()  # the Trainer calls it later; its contract allows two calls
    return WholeCopy(pl_module)


def _to_function(step: Any, pl_module: L.LightningModule) -> Callable[..., STEP_OUTPUT]:
    if isinstance(step, MethodType) and step.__self__ is pl_module:
        return step.__func__

    @wraps(step)
    def training_step(module: L.LightningModule, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        return step(*args, **kwargs)

    return training_step


def _common_dtype(module: nn.Module) -> torch.dtype | None:
    """Return the dtype of the floating-point parameters, None if they have several."""
    dtypes = {one.dtype for one in module.parameters() if one.is_floating_point()}
    return dtypes.pop() if len(dtypes) == 1 else None
