"""Compression of gradients that DDP sends. Shapes: a gradient is a matrix (N, M), approximated at rank R."""

import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# DDP rejects a hook whose bucket is annotated as anything but GradBucket, which torch does not export to type checkers.
Hook = Callable[..., torch.futures.Future[Tensor]]


def cast_hook(dtype: torch.dtype) -> Hook:
    """Return a DDP communication hook that sends gradients in ``dtype``; torch's own hook requires CUDA."""

    def hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        buffer = bucket.buffer()
        small = buffer.to(dtype).div_(dist.get_world_size())  # divide before summing, since the sum may overflow fp16
        future: torch.futures.Future[list[Tensor]] = dist.all_reduce(small, async_op=True).get_future()
        return future.then(lambda done: buffer.copy_(done.value()[0]))

    return hook


class PowerSGD:
    """Compress gradients to two low-rank factors by a DDP communication hook, :meth:`average`.

    Each step does one subspace iteration from the result of the step before, and adds the approximation error to the
    next gradient (Vogels et al. 2019, https://arxiv.org/abs/1905.13727, algorithms 1 and 2). Vectors, and matrices
    whose factors would not be half as large, are sent uncompressed. Arithmetic is float32 at least.

    torch's PowerSGD hook chains collectives in callbacks, whose order on gloo may differ between processes. This one
    waits, and stores its state by parameter, so that it survives a new order of buckets and a resumed run.

    Args:
        module: module whose parameters DDP synchronizes.
        rank: R.
        start_step: number of first steps whose gradients are sent uncompressed; early gradients are the hardest to
            approximate.
    """

    def __init__(self, module: nn.Module, rank: int, start_step: int) -> None:
        self.rank = rank
        self.start_step = start_step
        self.step = 0
        self.errors: dict[str, Tensor] = {}  # (N, M), those of this process
        self.bases: dict[str, Tensor] = {}  # (M, R), equal on all processes
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}

    def average(self, state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        """Replace the gradients of ``bucket`` by their mean over processes."""
        if self.step < self.start_step:
            _average(bucket.buffer())
        else:
            self._approximate(bucket)
        self.step += bucket.is_last()
        return _completed_future(bucket.buffer())

    def _approximate(self, bucket: Any) -> None:
        names = [self._names[id(parameter)] for parameter in bucket.parameters()]
        gradients = dict(zip(names, bucket.gradients(), strict=True))
        matrices = {name: self._add_error(name, one) for name, one in gradients.items() if self._is_compressible(one)}
        whole = [gradient for name, gradient in gradients.items() if name not in matrices]
        # one message for the first factors and the uncompressed gradients
        lefts = [matrix @ self._basis(name, matrix) for name, matrix in matrices.items()]
        _average_together([*lefts, *whole])
        lefts = [torch.linalg.qr(left).Q for left in lefts]
        rights = [matrix.T @ left for matrix, left in zip(matrices.values(), lefts, strict=True)]
        _average_together(rights)
        for (name, matrix), left, right in zip(matrices.items(), lefts, rights, strict=True):
            self.bases[name] = right
            approximation = left @ right.T
            self.errors[name] = matrix - approximation
            gradients[name].copy_(approximation.view_as(gradients[name]))

    def _is_compressible(self, gradient: Tensor) -> bool:
        rows, columns = (len(gradient), gradient[0].numel()) if gradient.ndim > 1 and len(gradient) else (1, 1)
        return 2 * self.rank * (rows + columns) < rows * columns

    def _add_error(self, name: str, gradient: Tensor) -> Tensor:
        matrix = gradient.flatten(1).to(torch.promote_types(gradient.dtype, torch.float32))
        error = self.errors.get(name)
        return matrix if error is None else matrix + error.to(matrix)

    def _basis(self, name: str, matrix: Tensor) -> Tensor:
        if name not in self.bases:  # random, but equal on all processes
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            self.bases[name] = torch.randn(matrix.shape[1], self.rank, generator=generator)
        return torch.linalg.qr(self.bases[name].to(matrix)).Q

    def state_dict(self, alone: bool = False) -> dict[str, Any]:
        """Return the state that a resumed run needs.

        The method is linear: only the mean of the errors of all processes affects the result, so that one copy is
        enough for any number of processes.

        Args:
            alone: whether other processes may not call this, so that only the errors of this one are saved.
        """
        errors = {name: error.clone() for name, error in sorted(self.errors.items())}
        for error in errors.values() if not alone else ():
            _average(error)
        return {"step": self.step, "errors": errors, "bases": dict(self.bases)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.errors, self.bases = state["step"], dict(state["errors"]), dict(state["bases"])


def _average_together(tensors: list[Tensor]) -> None:
    """Average several tensors over processes in one message."""
    if not tensors:
        return
    together = torch.cat([tensor.flatten() for tensor in tensors])
    _average(together)
    for tensor, averaged in zip(tensors, together.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(averaged.view_as(tensor))


def _average(tensor: Tensor) -> None:
    dist.all_reduce(tensor.div_(dist.get_world_size()))


def _completed_future(tensor: Tensor) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[tensor.device] if tensor.is_cuda else None)
    future.set_result(tensor)
    return future
