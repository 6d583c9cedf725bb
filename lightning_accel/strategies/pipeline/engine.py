"""Execution of micro-batches by the stages, by a schedule of ``torch.distributed.pipelining`` or one after another.

``PipelineStage`` must know the shapes of all messages beforehand. So the first batches of each shape, and those of
evaluation, run in lockstep: each message is preceded by a header that describes it. These headers become the plan for
later batches of that shape.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from lightning_accel.strategies.batch_splitting import contains_graphs, leaves
from lightning_accel.strategies.pipeline.chain import Chain
from lightning_accel.strategies.pipeline.message import flat_specs
from lightning_accel.strategies.pipeline.random import StepRandom
from lightning_accel.strategies.pipeline.stage import Header, Message, OutputIndex, StageRun

_MAX_PLANS = 4  # each holds buffers for its messages


@dataclass
class Ranks:
    """Hold the process groups of one pipeline, and the rank and device of this process in it."""

    group: dist.ProcessGroup
    objects: dist.ProcessGroup  # the same processes, for objects on the CPU
    device: torch.device

    def __post_init__(self) -> None:
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)

    def world_rank(self, stage: int) -> int:
        return dist.get_global_rank(self.group, stage)

    def gather(self, value: Any) -> list[Any]:
        """Gather ``value`` of each process, on all of them."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.objects)
        return values


@dataclass
class Job:
    """Describe the work on one batch.

    Args:
        name: name of the step; which outputs are needed later is learned once for all steps of that name.
        micro_batches: micro-batches of equal sizes.
        step: runs the module's own step on a micro-batch.
        context: returns a context, such as autocast, for each micro-batch.
        loss_scale: factor of what ``step`` returns before its backward pass; None for no backward pass.
    """

    name: str
    micro_batches: Sequence[Any]
    step: Callable[[Any], Any]
    context: Callable[[], AbstractContextManager[Any]]
    loss_scale: float | Tensor | None = None
    results: dict[int, Any] = field(default_factory=dict)  # by micro-batch, on the process of the last stage


@dataclass
class _BackwardInputs:
    """Hold what the backward pass of one micro-batch on one stage starts from."""

    received: list[Tensor]
    sent: list[Tensor]


class Pipeline:
    """Run jobs; all processes of the pipeline call the same methods with the same batches.

    Args:
        module: module that holds the layers.
        chain: the layers, split into stages, one for each rank.
        ranks: the processes.
    """

    def __init__(self, module: nn.Module, chain: Chain, ranks: Ranks) -> None:
        self.module = module
        self.chain = chain
        self.ranks = ranks
        self.stage = ranks.rank
        self.last = chain.num_stages - 1
        self.on_last = self.stage == self.last
        self.random = StepRandom(module, chain, ranks, ranks.device)
        self._needed: dict[str, set[OutputIndex]] = {}
        self._plans: dict[str, _Plan | None] = {}

    def run(self, job: Job) -> None:
        """Run all micro-batches, and their backward passes, accumulating gradients, if the job has a loss scale."""
        with self.random.batch():
            self._run(job)

    def _run(self, job: Job) -> None:
        # PipelineStage takes messages of one shape; graphs of unequal sizes need lockstep, where messages may differ
        key = "" if job.loss_scale is None or contains_graphs(job.micro_batches[0]) else _signature(job)
        plan = self._plans.get(key)
        if plan is not None:
            plan.run(job)
            return
        learning = job.name not in self._needed
        headers = self._run_in_lockstep(job)
        if key and not learning:
            if len(self._plans) == _MAX_PLANS:
                self._plans.pop(next(iter(self._plans)))
            self._plans[key] = _Plan(self, headers, len(job.micro_batches))

    def compute(self, job: Job, number: int, message: Message | None) -> tuple[Any, StageRun]:
        """Run one micro-batch on this stage; return the message to the next stage, or what the step returned."""
        self.random.begin(number)
        run = StageRun(self.chain, self.stage, self._needed.get(job.name), message, self.ranks.device)
        with job.context():
            result = run.run(lambda: job.step(job.micro_batches[number]))
        if self.on_last:
            job.results[number] = result
        return result, run

    def loss(self, job: Job, result: Any, run: StageRun) -> Tensor:
        """Return the scaled loss, (), at which the backward pass of one micro-batch starts."""
        loss = result["loss"] if isinstance(result, dict) else result
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            raise TypeError(
                f"{job.name} must return a loss that has a gradient, or a dict with one under 'loss'; got "
                f"{type(loss).__name__}. A pipeline cannot skip a batch by returning None"
            )
        assert job.loss_scale is not None
        return run.connect(loss * (job.loss_scale / len(job.micro_batches)))

    def _run_in_lockstep(self, job: Job) -> tuple[Header | None, Header | None]:
        """Run the micro-batches one after another; return the headers of the last messages received and sent."""
        kept: list[_BackwardInputs] = []
        headers: tuple[Header | None, Header | None] = None, None
        needed: set[OutputIndex] = set()
        error: Exception | None = None
        for number in range(len(job.micro_batches)):
            message = self._receive(job.loss_scale is not None) if self.stage else None
            outgoing: Message | None = None
            if error is None and (self.stage == 0 or message is not None):
                try:
                    result, run = self.compute(job, number, message)
                    needed |= run.needed_here
                    outgoing = None if self.on_last else result
                    if job.loss_scale is not None:
                        sent = outgoing.flat if outgoing else [self.loss(job, result, run)]
                        kept.append(_BackwardInputs(message.flat if message else [], sent))
                    headers = message and message.header, outgoing and outgoing.header
                except Exception as raised:
                    error = raised
            if not self.on_last:
                self._send(None if error else outgoing)
        self._share_outcome(job, error, needed)
        while kept:  # each is freed after its backward pass
            self._backward(kept.pop(0))
        return headers

    def _share_outcome(self, job: Job, error: Exception | None, needed: set[OutputIndex]) -> None:
        """Raise on all ranks what failed on any, and share which outputs later stages need."""
        if error is not None and "device meta" in str(error):
            hint = (
                "a layer of another stage was used other than by calling it, by its weight for example. Call it, or "
                f"take that parameter out of the layers of the pipeline ({error})"
            )
            raised, error = error, RuntimeError(hint)
            error.__cause__ = raised
        said = None if error is None else f"{type(error).__name__}: {error}"
        answers = self.ranks.gather((said, needed))
        if error is not None:
            raise error
        for rank, (said, _) in enumerate(answers):
            if said is not None:
                raise RuntimeError(f"{job.name} failed on rank {rank} of the pipeline: {said}")
        self._needed.setdefault(job.name, set()).update(*[needed for _, needed in answers])

    def _send(self, message: Message | None) -> None:
        peer = self.ranks.world_rank(self.stage + 1)
        dist.send_object_list([message and message.header], dst=peer, group=self.ranks.objects)
        for one in message.flat if message else []:
            dist.send(one.detach(), dst=peer, group=self.ranks.group)

    def _receive(self, backward: bool) -> Message | None:
        peer = self.ranks.world_rank(self.stage - 1)
        headers: list[Header | None] = [None]
        dist.recv_object_list(headers, src=peer, group=self.ranks.objects)
        if (header := headers[0]) is None:
            return None
        flat = [torch.empty(one.length, dtype=one.dtype, device=self.ranks.device) for one in flat_specs(header.parts)]
        for one in flat:
            dist.recv(one, src=peer, group=self.ranks.group)
        return Message(header, [one.requires_grad_(backward) for one in flat])

    def _backward(self, kept: _BackwardInputs) -> None:
        grads: list[Tensor | None] = [None]
        if not self.on_last:
            grads = [self._receive_gradient(one) for one in kept.sent]
        pairs = [(one, grad) for one, grad in zip(kept.sent, grads, strict=True) if one.requires_grad]
        if pairs:
            torch.autograd.backward([one for one, _ in pairs], [grad for _, grad in pairs])
        for one in kept.received:
            assert one.grad is not None  # connected to what was sent
            dist.send(one.grad, dst=self.ranks.world_rank(self.stage - 1), group=self.ranks.group)

    def _receive_gradient(self, like: Tensor) -> Tensor:
        received = torch.empty_like(like)
        dist.recv(received, src=self.ranks.world_rank(self.stage + 1), group=self.ranks.group)
        return received


class _Plan:
    """Run the schedule for batches of one shape."""

    def __init__(
        self, pipeline: Pipeline, headers: tuple[Header | None, Header | None], num_micro_batches: int
    ) -> None:
        self.pipeline = pipeline
        self.num = num_micro_batches
        self.module = _StageModule(pipeline, *headers)
        device, num_stages = pipeline.ranks.device, pipeline.chain.num_stages
        stage = PipelineStage(
            self.module,
            pipeline.stage,
            num_stages,
            device,
            input_args=self._examples(self.module.header_in),
            output_args=self._examples(self.module.header_out)
            if self.module.header_out
            else torch.zeros((), device=device, requires_grad=True),
            group=pipeline.ranks.group,
        )
        kind: Any = Schedule1F1B if num_micro_batches >= num_stages else ScheduleGPipe
        self.schedule = kind(stage, num_micro_batches, loss_fn=lambda loss, _: loss, scale_grads=False)

    def _examples(self, header: Header | None) -> tuple[Tensor, ...]:
        made = flat_specs(header.parts) if header else []
        device = self.pipeline.ranks.device
        return tuple(torch.empty(one.length, dtype=one.dtype, device=device, requires_grad=True) for one in made)

    def run(self, job: Job) -> None:
        self.module.job = job
        numbers = torch.arange(self.num)  # on the CPU, where reading them does not wait for a device
        target = {"target": numbers} if self.pipeline.on_last else {}
        self.schedule.step(number=numbers, return_outputs=False, **target)
        self.module.job = None


class _StageModule(nn.Module):
    """Serve as the module of a ``PipelineStage``, without parameters: those of the layers stay where they are."""

    def __init__(self, pipeline: Pipeline, header_in: Header | None, header_out: Header | None) -> None:
        super().__init__()
        self.pipeline = pipeline
        self.header_in = header_in
        self.header_out = header_out
        self.job: Job | None = None

    def forward(self, *flat: Tensor, number: Tensor) -> Any:
        assert self.job is not None
        message = None if self.header_in is None else Message(self.header_in, list(flat))
        result, run = self.pipeline.compute(self.job, int(number), message)
        if self.header_out is None:
            return self.pipeline.loss(self.job, result, run)
        if result.header != self.header_out:
            raise RuntimeError(
                f"what travels from stage {self.pipeline.stage} to the next has changed, but not the shapes of the "
                f"batch.\nBefore: {self.header_out}\nNow: {result.header}\nA pipeline needs layers whose outputs have "
                "shapes and constants that follow from those of the batch"
            )
        return tuple(result.flat)


def _signature(job: Job) -> str:
    """Return a key that is equal for batches of equal shapes."""
    batch = job.micro_batches[0]
    shapes = [(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves(batch)]
    return repr((job.name, len(job.micro_batches), shapes))
