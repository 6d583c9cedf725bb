"""Pipeline parallelism: each process holds some of the layers, and micro-batches pass through all of them."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_accel._private.lightning import layer_sync_of, starts_scripts, timeout_of
from lightning_accel._private.torch import multiply_
from lightning_accel.ops.bounds import if_set, require_integers
from lightning_accel.strategies.batch_samplers import distribute_sampler
from lightning_accel.strategies.batch_splitting import count_samples, split_batch
from lightning_accel.strategies.gradients import (
    PrecomputedGradients,
    average_,
    broadcast_overflow_,
    clip_grad_norm_,
    sum_shared_,
)
from lightning_accel.strategies.launched import LaunchedStrategy
from lightning_accel.strategies.pipeline.chain import (
    Chain,
    find_layers,
    measure_costs,
    move_,
    move_to_meta_,
    num_parameters,
    stage_sizes,
)
from lightning_accel.strategies.pipeline.engine import Job, Pipeline, Ranks
from lightning_accel.strategies.pipeline.logging import StepLog
from lightning_accel.strategies.pipeline.stage import to_cpu
from lightning_accel.strategies.sharding.blocks import broadcast_state
from lightning_accel.strategies.sync_batchnorm import (
    SyncBatchNormPlugin,
    convert_sync_batchnorm_,
    revert_sync_batchnorm_,
)


class _FullState:
    """Gather on rank 0 what the stages hold, in the names and the order of the full module.

    Args:
        module: holds the parameters of its own stages, and all others on the meta device.
        pipeline: the stages.
    """

    def __init__(self, module: nn.Module, pipeline: Pipeline) -> None:
        self.module = module
        self.pipeline = pipeline

    def module_state(self) -> dict[str, Any]:
        """Return the module's state dict; empty on ranks other than the first of the pipeline.

        What no layer of the chain holds, such as a counter, comes from the last stage, which alone runs the full step.
        """
        state = self.module.state_dict()
        owner = self._owner_ranks()
        last, rank = self.pipeline.last, self.pipeline.ranks.rank
        own = {name: to_cpu(value) for name, value in state.items() if owner.get(name, last) == rank}
        parts = self._gather(own)
        if not parts:
            return {}
        state.update({name: parts[owner.get(name, last)][name] for name in state})
        return state

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's state dict; empty on ranks other than the first of the pipeline."""
        state = optimizer.state_dict()
        own = {
            number: to_cpu(state["state"][number]) for number in _held_numbers(optimizer) if number in state["state"]
        }
        parts = self._gather(own)
        if not parts:
            return {}
        merged = {number: value for part in reversed(parts) for number, value in part.items()}
        return {**state, "state": dict(sorted(merged.items()))}

    def load_module(self, state: Mapping[str, Any], strict: bool) -> None:
        """Load the entries of a full state dict that this process holds."""
        elsewhere = {name for name, value in self.module.state_dict().items() if value.is_meta}
        self.module.load_state_dict(
            {name: value.to("meta") if name in elsewhere else value for name, value in state.items()}, strict=strict
        )

    def load_optimizer(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Load the state of the parameters that this process holds from a full optimizer state dict."""
        held = set(_held_numbers(optimizer))
        own = {number: value for number, value in state["state"].items() if number in held}
        optimizer.load_state_dict({**state, "state": own})

    def _owner_ranks(self) -> dict[str, int]:
        """Return the pipeline rank that holds each entry of the state dict, for entries that belong to a layer."""
        chain = self.pipeline.chain
        stage_of = {id(layer): stage for layer, stage in zip(chain.layers, chain.stage_of, strict=True)}
        owner: dict[str, int] = {}
        for prefix, module in self.module.named_modules(remove_duplicate=False):
            if (stage := stage_of.get(id(module))) is not None:
                names = module.state_dict(prefix=f"{prefix}.", keep_vars=True)
                owner |= dict.fromkeys(names, stage)
        return owner

    def _gather(self, value: Any) -> list[Any]:
        ranks = self.pipeline.ranks
        parts: list[Any] | None = [None] * ranks.size if ranks.rank == 0 else None
        dist.gather_object(value, parts, dst=ranks.world_rank(0), group=ranks.objects)
        return parts or []


def _held_numbers(optimizer: Optimizer) -> list[int]:
    """Return the numbers of the parameters that are not on the meta device, as in the optimizer's state dict."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [number for number, parameter in enumerate(parameters) if not parameter.is_meta]


class PipelineStrategy(LaunchedStrategy):
    """Train a module whose layers lie on several devices, with ``forward`` and the steps written for one device.

    The module declares which of its submodules ``forward`` calls one after another by a method
    ``pipeline_layers(self)`` that returns them in order, such as ``[self.embedding, *self.blocks, self.norm,
    self.head]``. Without it, the items of the one ``nn.Sequential`` or ``nn.ModuleList`` that holds most of the
    parameters are used. Each process runs the module's own step on every micro-batch: its own layers compute, those of
    earlier stages return what they computed there, and the first call of a layer of a later stage ends the step. Code
    between the layers may do anything except change outputs of layers in place; it runs on several stages. Parameters
    outside the layers, and those that layers of several stages share, such as tied embeddings, are held by all stages;
    their gradients are summed.

    A loss that is a mean over samples equals that of the whole batch, and so do its gradients, clipped or not. Values
    logged in a step are averaged over micro-batches (or reduced by their ``reduce_fx``) and known to all processes;
    metrics are those of the last stage. ``validate``, ``test`` and ``predict`` run each batch in one piece, and all
    processes get the results. Checkpoints are the same as those of one process, for saving and loading.

    Random numbers that a step draws, such as noise, masks, mixing rates or time steps, are equal on all stages of a
    pipeline and differ between micro-batches: from the global generators of torch, NumPy and Python, and from
    generators that are attributes of the module or of a submodule outside the layers, also in lists, tuples, dicts and
    helper objects there. Generators in closures, sets and ``__slots__`` are not found: make them attributes. A layer
    draws numbers of its own, whichever stage it is on. Both follow from the state of the global generators where
    training begins, which the first stage sends to the others; not from the seeds of the module's own generators.
    GPUs must be of one kind to draw equal numbers.

    Differences from one process: a micro-batch draws other numbers than its samples would in the whole batch; BatchNorm
    uses the statistics of micro-batches (over all pipelines with
    :class:`lightning_accel.strategies.SyncBatchNormPlugin`); and attributes that count steps count micro-batches, those
    of the last stage in the checkpoint. Earlier stages do not run what a step does after their layers.

    Args:
        num_micro_batches: number of micro-batches into which each batch is split along the first dimension of its
            tensors; the next smaller divisor if the number of samples is not a multiple of it. By default twice the
            number of stages of a pipeline. They run by the schedule 1F1B, or GPipe if they are fewer than the stages.
        split: number of layers of each stage, in order; by default such that the most expensive stage costs as little
            as possible, by the time of the layers in a forward pass of the module's ``example_input_array``, or, if it
            has none, by their parameters.
        data_parallel_size: number of pipelines that train on different batches; gradients are averaged once a step.
        timeout: time limit of each collective, a ``datetime.timedelta``.
        start_method: how Lightning starts processes: ``popen``, or ``spawn`` and ``fork`` (notebooks).

    Raises:
        ValueError: if a number does not fit the others.
        TypeError: before a run, if the module has no chain of layers.

    Source: Huang et al. 2019, GPipe, https://arxiv.org/abs/1811.06965; 1F1B: Narayanan et al. 2021, Memory-Efficient
    Pipeline-Parallel DNN Training, https://arxiv.org/abs/2006.09503.

    Example:
        >>> import lightning as L
        >>> from lightning_accel import PipelineStrategy
        >>> trainer = L.Trainer(accelerator="cpu", devices=2, strategy=PipelineStrategy(num_micro_batches=8))
    """

    def __init__(
        self,
        num_micro_batches: int | None = None,
        *,
        split: Sequence[int] | None = None,
        data_parallel_size: int = 1,
        timeout: timedelta = timedelta(minutes=30),
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
    ) -> None:
        super().__init__(timeout=timeout, start_method=start_method)
        require_integers(1, data_parallel_size=data_parallel_size, **if_set(num_micro_batches=num_micro_batches))
        self.num_micro_batches = num_micro_batches
        self.split = split
        self.data_parallel_size = data_parallel_size
        self.device_mesh: DeviceMesh | None = None
        self._pipeline: Pipeline | None = None
        self._metrics: dict[str, Metric] = {}
        self._metric_groups: list[Metric] = []
        self._shared: list[nn.Parameter] = []
        self._owned: list[nn.Parameter] = []
        self._accumulating = False
        self._has_failed = False

    # ---- processes

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Return sampler arguments that give all stages of a pipeline the same batches."""
        assert self.device_mesh is not None
        mesh = self.device_mesh["data_parallel"]
        return {"num_replicas": mesh.size(), "rank": mesh.get_local_rank()}

    def process_dataloader(self, dataloader: object) -> object:
        return distribute_sampler(super().process_dataloader(dataloader), **self.distributed_sampler_kwargs)

    def setup_environment(self) -> None:
        super().setup_environment()
        replicas, stages = self.data_parallel_size, self.world_size // self.data_parallel_size
        if stages < 2 or replicas * stages != self.world_size:
            raise ValueError(
                f"accel_pipeline has {self.world_size} processes for data_parallel_size={replicas} pipelines of two "
                "processes or more each. Raise devices or num_nodes, or change data_parallel_size"
            )
        names = ("data_parallel", "pipeline")
        self.device_mesh = init_device_mesh(self.root_device.type, (replicas, stages), mesh_dim_names=names)
        self.num_micro_batches = self.num_micro_batches or 2 * stages

    def _ranks(self) -> Ranks:
        assert self.device_mesh is not None
        group = objects = self.device_mesh.get_group("pipeline")
        if dist.get_backend(group) != "gloo":  # objects use a group on the CPU, so that no device waits
            for members in self.device_mesh.mesh.tolist():
                made = dist.new_group(members, backend="gloo", timeout=timeout_of(self))
                objects = made if dist.get_rank() in members else objects
        return Ranks(group, objects, self.root_device)

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduce over pipelines, unless a group is given, since all stages of a pipeline hold equal numbers."""
        if not isinstance(tensor, Tensor):
            return tensor
        assert self.device_mesh is not None
        return super().reduce(tensor, group or self.device_mesh.get_group("data_parallel"), reduce_op=reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        count = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(count)
        return int(count) == self.world_size if all else bool(count)

    # ---- the module

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Create tensors on the CPU, since a device need not hold the whole module."""
        with self.precision_plugin.tensor_init_context():
            yield

    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        self._has_failed = False
        self._require_supported(self.lightning_module)
        self.model = self.precision_plugin.convert_module(self.lightning_module)
        if self._pipeline is None or self._pipeline.module is not self.lightning_module:
            self._split(self.lightning_module)
        if layer_sync_of(self) is not None and self.data_parallel_size > 1 and self.device_mesh is not None:
            convert_sync_batchnorm_(self.lightning_module, self.device_mesh.get_group("data_parallel"))
        move_(self.lightning_module, self.root_device)
        self.precision_plugin.clip_grad_by_norm = self._clip_by_norm  # type: ignore[method-assign]
        if trainer.state.fn == TrainerFn.FITTING:
            self.optimizers, self.lr_scheduler_configs = [], []
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        self.pipeline.random.align()  # loaders and hooks, which run on all stages, must draw equal numbers

    def _require_supported(self, module: pl.LightningModule) -> None:
        """Reject modules and plug-ins that would fail during training."""
        if not module.automatic_optimization:
            raise ValueError(
                f"{type(module).__name__} has automatic_optimization=False, but a pipeline runs forward and backward "
                "passes of micro-batches by its schedule. Use automatic optimization, or another strategy"
            )
        sync = layer_sync_of(self)
        if sync is not None and not isinstance(sync, SyncBatchNormPlugin):
            raise ValueError(
                "accel_pipeline takes SyncBatchNormPlugin alone of the LayerSync plug-ins, which joins a micro-batch "
                f"with those of the other pipelines; got {type(sync).__name__}. Give that, or leave it out"
            )

    def _split(self, module: pl.LightningModule) -> None:
        """Keep the layers of this process, and parameters outside the layers; free the rest."""
        ranks = self._ranks()
        num_stages = ranks.size
        layers = find_layers(module, num_stages)
        sizes = list(self.split or stage_sizes(self._costs(module, layers), num_stages))
        if len(sizes) != num_stages or sum(sizes) != len(layers) or min(sizes) < 1:
            raise ValueError(
                f"split must give {num_stages} stages one layer or more each, {len(layers)} in all; got {sizes}"
            )
        chain = Chain(layers, sizes)
        held = [
            {parameter for layer in chain.layers_of(stage) for parameter in layer.parameters()}
            for stage in range(num_stages)
        ]
        whole = list(module.parameters())
        if any(parameter.is_meta for parameter in whole):
            raise ValueError(
                f"{type(module).__name__} has parameters on the meta device, such as one that another Trainer split. "
                "Make it anew, and load its checkpoint"
            )
        shared = {parameter for parameter in whole if sum(parameter in one for one in held) != 1}
        broadcast_state(module, self.root_device)
        move_to_meta_(module, set(whole) - held[ranks.rank] - shared)
        self._shared = [parameter for parameter in whole if parameter in shared]
        self._owned = [parameter for parameter in whole if parameter in held[ranks.rank] - shared]
        self._pipeline = Pipeline(module, chain, ranks)

    def _costs(self, module: pl.LightningModule, layers: Sequence[nn.Module]) -> list[float]:
        if module.example_input_array is None:
            return [float(num_parameters(layer)) for layer in layers]
        costs = measure_costs(module, layers) if self.is_global_zero else []
        return self.broadcast(costs)  # measurements differ between processes, but all must split alike

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self._has_failed = True  # others may have ended or wait elsewhere, so do not wait for any of them

    def teardown(self) -> None:
        assert self.lightning_module is not None
        assert self.accelerator is not None
        assert self.cluster_environment is not None
        for metric in self._metric_groups:
            metric.process_group = None
        self._metric_groups = []
        self.precision_plugin.__dict__.pop("clip_grad_by_norm", None)
        revert_sync_batchnorm_(self.lightning_module)
        if not starts_scripts(self) and not self._has_failed:
            self._return_full_weights(self.lightning_module)
        move_(self.lightning_module, torch.device("cpu"))
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    def _return_full_weights(self, module: pl.LightningModule) -> None:
        """Return full weights from ``module.state_dict``, for the parent process that started this one."""
        whole: Any = self._full_state().module_state()
        module.state_dict = lambda *_, **__: whole  # type: ignore[method-assign]

    # ---- steps

    def _find_metrics(self) -> None:
        """Find the metrics of the module, and synchronize them over pipelines alone, since stages hold equal states."""
        assert self.lightning_module is not None
        assert self.device_mesh is not None
        inside = {id(inner) for layer in self.pipeline.chain.layers for inner in layer.modules()}
        modules = self.lightning_module.named_modules()
        self._metrics = {name: one for name, one in modules if isinstance(one, Metric) and id(one) not in inside}
        for metric in self._metrics.values():
            if metric.process_group is None:
                metric.process_group = self.device_mesh.get_group("data_parallel")
                self._metric_groups.append(metric)

    on_train_start = on_validation_start = on_test_start = on_predict_start = _find_metrics

    @property
    def pipeline(self) -> Pipeline:
        """Return the pipeline, once ``setup`` has run."""
        assert self._pipeline is not None
        return self._pipeline

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run forward and backward passes of all micro-batches; running the loss backward adds the gradients."""
        module = self.lightning_module
        assert module is not None
        parameters = [one for one in module.parameters() if one.requires_grad and not one.is_meta]
        before = [one.grad for one in parameters]
        module.zero_grad(set_to_none=True)
        scale = self._loss_scale()
        log = StepLog(module, self._metrics, self.pipeline)
        job = Job(
            "training_step",
            self._micro_batches(batch),
            lambda part: module.training_step(part, *args, **kwargs),
            partial(self._context, log, self.precision_plugin.train_step_context),
            scale,
        )
        self.pipeline.run(job)
        grads = [one.grad for one in parameters]
        for parameter, grad in zip(parameters, before, strict=True):
            parameter.grad = grad
        loss = self._mean_loss(job)
        _, (loss,) = log.share(None, [loss])
        start = torch.zeros((), device=self.root_device, requires_grad=True)
        return PrecomputedGradients.apply(start, loss, partial(self._add_gradients, parameters, grads, scale))

    def _mean_loss(self, job: Job) -> Tensor:
        if not self.pipeline.on_last:
            return torch.zeros((), device=self.root_device)
        losses = [job.results[number] for number in range(len(job.micro_batches))]
        return torch.stack([one["loss"] if isinstance(one, dict) else one for one in losses]).detach().mean()

    def _loss_scale(self) -> float | Tensor:
        """Return the factor by which Lightning multiplies the loss before it is run backward."""
        assert self.lightning_module is not None
        scale = 1 / self.lightning_module.trainer.accumulate_grad_batches
        scaler = self._scaler()
        return scale if scaler is None else scaler.scale(torch.full((), scale, device=self.root_device))

    def _scaler(self) -> Any:
        return self.precision_plugin.scaler if isinstance(self.precision_plugin, MixedPrecision) else None

    def _add_gradients(
        self, parameters: list[nn.Parameter], grads: list[Tensor | None], scale: float | Tensor, factor: Tensor
    ) -> None:
        """Add the gradients of a batch whose loss was multiplied by ``factor`` before it was run backward."""
        again = factor / scale
        made = [grad for grad in grads if grad is not None]
        if made and (again.device.type != "cpu" or again != 1):  # reading it from another device would wait
            multiply_(made, again)
        for parameter, grad in zip(parameters, grads, strict=True):
            if grad is not None:
                parameter.grad = grad if parameter.grad is None else parameter.grad + grad
        if not self._accumulating:
            self._reduce_gradients(parameters)

    def _reduce_gradients(self, parameters: list[nn.Parameter]) -> None:
        assert self.device_mesh is not None
        shared = [parameter for parameter in self._shared if parameter.requires_grad]
        if shared:
            sum_shared_(shared, self.pipeline.ranks)
        if self.data_parallel_size > 1:
            average_(parameters, self.device_mesh.get_group("data_parallel"), self.data_parallel_size)
        if self._scaler() is not None:
            broadcast_overflow_(parameters, self.root_device, self.pipeline.ranks.group)

    def _clip_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        parameters = [one for one in self.precision_plugin.main_params(optimizer) if not one.is_meta]
        counted = {*self._owned, *(self._shared if self.pipeline.ranks.rank == 0 else [])}
        clip_grad_norm_(parameters, clip_val, counted, self.pipeline.ranks.group)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("validation_step", self.precision_plugin.val_step_context, args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("test_step", self.precision_plugin.test_step_context, args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("predict_step", self.precision_plugin.predict_step_context, args, kwargs)

    def _evaluate(self, name: str, context: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a step on a whole batch; return its result on every process."""
        module = self.lightning_module
        assert module is not None
        log = StepLog(module, self._metrics, self.pipeline)
        batch, *others = args or (kwargs.pop("batch"),)
        step = getattr(module, name)
        job = Job(name, [batch], lambda part: step(part, *others, **kwargs), partial(self._context, log, context))
        # no inference tensors: they have no version counter, by which in-place changes between the layers are detected
        with torch.inference_mode(False), torch.no_grad():
            self.pipeline.run(job)
            result, _ = log.share(job.results.get(0), [])
        return result

    @contextmanager
    def _context(self, log: StepLog, precision: Callable[[], Any]) -> Generator[None, None, None]:
        with precision(), log.recording():
            yield

    def _micro_batches(self, batch: Any) -> list[Any]:
        assert self.num_micro_batches is not None
        if self.num_micro_batches == 1:
            return [batch]
        instead = "set num_micro_batches=1"
        rows = count_samples(batch, instead)
        num = max(one for one in range(1, self.num_micro_batches + 1) if rows % one == 0)
        return [part.batch for part in split_batch(batch, num, instead)]

    # ---- checkpoints

    def _full_state(self) -> _FullState:
        assert self.lightning_module is not None
        return _FullState(self.lightning_module, self.pipeline)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the full state dict on the first process of each pipeline, and an empty one on the others."""
        return self._full_state().module_state()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the full optimizer state on the first process of each pipeline, and an empty dict on the others."""
        return self._full_state().optimizer_state(getattr(optimizer, "optimizer", optimizer))

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._pipeline is None or self._pipeline.module is not self.lightning_module:  # not yet split by setup
            super().load_model_state_dict(checkpoint, strict)
        else:
            self._full_state().load_module(checkpoint["state_dict"], strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            self._full_state().load_optimizer(optimizer, state)
