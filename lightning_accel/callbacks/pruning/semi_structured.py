"""Training with 2:4 sparse weights, whose products tensor cores compute in half the multiplications."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.sparse import SparseSemiStructuredTensorCUSPARSELT, SparseSemiStructuredTensorCUTLASS
from torch.utils.hooks import RemovableHandle

from lightning_accel.callbacks.ddp_settings import require_whole_parameters
from lightning_accel.callbacks.deployment.quantization import Quantization
from lightning_accel.callbacks.pruning.callback import Pruning
from lightning_accel.callbacks.trainer_callbacks import callbacks_of
from lightning_accel.compress.calls import first_line
from lightning_accel.ops.names import find_linear_layers, list_of_names

_CAPABILITY = (8, 0)  # Ampere is the first with sparse tensor cores
_MULTIPLE = 128  # torch packs weights for cuSPARSELt in tiles of this many rows and columns
_DTYPES = {
    "bf16-mixed": torch.bfloat16,
    "bf16-true": torch.bfloat16,
    "16-mixed": torch.float16,
    "16-true": torch.float16,
}
_NEEDS = "SemiStructuredSparsity needs"


class SemiStructuredSparsity(L.Callback):
    """Train the ``nn.Linear`` layers of any module with 2:4 sparse weights, in products that leave the zeros out.

    Each forward pass keeps the largest weights of every tile of 4 x 4, at most two in each of its rows and columns, so
    that both passes multiply sparse matrices. Gradients reach all weights, as if none were dropped, so that those that
    grow come back. It needs a GPU of compute capability 8, whose kernels are tried on a small weight first, and a
    precision of 16 bits; layers with sizes that are multiples of 128 take part, unless they are frozen or share their
    weight with another one. Wide layers in large batches gain: by the kernels' authors 1.25 times in the perceptrons of
    a ViT-L on an A100 (https://github.com/pytorch/ao/tree/main/torchao/sparsity/training).

    Weights in state dicts, and so in checkpoints, are the sparse ones that the forward pass uses. Dropped values are in
    the state of the callback, and a run that is resumed goes on with them. At the end of the fit the layers are plain
    ``nn.Linear`` again, with sparse weights.

    :class:`Pruning` with ``structure="2:4"`` chooses zeros once, along inputs alone, on any device and without being
    faster.

    Args:
        exclude: layers to exclude, or modules around them: names or patterns of them (``"head"``, ``"blocks.*.out"``),
            or classes by name. By default those named head, lm_head, gate or router.

    Raises:
        ValueError: before training, if the device has no kernels for it or they fail on a small weight, the precision
            is not one of 16 bits, no layer takes part, an entry of ``exclude`` matches nothing, or another callback
            changes or averages the weights.
        TypeError: before training, under strategies other than a single device and DDP.

    Example:
        >>> import lightning as L
        >>> from lightning_accel.callbacks import SemiStructuredSparsity
        >>> trainer = L.Trainer(precision="bf16-mixed", callbacks=[SemiStructuredSparsity(exclude="head")])
    """

    def __init__(self, exclude: Sequence[str | type[nn.Module]] | None = None) -> None:
        self.exclude = None if exclude is None else list_of_names(exclude, "exclude")
        self._chosen: dict[str, nn.Linear] = {}
        self._layers: dict[str, SemiSparseLinear] = {}  # while they train
        self._hooks: list[RemovableHandle] = []
        self._dropped: dict[str, Tensor] = {}  # of layers that do not train now

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit" and trainer.global_step == 0:
            self._dropped = {}

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if reason := why_not_semi_structured(trainer.strategy.root_device):
            raise ValueError(f"{reason}. Take the callback out, or use Pruning(structure='2:4'), which any device has")
        require_whole_parameters(trainer, "SemiStructuredSparsity", "take the callback out, or use DDP")
        if trainer.precision not in _DTYPES:
            raise ValueError(
                f"{_NEEDS} a precision of 16 bits, {' or '.join(_DTYPES)}, in which sparse products are computed; got "
                f"precision={trainer.precision!r}"
            )
        for kind in (Pruning, Quantization, StochasticWeightAveraging, WeightAveraging):
            if any(not isinstance(one, Quantization) or one.mode == "qat" for one in callbacks_of(trainer, kind)):
                raise ValueError(
                    f"SemiStructuredSparsity and {kind.__name__} would each change the same weights: take one of the "
                    "two out"
                )
        self._chosen = dict(find_sparsifiable(pl_module, self.exclude))
        if not self._chosen:
            raise ValueError(
                f"SemiStructuredSparsity found {_no_layer(self.exclude)}, so it would have no effect; take it out"
            )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # here, since other callbacks try copies of the module on the CPU before
        self._layers = {
            name: make_semi_sparse(layer, _DTYPES[str(trainer.precision)]) for name, layer in self._chosen.items()
        }
        with torch.no_grad():
            for name, layer in self._layers.items():
                if name in self._dropped:
                    layer.weight.copy_(layer.weight.where(layer.weight != 0, self._dropped[name].to(layer.weight)))
        self._dropped = {}
        self._hooks = [layer.register_state_dict_post_hook(_save_kept) for layer in self._layers.values()]
        rank_zero_info(f"SemiStructuredSparsity: {len(self._layers)} linear layers have 2:4 sparse weights")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._make_dense()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._make_dense()

    def _make_dense(self) -> None:
        for name, layer in self._layers.items():
            self._dropped[name] = layer.dropped_weight().cpu()  # for checkpoints that are saved from here on
            make_dense(layer)
        for hook in self._hooks:
            hook.remove()
        self._layers, self._hooks = {}, []

    def state_dict(self) -> dict[str, Any]:
        if self._layers:
            return {"dropped": {name: layer.dropped_weight() for name, layer in self._layers.items()}}
        return {"dropped": self._dropped}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._dropped = dict(state_dict["dropped"])


class SemiSparseLinear(nn.Linear):
    """Multiply by the part of a weight that is kept; :func:`make_semi_sparse` makes one of a linear layer.

    Attributes:
        compute_dtype: dtype of the product, float16 or bfloat16.
    """

    compute_dtype: torch.dtype

    def forward(self, input: Tensor) -> Tensor:
        weight = sparsify(self.weight.to(self.compute_dtype))
        bias = None if self.bias is None else self.bias.to(self.compute_dtype)
        return F.linear(input.to(self.compute_dtype), weight, bias)

    def kept_weight(self) -> Tensor:
        """Return the weight with zeros in place of dropped values, (out_features, in_features)."""
        return self.weight.detach().where(self._is_kept(), 0)

    def dropped_weight(self) -> Tensor:
        """Return the weight with zeros in place of kept values, (out_features, in_features)."""
        return self.weight.detach().where(~self._is_kept(), 0)

    def _is_kept(self) -> Tensor:
        with torch.no_grad():
            return sparsify(self.weight.to(self.compute_dtype)).to_dense() != 0


def sparsify(weight: Tensor, kernels: str | None = None) -> Tensor:
    """Return the 2:4 sparse tensor of a weight on a GPU, with straight-through gradients.

    Args:
        weight: (M, N), float16 or bfloat16; M and N are multiples of 128.
        kernels: a name of :data:`KERNELS`, by default of the first that work on the device.
    """
    chosen = kernels or find_kernels(weight.device)[0]
    sparse: Tensor = _Sparsify.apply(weight, KERNELS[chosen].prune_dense_static_sort)
    return sparse


class _Sparsify(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, convert: Callable[[Tensor], Tensor]) -> Tensor:
        return convert(weight)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return grad_outputs[0], None


# The layout that the first writes for cuSPARSELt is not documented: on an H100 its products are wrong, as was reported
# before (https://github.com/pytorch/ao/issues/1617), and the second serves 8.x alone. What is right there, to compress
# the pruned weight by cuSPARSELt for each pass, takes 1.5 times as long as dense training of a layer 4096 to 16384.
KERNELS: dict[str, Any] = {
    "cuSPARSELt": SparseSemiStructuredTensorCUSPARSELT,
    "CUTLASS": SparseSemiStructuredTensorCUTLASS,
}


@lru_cache
def find_kernels(device: torch.device) -> tuple[str, str]:
    """Return the name of the kernels that work on a device, or why each fails."""
    failures = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The PyTorch API of SparseSemiStructuredTensor")  # shown once, here
        for name in KERNELS:
            failures[name] = failure_of_kernels(device, name)
            if not failures[name]:
                return name, ""
    return "", "; ".join(f"those of {name} {failure}" for name, failure in failures.items())


def make_semi_sparse(layer: nn.Linear, dtype: torch.dtype) -> SemiSparseLinear:
    """Make a linear layer sparse in place, with its parameters as they are."""
    layer.__class__ = SemiSparseLinear
    assert isinstance(layer, SemiSparseLinear)
    layer.compute_dtype = dtype
    return layer


def make_dense(layer: SemiSparseLinear) -> None:
    """Make a sparse layer an ``nn.Linear`` in place, with zeros in place of dropped values."""
    with torch.no_grad():
        layer.weight.copy_(layer.kept_weight())
    del layer.compute_dtype
    layer.__class__ = nn.Linear  # type: ignore[assignment]


def _save_kept(layer: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    assert isinstance(layer, SemiSparseLinear)
    name = f"{prefix}weight"
    if not state_dict[name].requires_grad:  # with keep_vars, the parameter itself is asked for
        state_dict[name] = layer.kept_weight()


def find_sparsifiable(
    module: nn.Module, exclude: Sequence[str | type[nn.Module]] | None = None
) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the linear layers that can train with 2:4 sparse weights, by name; see :class:`SemiStructuredSparsity`."""
    owners = [id(weight) for _, weight in module.named_parameters(remove_duplicate=False)]
    for name, layer in find_linear_layers(module, _MULTIPLE, exclude).items():
        if layer.weight.requires_grad and owners.count(id(layer.weight)) == 1:
            yield name, layer


def why_not_semi_structured(device: torch.device) -> str:
    """Return why a device does not train with 2:4 sparse weights, or nothing if it does."""
    if device.type != "cuda":
        found = f"a {device.type} device, for which there are no kernels"
    elif (capability := torch.cuda.get_device_capability(device)) < _CAPABILITY:
        found = f"{torch.cuda.get_device_name(device)}, which has {capability[0]}.{capability[1]}"
    else:
        _, failure = find_kernels(device)
        return failure and f"{_NEEDS} kernels that work on {torch.cuda.get_device_name(device)}; {failure}"
    return f"{_NEEDS} a CUDA device of compute capability {_CAPABILITY[0]}.{_CAPABILITY[1]} or more; got {found}"


def failure_of_kernels(device: torch.device, kernels: str) -> str:
    """Return how the products of a small sparse weight are wrong on a device, or nothing if they are right."""
    generator = torch.Generator(device).manual_seed(0)
    weight, x, gradient = (
        torch.randn(shape, generator=generator, device=device).to(torch.bfloat16)
        for shape in ((256, 128), (32, 128), (32, 256))
    )
    x.requires_grad_()
    try:
        sparse = sparsify(weight, kernels)
        output = F.linear(x, sparse)
        (input_gradient,) = torch.autograd.grad(output, x, gradient)
        kept = sparse.to_dense()
    except RuntimeError as error:
        return f"fail: {first_line(error)}"
    in_tiles = (kept != 0).view(64, 4, 32, 4)
    if not ((kept == 0) | (kept == weight)).all() or max(int(in_tiles.sum(1).max()), int(in_tiles.sum(3).max())) > 2:
        return "keep other values than two of four"
    expected = x.detach().float() @ kept.float().T, gradient.float() @ kept.float()
    for actual, product in zip((output, input_gradient), expected, strict=True):
        if not torch.allclose(actual.float(), product, rtol=0.02, atol=0.1):
            return "return wrong products"
    return ""


def why_not_sparsifiable(module: nn.Module, device: torch.device) -> str:
    """Return why a module on a device does not train with 2:4 sparse weights, or nothing if it does."""
    return why_not_semi_structured(device) or ("" if any(find_sparsifiable(module)) else f"there is {_no_layer(None)}")


def _no_layer(exclude: object) -> str:
    return (
        f"no trained nn.Linear with a weight of its own whose sizes are multiples of {_MULTIPLE}, apart from those "
        f"that exclude={exclude} leaves out"
    )
