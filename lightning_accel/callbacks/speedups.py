"""Settings that change how fast a run computes, and not what."""

import ctypes
import platform
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any, Literal, get_args

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader, IterableDataset

from lightning_accel._private.torch import allow_recompilations, compiled_call, wrapped_frames
from lightning_accel.data.batched_fetch import fetch_batches
from lightning_accel.measure.allocators import (
    ALLOCATORS,
    AllocatorName,
    allocator_in_use,
    variables_for,
    why_no_allocator,
)
from lightning_accel.measure.machine import describe_machine
from lightning_accel.nn.deferred_weights import defer_weights_, restore_weights_
from lightning_accel.nn.recurrent.fused import fuse_, unfuse_
from lightning_accel.ops.attention import replace_attention, restore_attention
from lightning_accel.ops.bernoulli import replace_bernoulli, restore_bernoulli
from lightning_accel.ops.blocks import find_blocks
from lightning_accel.ops.bounds import if_set, require_flags, require_integers
from lightning_accel.ops.matmul import keep_matmul_precision, replace_matmul, restore_matmul
from lightning_accel.ops.names import require_one_of

CompileScope = Literal["children", "blocks"]
CompileMode = Literal["reduce-overhead", "max-autotune"]
MatmulPrecision = Literal["high", "medium"]
AttentionBackend = Literal["native", "math", "efficient", "cudnn"]
_BACKENDS = {
    "math": SDPBackend.MATH,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of mallopt(3)


class Speedups(L.Callback):
    """Apply settings to any run that make it faster on the machine where they were measured.

    ``lightning-accel tune`` finds the settings and writes them to a config. Each is None, and left as the run has it,
    by default. What is an argument of the Trainer, such as ``precision`` or ``benchmark``, is not repeated here.
    ``validate``, ``test`` and ``predict`` take ``threads``, ``channels_last``, ``attention``,
    ``defer_attention_weights``, ``compile``, ``matmul_precision``, ``onednn_matmul``, ``keep_freed_memory`` and
    ``allocator`` as ``fit`` does; the other settings are about training.

    Losses stay equal up to rounding, with these exceptions: compiled layers, layers whose memory has another order
    (``channels_last``), ``native_dropout``, ``attention="native"`` with dropout, and datasets in other workers, draw
    other random numbers; shuffled loaders whose workers are kept draw other orders from the second epoch on;
    ``matmul_precision`` rounds operands of float32 matrix products.

    Args:
        threads: threads of an operation on the CPU, in each process.
        num_workers: processes that load batches of each DataLoader, kept over epochs. Loaders of an IterableDataset,
            which would yield each item once a worker, are left as they are.
        prefetch_factor: batches that each worker of a loader loads ahead, for loaders whose items take unequally long.
        pin_memory: load batches to page-locked memory, from which copies to a GPU are asynchronous.
        fused_optimizer: step each optimizer that has a fused implementation by one kernel for all parameters.
        fused_rnn: train each ``torch.nn.LSTM`` and ``torch.nn.GRU`` on the CPU by one operation per layer and
            direction, where torch records each gate of each step. LSTMs on padded tensors are left to oneDNN, which is
            faster.
        fused_messages: sum the messages of each convolution of PyTorch Geometric on the CPU in one pass, in place of a
            tensor of all messages. Sums and means of features, or of features times weights of edges without a
            gradient, are served, as in GINConv, SAGEConv, GCNConv and users' own convolutions; others are left as they
            are. It pays with 30,000 edges a batch, and costs with 3,000.
        batched_fetch: read a batch by one indexing operation in place of one for each sample, where the loader collates
            by default and the dataset returns arrays of samples for an array of indices. Samples are read
            one by one again where batches are not equal bit for bit: the first three are read both ways, and one sample
            of each that follows.
        channels_last: store the weights of 2D convolutions with channels as the last dimension, which their inputs
            follow.
        attention: compute scaled_dot_product_attention by this backend of torch, or by ``math`` where it cannot. On the
            CPU, ``math`` trains sequences of up to about 128 faster in bfloat16 than torch's choice, which is flash.
            ``native`` trains on the CPU by a kernel of this package, which takes dropout, too; there are no second
            derivatives then. It leaves calls to torch that need no gradient, or a gradient of the mask. In each
            ``GPSConv`` of PyTorch Geometric without dropout of attention, nodes attend within their graph without
            padding, 1.8 to 2.1 times as fast, with derivatives of any order.
        defer_attention_weights: compute the weights that each ``torch.nn.MultiheadAttention`` without dropout returns
            only where they are used, so that its output comes from scaled_dot_product_attention, which makes no tensor
            of all pairs. It is an error to use them after the parameters have changed.
        compile: compile the ``children`` of the LightningModule, or its repeated ``blocks``, with torch.compile.
        compile_mode: of torch.compile: ``reduce-overhead`` starts the kernels of a GPU as one graph, and
            ``max-autotune`` also measures several kernels for each matrix product, which takes long.
        compile_dynamic: compile for sizes that change from batch to batch from the start, in place of once for the
            sizes of the first batch and again when others come.
        matmul_precision: of float32 matrix products: ``high`` (TF32 on CUDA) or ``medium`` (also bfloat16 on CPUs with
            AMX).
        onednn_matmul: compute float32 matrix products on the CPU by oneDNN in place of MKL until the run ends: twice as
            fast on processors of AMD with AVX-512, where MKL uses AVX2. Small products are left to MKL.
        keep_freed_memory: keep memory that tensors on the CPU free, in place of returning it to the operating system,
            which clears each page before it is used again. It needs glibc, and lasts until the process ends.
        allocator: take memory on the CPU from ``tcmalloc`` or ``jemalloc``, where they are installed, or from glibc in
            ``huge_pages``, in place of ``keep_freed_memory``; all of them keep what is freed. Only a new process can
            have another one: ``lightning-accel`` starts itself again where a config names one. A program of your own is
            started with environment variables, which a warning tells where they are missing.
        native_dropout: draw the masks of all dropouts on the CPU by a native kernel, on all threads, until the run
            ends; torch's is serial on processors other than Intel's. With ``compile``, compiled layers call it, too.
        measured_on: the machine where the settings were measured; a run on another one warns.

    Raises:
        TypeError: if an option has another type.
        RuntimeError: at the beginning of a run, if there is no kernel for ``native_dropout``, ``onednn_matmul`` or
            ``attention="native"``.
        ValueError: if an option is out of range, or contradicts another.

    Example:
        >>> import lightning as L
        >>> from lightning_accel.callbacks import Speedups
        >>> trainer = L.Trainer(max_epochs=5, callbacks=[Speedups(threads=4, fused_optimizer=True)])
    """

    def __init__(
        self,
        threads: int | None = None,
        num_workers: int | None = None,
        prefetch_factor: int | None = None,
        pin_memory: bool | None = None,
        fused_optimizer: bool = False,
        fused_rnn: bool = False,
        fused_messages: bool = False,
        batched_fetch: bool = False,
        channels_last: bool = False,
        attention: AttentionBackend | None = None,
        defer_attention_weights: bool = False,
        compile: CompileScope | None = None,  # the name of torch.compile
        compile_mode: CompileMode | None = None,
        compile_dynamic: bool = False,
        matmul_precision: MatmulPrecision | None = None,
        onednn_matmul: bool = False,
        keep_freed_memory: bool = False,
        allocator: AllocatorName | None = None,
        native_dropout: bool = False,
        measured_on: str | None = None,
    ) -> None:
        require_integers(1, **if_set(threads=threads, prefetch_factor=prefetch_factor))
        require_integers(0, **if_set(num_workers=num_workers))
        require_flags(
            fused_optimizer=fused_optimizer,
            fused_rnn=fused_rnn,
            fused_messages=fused_messages,
            batched_fetch=batched_fetch,
            channels_last=channels_last,
            defer_attention_weights=defer_attention_weights,
            compile_dynamic=compile_dynamic,
            onednn_matmul=onednn_matmul,
            keep_freed_memory=keep_freed_memory,
            native_dropout=native_dropout,
            **if_set(pin_memory=pin_memory),
        )
        if prefetch_factor is not None and num_workers == 0:
            raise ValueError(f"prefetch_factor={prefetch_factor} needs workers that load ahead; got num_workers=0")
        self.threads = threads
        self.num_workers = num_workers
        self.prefetch_factor = prefetch_factor
        self.pin_memory = pin_memory
        self.fused_optimizer = fused_optimizer
        self.fused_rnn = fused_rnn
        self.fused_messages = fused_messages
        self.batched_fetch = batched_fetch
        self.channels_last = channels_last
        for name, choice, allowed in (
            ("attention", attention, get_args(AttentionBackend)),
            ("compile", compile, get_args(CompileScope)),
            ("compile_mode", compile_mode, get_args(CompileMode)),
            ("matmul_precision", matmul_precision, get_args(MatmulPrecision)),
            ("allocator", allocator, ALLOCATORS),
        ):
            if choice is not None:
                require_one_of(name, choice, allowed)
        self.attention = attention
        if compile_mode is not None and (compile is None or native_dropout):
            reason = "compile, which says what is compiled" if compile is None else "native_dropout=False, as on a GPU"
            raise ValueError(f"compile_mode={compile_mode!r} needs {reason}")
        if compile_dynamic and compile is None:
            raise ValueError("compile_dynamic needs compile, which says what is compiled")
        if allocator is not None and keep_freed_memory:
            raise ValueError(f"allocator={allocator!r} keeps freed memory itself; leave keep_freed_memory out")
        self.defer_attention_weights = defer_attention_weights
        self.compile = compile
        self.compile_mode = compile_mode
        self.compile_dynamic = compile_dynamic
        self.matmul_precision = matmul_precision
        self.onednn_matmul = onednn_matmul
        self.keep_freed_memory = keep_freed_memory
        self.allocator = allocator
        self.native_dropout = native_dropout
        self.measured_on = measured_on
        self._threads_before: int | None = None
        self._fused: list[nn.RNNBase] = []
        self._fused_convolutions: list[nn.Module] = []
        self._deferring: list[nn.MultiheadAttention] = []
        self._replaced = ExitStack()  # kernels, backends and precision

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self.measured_on is not None and self.measured_on != (here := machine_name()):
            warnings.warn(
                f"these speedups were measured on another machine ({self.measured_on}), this is {here}: "
                "run lightning-accel tune here to measure them anew",
                stacklevel=2,
            )
        self.teardown(trainer, pl_module, stage)  # of a run around this one
        self._threads_before = torch.get_num_threads()
        if self.native_dropout:
            replace_bernoulli()
            self._replaced.callback(restore_bernoulli)
        if self.onednn_matmul:
            replace_matmul()
            self._replaced.callback(restore_matmul)
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        if self.matmul_precision is not None:
            self._replaced.enter_context(keep_matmul_precision())
            torch.set_float32_matmul_precision(self.matmul_precision)
        if self.keep_freed_memory:
            keep_freed_memory()
        if self.allocator is not None and self.allocator != allocator_in_use():
            warnings.warn(_how_to_start_with(self.allocator), stacklevel=2)
        if self.channels_last:
            _to_channels_last(pl_module)
        if self.defer_attention_weights:
            self._deferring = defer_weights_(pl_module)
            _log_replaced("defer_attention_weights=True", self._deferring)
        if self.attention == "native":
            replace_attention()
            self._replaced.callback(restore_attention)
            if "torch_geometric" in sys.modules:
                from lightning_accel.nn.graph_attention import replace_gps_, restore_gps_

                layers = replace_gps_(pl_module)
                self._replaced.callback(restore_gps_, layers)
                if layers:  # others are reached by what they call
                    _log_replaced("attention='native'", layers)
        elif self.attention is not None:
            self._replaced.enter_context(sdpa_kernel([_BACKENDS[self.attention], SDPBackend.MATH]))

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        of_loaders = self.num_workers, self.prefetch_factor, self.pin_memory
        if self.batched_fetch or any(value is not None for value in of_loaders):
            self._set_up_loaders(trainer)
        if self.fused_rnn and trainer.strategy.root_device.type == "cpu":
            self._fused = fuse_(pl_module)
            _log_replaced("fused_rnn=True", self._fused)
        if self.fused_messages and trainer.strategy.root_device.type == "cpu":
            from lightning_accel.nn.message_passing import fuse_messages_  # imports torch_geometric

            self._fused_convolutions = fuse_messages_(pl_module)
            _log_replaced("fused_messages=True", self._fused_convolutions)
        self._compile(pl_module)
        for optimizer in trainer.optimizers:
            if self.fused_optimizer and has_fused_step(optimizer):
                for settings in (optimizer.defaults, *optimizer.param_groups):
                    settings.update(fused=True, foreach=False)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == "validate":  # not within a fit, which has compiled already
            self._compile(pl_module)

    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._compile(pl_module)

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._compile(pl_module)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self._threads_before is None:
            return
        torch.set_num_threads(self._threads_before)
        trainer.strategy.__dict__.pop("process_dataloader", None)
        unfuse_(self._fused)
        self._fused = []
        if self._fused_convolutions:
            from lightning_accel.nn.message_passing import unfuse_messages_

            unfuse_messages_(self._fused_convolutions)
            self._fused_convolutions = []
        restore_weights_(self._deferring)
        self._deferring = []
        self._replaced.close()
        self._threads_before = None

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "")  # which Lightning leaves out

    def _compile(self, module: L.LightningModule) -> None:
        """Compile what is not compiled yet, by this run or one before."""
        if self.compile is None:
            return
        modules = blocks_of(module) if self.compile == "blocks" else called_children(module)
        if not modules:
            warnings.warn(f"compile={self.compile!r} finds no module to compile", stacklevel=2)
        options = {"fallback_random": True} if self.native_dropout else None
        new = [one for one in modules if compiled_call(one) is None]
        _compile(new, mode=self.compile_mode, options=options, dynamic=self.compile_dynamic or None)

    def _set_up_loaders(self, trainer: L.Trainer) -> None:
        """Change each loader just before its first iterator, whoever has made it, and whatever Lightning made of it."""
        process = trainer.strategy.process_dataloader  # which ExactResume has replaced, too

        def process_dataloader(dataloader: object) -> object:
            for loader in loaders_of(dataloader):
                self._change(loader)
            return process(dataloader)

        trainer.strategy.process_dataloader = process_dataloader  # type: ignore[method-assign]

    def _change(self, loader: DataLoader[Any]) -> None:
        if self.pin_memory is not None:
            loader.pin_memory = self.pin_memory
        if self.batched_fetch:
            fetch_batches(loader)
        if self.num_workers is not None and not isinstance(loader.dataset, IterableDataset):
            loader.num_workers = self.num_workers
            # a DataLoader takes no other value after its __init__, though nothing reads it before the first iterator
            loader.__dict__["persistent_workers"] = self.num_workers > 0
        if loader.num_workers:
            loader.prefetch_factor = self.prefetch_factor or loader.prefetch_factor or 2
        else:
            loader.prefetch_factor = None
            loader.timeout = 0


def _log_replaced(option: str, layers: Sequence[nn.Module]) -> None:
    """Log how many layers of each class compute by an option."""
    counts = Counter(type(layer).__name__ for layer in layers)
    found = ", ".join(f"{number} {name}" for name, number in counts.items()) or "no layer"
    rank_zero_info(f"Speedups({option}) replaces the computation of {found}")


def loaders_of(dataloader: object) -> Iterator[DataLoader[Any]]:
    """Yield the torch DataLoaders in what a strategy processes: one, or none if it is another iterable."""
    if isinstance(dataloader, DataLoader):
        yield dataloader


def called_children(module: nn.Module) -> list[nn.Module]:
    """Return the largest modules inside ``module`` that hold parameters and have a forward of their own."""
    found: list[nn.Module] = []
    for child in module.children():
        if not any(True for _ in child.parameters()):
            continue
        is_container = type(child).forward is nn.Module.forward or isinstance(child, nn.ModuleList | nn.ModuleDict)
        found += called_children(child) if is_container else [child]
    return found


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of ``module`` that are more than a single layer."""
    return [block for block in find_blocks(module) if any(True for _ in block.children())]


def _compile(modules: Sequence[nn.Module], **arguments: Any) -> None:
    """Compile modules in place, by arguments of torch.compile.

    It leaves out frames of torch.nn unless it wraps them. Wrapped modules share one cache, which has to have room for
    all of them (github.com/pytorch/pytorch/issues/124269).
    """
    allow_recompilations(8 + len(modules))
    for module in modules:
        with wrapped_frames() if type(module).__module__.startswith("torch.") else nullcontext():
            module.compile(**arguments)


def has_fused_step(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer can be switched to a fused implementation."""
    return "fused" in optimizer.defaults and "foreach" in optimizer.defaults


def _to_channels_last(module: nn.Module) -> None:
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d | nn.ConvTranspose2d):
            layer.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in its stub


def keep_freed_memory() -> None:
    """Let the C library keep all memory that is freed, and take none by mmap, whose pages are cleared each time.

    Raises:
        RuntimeError: if the C library is not glibc.
    """
    if platform.libc_ver()[0] != "glibc":
        raise RuntimeError("keep_freed_memory needs the GNU C library (glibc), which this system does not use")
    libc = ctypes.CDLL(None)
    if not (libc.mallopt(_M_MMAP_MAX, 0) and libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)):
        raise RuntimeError("the C library did not take the settings of keep_freed_memory")


def _how_to_start_with(allocator: AllocatorName) -> str:
    if reason := why_no_allocator(allocator):
        return f"allocator={allocator!r} has no effect: {reason}; install it, or take the argument out"
    variables = " ".join(f"{name}={value}" for name, value in variables_for(allocator).items())
    return f"allocator={allocator!r} has no effect in a process that has begun; start the program with {variables}"


def machine_name() -> str:
    """Return a name of this machine for people, with the digest of its hardware."""
    machine = describe_machine()
    hardware = [f"{machine.cpu} x {machine.cores:g}", *(gpu.name for gpu in machine.gpus)]
    return f"{', '.join(hardware)} ({machine.digest})"
