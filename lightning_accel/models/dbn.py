"""Deep belief network. Shapes: B samples, V visible units, H hidden units, C classes."""

from collections.abc import Sequence
from functools import partial
from operator import index
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_accel._private.lightning import has_trainer
from lightning_accel.models.dbn_fine_tuning import FineTuning, split_batch
from lightning_accel.models.dbn_metrics import (
    Batch,
    BeliefMetrics,
    EvaluatedNetwork,
    Likelihood,
    classes_of,
    cross_entropy_of_known,
    first_of,
    flat,
)
from lightning_accel.models.dbn_stages import (
    Schedule,
    Stage,
    data_statistics,
    make_stack,
    redistribute_states,
    require_options,
    require_schedule,
    require_sizes_from_below,
    set_parameter_,
    share_of_process,
    unsharded,
)
from lightning_accel.models.hooks import (
    is_logging_step,
    keep_plain_hyperparameters,
    list_of_str,
    require_class_names,
    require_classes,
    take_from_datamodule,
)
from lightning_accel.nn.boltzmann.rbm import RBM, Visible
from lightning_accel.nn.boltzmann.stack import UNKNOWN, RBMStack
from lightning_accel.nn.boltzmann.units import GaussianVisible
from lightning_accel.nn.boltzmann.wake_sleep import UpDown
from lightning_accel.ops.bounds import if_set, require_flags, require_integers
from lightning_accel.ops.gibbs import draw_bernoulli
from lightning_accel.ops.names import list_of_sizes
from lightning_accel.ops.options import read_options
from lightning_accel.ops.renames import renamed_arguments
from lightning_accel.strategies import DataParallelStrategy
from lightning_accel.strategies.checkpoints.rank_states import RankStates

_KEY = "deep_belief_network"  # key in checkpoints
_PLAIN_STEPS = (Precision.optimizer_step, MixedPrecision.optimizer_step)  # without a scaler, which setup refuses


class DeepBeliefNetwork(EvaluatedNetwork):
    """Train a stack of restricted Boltzmann machines, one after another and then together, within one ``fit``.

    Batches are samples, or pairs of samples and classes (B,) int64; samples (B, ...) are flattened. Stage i trains RBM
    i on samples of the hidden units below (or their means, see :class:`lightning_accel.models.Stage`) for the epochs
    given by ``stages``, with a fresh optimizer state and a visible bias initialized from the mean of its data; then, by
    the method of ``fine_tuning``:

    - ``classifier``: a linear head on the top hidden units, and all layers by back-propagation of its cross entropy; if
      the top RBM has ``labels``, the head starts with the weights of its label units;
    - ``updown``: all layers by the up-down algorithm, a contrastive wake-sleep, see :class:`lightning_accel.nn.UpDown`.

    **Samples of unknown class** have the class -100. RBMs train on them as on all others, a top RBM with ``labels`` on
    classes drawn from its own distribution given the sample (Larochelle, Mandel, Pascanu and Bengio 2012, Learning
    Algorithms for the Classification Restricted Boltzmann Machine); a classifier as
    :class:`lightning_accel.models.FineTuning` says. Metrics that need a class leave them out, and are not logged where
    no class is known. In mini-batches (``minibatch_size``) of a classifier, samples of known class are beside those of
    unknown class, repeated where they are fewer.

    Set ``max_epochs`` of the Trainer to the epochs of all stages together. Learning rates are those of the stages,
    unless the config's ``optimizer`` replaces the model's. Checkpoints contain the chains and generators of every
    process: a resumed run draws the same samples, and with :class:`lightning_accel.ExactResume`, which does the same
    for the order of the data, ends with identical weights.

    Logged: ``train/energy_gap`` (mean energy of data less that of samples: it shows divergence, not progress) or
    ``train/loss``; under ``val/`` and ``test/`` ``reconstruction_error`` (mean square over visible units, up through
    the layers trained so far and down again), ``loss``, ``accuracy`` and ``log_prob``. ``loss`` is the objective of the
    run: the classifier's cross entropy, else minus the log-probability if ``likelihood`` asks for it, else the
    reconstruction error. Before the last stage it cannot be measured, and ``val/loss`` is a large, decreasing number,
    hidden from loggers, so that ``ModelCheckpoint`` and ``EarlyStopping`` choose within the last stage. Using a
    checkpoint of another stage raises a warning.

    Args:
        num_visible: values in a sample once flattened; by default the datamodule's ``num_features``.
        hidden_dims: hidden units of each RBM.
        stages: how each RBM is trained; a single one applies to all, and by default ``Stage()`` does.
        fine_tuning: how all layers are trained at last, see :class:`lightning_accel.models.FineTuning`.
        visible: kind of the lowest units, ``bernoulli`` or ``gaussian``, see :class:`lightning_accel.RBM`.
        labels: whether the top RBM models the class together with the units below: to classify without a head, or
            with one that starts with what it has learned, and to draw samples of a class.
        num_classes: by default the datamodule's attribute of that name; for ``labels`` and ``classifier``.
        class_names: names of the classes for predictions; by default the datamodule's, if it has any.
        likelihood: whether validation and test report the log-probability of a sample in nats (for a stack, a lower
            bound), by ``exact`` enumeration for small RBMs, or ``ais``. Annealing upwards alone finds a diverged model
            far too probable, so it is done in both directions; ``log_z_gap`` is their difference, with a warning if it
            exceeds one nat.
        minibatch_size: samples of an update, if a batch of the loader holds several: the updates of one
            ``training_step`` then run without autograd, which is several times faster for small RBMs. Not compatible
            with gradient clipping or accumulation.
        optimizer: creates the optimizer; called with groups of parameters.

    Raises:
        TypeError: if an option has another type.
        ValueError: if options are out of range or contradict each other; before a run starts, if sizes are neither
            given nor provided by the datamodule, or contradict it, if the strategy cannot train one RBM at a time, if
            values of the data are outside the range of the visible units, or if classes are needed and none is known.

    Source: Hinton, Osindero and Teh 2006, A Fast Learning Algorithm for Deep Belief Nets,
    https://doi.org/10.1162/neco.2006.18.7.1527

    Example:
        >>> import lightning as L
        >>> from lightning_accel.models import FineTuning, Stage
        >>> fine_tuning = FineTuning("classifier", epochs=10)
        >>> model = DeepBeliefNetwork(64, [128, 32], [Stage(epochs=5)], fine_tuning=fine_tuning, num_classes=10)
        >>> trainer = L.Trainer(max_epochs=5 + 5 + 10)
    """

    unlike_tensor_parallelism = "'ddp'"

    @renamed_arguments(
        layers="hidden_dims",
        finetune="fine_tuning.method",
        finetune_epochs="fine_tuning.epochs",
        finetune_lr="fine_tuning.lr",
    )
    def __init__(
        self,
        num_visible: int | None = None,
        hidden_dims: Sequence[int] = (256,),
        stages: Sequence[Stage] = (),
        *,
        fine_tuning: FineTuning = FineTuning(),
        visible: Visible = "bernoulli",
        labels: bool = False,
        num_classes: int | None = None,
        class_names: Sequence[str] | None = None,
        likelihood: Likelihood = "none",
        minibatch_size: int | None = None,
        optimizer: OptimizerCallable = torch.optim.SGD,
    ) -> None:
        super().__init__()
        require_integers(1, **if_set(num_visible=num_visible, num_classes=num_classes, minibatch_size=minibatch_size))
        require_flags(labels=labels)
        # NumPy numbers or a Stage would make the checkpoint unsafe to load
        num_visible = None if num_visible is None else index(num_visible)
        num_classes = None if num_classes is None else index(num_classes)
        hidden_dims = list_of_sizes("hidden_dims", hidden_dims)
        minibatch_size = None if minibatch_size is None else index(minibatch_size)
        class_names = None if class_names is None else list_of_str(class_names)
        fine_tuning = read_options(FineTuning, fine_tuning)
        stages = [Stage.from_dict(stage) if isinstance(stage, dict) else stage for stage in stages] or [Stage()]
        self.save_hyperparameters(ignore=["optimizer"])
        keep_plain_hyperparameters(self)
        self.hparams["stages"] = [vars(stage).copy() for stage in stages]
        require_options(hidden_dims, stages, fine_tuning.method, likelihood, minibatch_size)
        self.num_visible = num_visible
        self.num_classes = num_classes
        self.class_names = class_names
        self.hidden_dims = hidden_dims
        self.stages = list(stages) * len(hidden_dims) if len(stages) == 1 else list(stages)
        self.fine_tuning = fine_tuning
        self.finetune = fine_tuning.method
        self.labels = labels
        self.likelihood = likelihood
        self.minibatch_size = minibatch_size
        self.automatic_optimization = minibatch_size is None
        self.make_optimizer = optimizer
        self.visible = visible
        plan = [(f"rbm {i + 1}", stage.epochs, stage.lr, stage.lr_decay) for i, stage in enumerate(self.stages)]
        if self.finetune != "none":
            usual = 0.5 if self.finetune == "classifier" else 0.01
            lr = usual if fine_tuning.lr is None else fine_tuning.lr
            require_schedule(fine_tuning.epochs, lr, "linear")
            plan.append((self.finetune, fine_tuning.epochs, lr, "linear"))
        self.schedule = Schedule(plan)
        self.sampling = [stage.start_sampling(seed=0) for stage in self.stages]
        self._groups_are_ours = False
        self._data_checked = True
        self.stack: RBMStack | None = None
        self.head: nn.Linear | None = None
        self._stage = 0
        self._begun = -1  # the stage that started last, in this run or the resumed one
        self._saved: list[dict[str, Any]] = []  # by rank
        self._ranks = RankStates()
        if num_visible is not None and (num_classes is not None or not self._needs_classes):
            self.configure_model()

    def setup(self, stage: str) -> None:
        strategy = self.trainer.strategy
        if stage == "fit" and isinstance(strategy, DataParallelStrategy) and len(strategy.devices) > 1:
            raise ValueError(
                "DeepBeliefNetwork has one set of chains in each process, which the threads of accel_dp would share; "
                "take strategy=ddp, or one device"
            )
        if (
            stage == "fit"
            and self.minibatch_size
            and getattr(self.trainer.precision_plugin, "scaler", None) is not None
        ):
            raise ValueError(
                "minibatch_size does without the backward pass, whose gradients fp16 scales; take bf16-mixed, or leave "
                "minibatch_size out"
            )
        super().setup(stage)

    def _read_datamodule(self) -> None:
        datamodule = self.trainer.datamodule  # type: ignore[attr-defined]  # set by a connector
        offered = getattr(datamodule, "num_features", None)
        if self.num_visible is None and offered is not None:
            self.num_visible = self.hparams["num_visible"] = int(offered)
        if self._needs_classes:
            take_from_datamodule(self, num_classes=int, class_names=list_of_str)

    def _is_built(self) -> bool:
        return self.stack is not None

    def _require_sizes(self) -> None:
        if self.num_visible is None or (self._needs_classes and self.num_classes is None):
            raise ValueError(
                "DeepBeliefNetwork needs num_visible, and num_classes where it knows classes; got "
                f"num_visible={self.num_visible}, num_classes={self.num_classes}. Pass them, or train with a "
                "datamodule that has attributes num_features and num_classes, as DigitsDataModule, IdxDataModule, "
                "BarsAndStripesDataModule and TabularDataModule have"
            )
        if self._needs_classes:
            require_class_names(self.class_names, self.num_classes)

    def _build(self) -> None:
        assert self.num_visible is not None
        require_sizes_from_below([self.num_visible, *self.hidden_dims], self.stages, self.visible)
        num_labels = (self.num_classes or 0) if self.labels else 0
        untied = self.finetune == "updown"
        self.stack = make_stack(self.num_visible, self.hidden_dims, num_labels, self.stages, self.visible, untied)
        if self.finetune == "classifier":
            assert self.num_classes is not None
            self.head = nn.Linear(self.hidden_dims[-1], self.num_classes)
        num_classes = self.num_classes if self._needs_classes else None
        self.val_figures, self.test_figures = (BeliefMetrics(num_classes, self.likelihood) for _ in range(2))

    @property
    def trained_rbms(self) -> list[RBM]:
        """RBMs that the current epoch trains as such: one in its stage, all by ``updown``, none by ``classifier``."""
        stage, rbms = self.schedule.stage_at(self.current_epoch), self.built_stack.layers
        return rbms[stage : stage + 1] if stage < len(rbms) or self.finetune == "classifier" else rbms

    def repeated_blocks(self) -> list[nn.Module]:
        """Return no blocks: layers are not only called by ``forward``, so they are gathered with the whole module."""
        return []

    def pipeline_layers(self) -> list[nn.Module]:
        """Reject pipelines, since the other stages would be idle while one RBM trains.

        Raises:
            ValueError: always, with strategies to use instead.
        """
        raise ValueError(
            "DeepBeliefNetwork trains one RBM at a time, which leaves the other stages of a pipeline idle; take the "
            "strategy 'ddp' or 'accel_fsdp2'"
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Create one optimizer for all stages, without weight decay of biases."""
        assert self.stack is not None
        weights = [parameter for parameter in self.parameters() if parameter.ndim > 1]
        biases = [parameter for parameter in self.parameters() if parameter.ndim == 1 and parameter.requires_grad]
        lr = self.schedule.spans[0].lr
        self._groups_are_ours = True
        return self.make_optimizer([{"params": weights, "lr": lr}, {"params": biases, "lr": lr, "weight_decay": 0.0}])

    def on_fit_start(self) -> None:
        trainer: Any = self.trainer  # connectors set the attributes read here
        if trainer.ckpt_path is None:
            self._begun = -1
        if not self.automatic_optimization and trainer.lr_scheduler_configs:
            raise ValueError(
                "minibatch_size does without the trainer's optimization, which steps schedulers; leave the scheduler "
                "out, as stages have their own lr_decay, or leave minibatch_size out"
            )
        epochs, needed = trainer.max_epochs, self.schedule.num_epochs
        if epochs is not None and 0 <= epochs < needed and not trainer.fast_dev_run:
            last = self.schedule.spans[self.schedule.stage_at(epochs - 1)].name
            rank_zero_warn(
                f"the stages of DeepBeliefNetwork take {needed} epochs together, the trainer has {epochs}: training "
                f"ends in {last!r}. Set max_epochs={needed}, or shorten the stages"
            )
        self._restore_sampling()

    def on_train_start(self) -> None:
        self._stage = self.schedule.stage_at(self.current_epoch)
        self._restore_sampling()  # some strategies load checkpoints after on_fit_start
        self._stop_after_last_stage(self.current_epoch)
        if self.finetune == "classifier":
            self._require_known_class(self.trainer.val_dataloaders)

    def _require_known_class(self, loader: object) -> None:
        """Raise a ValueError if not one validation sample has a known class, in any process."""
        if (found := share_of_process(self, loader)) is None:
            return
        share, _ = found
        is_known = (not isinstance(one, list | tuple) or bool((classes_of(one) != UNKNOWN).any()) for one in share)
        if not self.trainer.strategy.reduce_boolean_decision(any(is_known), all=False):
            raise ValueError(
                "fine-tuning by 'classifier' needs validation samples of known class, for val/loss; all are -100, "
                "which marks unknown ones. Give the class of some, or leave validation out"
            )

    def on_train_epoch_start(self) -> None:
        self._stage = self.schedule.stage_at(self.current_epoch)
        if self._begun != self._stage:
            self._begin_stage()
            self._begun = self._stage

    def on_train_epoch_end(self) -> None:
        self._stop_after_last_stage(self.current_epoch + 1)

    def _stop_after_last_stage(self, epochs: int) -> None:
        if epochs >= self.schedule.num_epochs:
            self.trainer.should_stop = True

    def _begin_stage(self) -> None:
        span = self.schedule.spans[self._stage]
        rank_zero_info(f"{span.name}: epochs {span.first_epoch} to {span.first_epoch + span.epochs - 1}")
        trained = {id(parameter) for parameter in self._trained_module().parameters()}
        for optimizer in self.trainer.optimizers:
            for parameter in [one for one in optimizer.state if id(one) in trained]:
                del optimizer.state[parameter]
        if self.finetune == "updown":
            self.built_stack.untie_()
        if self._stage < len(self.hidden_dims):
            self._begin_rbm(self._stage)
        elif self.head is not None and self.labels:
            self._begin_head(self.head)

    def _begin_rbm(self, number: int) -> None:
        rbm = self.built_stack.layers[number]
        self.sampling[number] = self.stages[number].start_sampling(self._seed_of(number))
        with unsharded(self.trainer.strategy.model):
            start = self.built_stack.parameters_from_below(number) if self.stages[number].start_from_below else None
            found = data_statistics(self, partial(self._checked_input, number=number), self.trainer.train_dataloader)
        self._data_checked = found is not None
        if found is not None:
            if self._needs_classes and not found.num_known:
                raise ValueError(
                    "labels=True and fine-tuning by 'classifier' need training samples of known class; all "
                    f"{found.num_rows} are -100, which marks unknown ones. Give the class of some, or train without "
                    "labels and classifier"
                )
            for part in rbm.visible_units.modules():
                if not isinstance(part, GaussianVisible):
                    continue
                if fault := part.find_fault(found.extremes[:, : part.num_visible]):
                    raise ValueError(fault)  # equal extremes show a constant column
        if start is not None:
            for parameter, value in zip((rbm.weight, rbm.visible_bias, rbm.hidden_bias), start, strict=True):
                set_parameter_(parameter, value)
        elif found is not None:
            set_parameter_(rbm.visible_bias, rbm.visible_units.bias_for(found.mean, found.num_rows))

    def _begin_head(self, head: nn.Linear) -> None:
        """Give the head the weights of the label units, so that it computes their distribution given hidden units."""
        top, num_labels = self.built_stack.top, self.built_stack.num_labels
        with unsharded(self.trainer.strategy.model):
            weight, bias = top.weight[:, -num_labels:].T.clone(), top.visible_bias[-num_labels:].clone()
        set_parameter_(head.weight, weight)
        set_parameter_(head.bias, bias)

    def after_removal(self) -> None:
        """Start chains and running means anew, whose sizes are those of the units before a removal of channels."""
        self.sampling = [stage.start_sampling(self._seed_of(number)) for number, stage in enumerate(self.stages)]

    def _seed_of(self, number: int) -> int:
        return torch.initial_seed() % 2**62 + number

    def _checked_input(self, batch: Batch, number: int) -> tuple[Tensor, int]:
        """Return the input of RBM ``number`` for a batch, (B, V), and how many samples have a known class."""
        num_known = 0
        if self._needs_classes:
            classes = classes_of(batch)
            require_classes(classes, (len(first_of(batch)),), self.num_classes or 0)
            num_known = int((classes != UNKNOWN).sum())
        rows = self._join_labels(self._means_below(batch, number), batch, number)
        self.built_stack.layers[number].require_support(rows, all_rows=False)
        return rows, num_known

    def _trained_module(self) -> nn.Module:
        return self.built_stack.layers[self._stage] if self._stage < len(self.hidden_dims) else self

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        trainer: Any = self.trainer
        if not self._groups_are_ours or trainer.lr_scheduler_configs:
            return
        lr = self.schedule.spans[self._stage].lr_at(self.current_epoch + batch_idx / self.trainer.num_training_batches)
        for optimizer in self.trainer.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        if not self.automatic_optimization:
            self._log_training(self._update_in_minibatches(batch))
            return None
        loss = self._objective(batch)
        self._log_training(loss)
        return self._connect_untrained(loss)

    def _objective(self, batch: Batch) -> Tensor:
        """Return what the stage minimizes, ()."""
        stack = self.built_stack
        if self._stage < len(self.hidden_dims):
            rows = self._training_input(batch)
            return self.sampling[self._stage](stack.layers[self._stage], rows)
        if self.finetune == "updown":
            classes = classes_of(batch) if self.labels else None
            return UpDown(self.sampling[-1])(stack, flat(first_of(batch)), classes)
        x, classes = first_of(batch), classes_of(batch)
        scores = self._scores_with_dropout(x)
        loss = cross_entropy_of_known(scores, classes)
        unknown = classes == UNKNOWN
        if not (self.fine_tuning.dropout and self.fine_tuning.unlabeled and bool(unknown.any())):
            return loss
        with torch.no_grad():
            expected = self(x[unknown]).softmax(dim=1)
        span = self.schedule.spans[self._stage]
        share = min(1, 2 * (self.current_epoch - span.first_epoch) / span.epochs) if span.epochs > 1 else 1
        return loss + self.fine_tuning.unlabeled * share * F.cross_entropy(scores[unknown], expected)

    def _scores_with_dropout(self, x: Tensor) -> Tensor:
        if not self.fine_tuning.dropout:
            return self.forward(x)
        assert self.head is not None
        states = flat(x)
        for layer in range(len(self.hidden_dims)):
            states = F.dropout(self.built_stack.activation(layer, states).sigmoid(), self.fine_tuning.dropout)
        scores: Tensor = self.head(states.to(self.head.weight.dtype))
        return scores

    def _update_in_minibatches(self, batch: Batch) -> Tensor:
        """Update once per mini-batch of a batch; return the mean of what they minimized, ()."""
        optimizer: Any = self.optimizers()
        assert self.minibatch_size is not None
        if self._stage < len(self.hidden_dims):
            rbm, learn = self.built_stack.layers[self._stage], self.sampling[self._stage]
            return learn.train_(rbm, self._training_input(batch), self.minibatch_size, optimizer)
        parts = split_batch(batch, self.minibatch_size, needs_classes=self.finetune == "classifier")
        losses = list[Tensor]()
        # calls of Lightning take longer than an update
        plain = type(self.trainer.precision_plugin).optimizer_step in _PLAIN_STEPS and self.trainer.world_size == 1
        for part in parts[:-1] if plain else ():
            optimizer.optimizer.zero_grad()
            loss = self._objective(part)
            loss.backward()
            optimizer.optimizer.step()
            losses.append(loss.detach())
        for part in parts[len(losses) :]:
            optimizer.zero_grad()
            loss = self._objective(part)
            self.manual_backward(self._connect_untrained(loss))
            optimizer.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    def _training_input(self, batch: Batch) -> Tensor:
        """Return the input of the RBM of this stage for a batch, (B, V)."""
        if self._data_checked:
            return self._rbm_input(batch, self._stage)
        self._data_checked = True  # only the first batch is checked
        self._checked_input(batch, self._stage)
        return self._rbm_input(batch, self._stage)

    def _log_training(self, value: Tensor) -> None:
        if is_logging_step(self):
            figure = "energy_gap" if self._stage < len(self.hidden_dims) else "loss"
            name = self.schedule.spans[self._stage].name
            if not value.isfinite():
                raise ValueError(
                    f"{name} has diverged: its {figure} is {value.item()}. Lower its learning rate, or check the data"
                )
            self.log(f"train/{figure}", value.detach())
            # the progress bar shows only names of metrics, so the stage's name must be part of it
            self.log(f"{name}: {figure}", value.detach(), prog_bar=True, logger=False)
            self.log("train/stage", float(self._stage))

    def _connect_untrained(self, loss: Tensor) -> Tensor:
        """Give parameters that this stage does not train a zero gradient under DDP, which waits for all of them."""
        if not isinstance(self.trainer.strategy.model, DistributedDataParallel):
            return loss
        for parameter in self._untrained_parameters():
            loss = loss + 0 * parameter.flatten()[0]
        return loss

    def _untrained_parameters(self) -> list[nn.Parameter]:
        trained = set(map(id, self._trained_module().parameters())) if self._stage < len(self.hidden_dims) else set()
        return [one for one in self.parameters() if id(one) not in trained and one.requires_grad]

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._stage < len(self.hidden_dims):  # momentum and decay must not change untrained parameters
            for parameter in self._untrained_parameters():
                parameter.grad = None

    def _rbm_input(self, batch: Batch, number: int) -> Tensor:
        """Return the input of RBM ``number`` for a batch, (B, V)."""
        rows = self._means_below(batch, number)
        if number and self.stages[number].is_trained_on_samples:
            rows = draw_bernoulli(rows, self.sampling[number].generator(rows.device))
        return self._join_labels(rows, batch, number)

    @torch.no_grad()
    def _means_below(self, batch: Batch, number: int) -> Tensor:
        """Return the units that RBM ``number`` stands on, at their means given the units below them, (B, V)."""
        stack, rows = self.built_stack, flat(first_of(batch))
        if number and self.stages[number].is_trained_on_samples:
            rows = stack.sample_hidden(rows, number - 1, self.sampling[number].generator(rows.device))
            return stack.activation(number - 1, rows).sigmoid()
        return stack.transform(rows, number)

    @torch.no_grad()
    def _join_labels(self, rows: Tensor, batch: Batch, number: int) -> Tensor:
        stack = self.built_stack
        if not stack.layers[number].num_labels:
            return rows
        return stack.join_labels(rows, classes_of(batch), self.sampling[number].generator(rows.device))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        mine = {"sampling": [one.state_dict() for one in self.sampling]}
        name = self.schedule.spans[self._stage].name
        checkpoint[_KEY] = {"begun": self._begun, "name": name, "ranks": self._ranks.gather(mine, self.trainer)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if "relu" in checkpoint.get("hyper_parameters", {}).get("hidden", ()):
            raise ValueError("the checkpoint has hidden='relu' units, which this version cannot compute; train anew")
        if _KEY in checkpoint:
            self._begun = checkpoint[_KEY]["begun"]
            self._saved = checkpoint[_KEY]["ranks"]
            last, saved = self.schedule.spans[-1].name, checkpoint[_KEY]["name"]
            if saved != last and (not has_trainer(self) or self.trainer.state.fn != "fit"):
                rank_zero_warn(
                    f"the checkpoint was saved in the stage {saved!r} of DeepBeliefNetwork, whose last is {last!r}: "
                    "what is trained later has its first weights"
                )

    def _restore_sampling(self) -> None:
        if not self._saved:
            return
        world_size, rank = self.trainer.world_size, self.trainer.global_rank
        if len(self._saved) != world_size:
            rank_zero_warn(
                f"the checkpoint holds the chains of {len(self._saved)} processes, this run has {world_size}: chains "
                "are dealt anew, and processes that were not there draw from new generators"
            )
        for number, learn in enumerate(self.sampling):
            learn.seed = self._seed_of(number)  # for processes that the checkpoint does not have
            states = [saved["sampling"][number] for saved in self._saved]
            learn.load_state_dict(redistribute_states(states, world_size, rank), self.device)
        self._saved = []
