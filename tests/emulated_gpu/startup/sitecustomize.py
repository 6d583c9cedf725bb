"""Emulate GPUs in this process: Python imports this module as it starts, where its folder is on PYTHONPATH."""

import os

import torch
from torch._decomp import decomposition_table

# isort: split
import emulated_gpu_kernels  # torch loads its libraries
from triton.runtime.autotuner import Autotuner

refused = set(emulated_gpu_kernels.install())

# cuDNN, and kernels of attention that are CUDA's alone, give way to torch's own operators.
torch.backends.cudnn.enabled = False
torch.backends.cuda.enable_flash_sdp(False)
torch.backends.cuda.enable_mem_efficient_sdp(False)
torch.backends.cuda.enable_cudnn_sdp(False)

KERNELS = torch.library.Library("aten", "IMPL")
for operator, formula in decomposition_table.items():
    if isinstance(operator, torch._ops.OpOverload) and operator.name() in refused:
        KERNELS.impl(operator, formula, "CUDA", allow_override=True)


def _of(name):
    return lambda function: KERNELS.impl(name, function, "CUDA", allow_override=True)


def _sum(gates, hidden, bias, hidden_bias):
    return gates + hidden if bias is None else gates + hidden + bias + hidden_bias


@_of("_thnn_fused_lstm_cell")
def lstm_cell(gates, hidden, cell, bias=None, hidden_bias=None):
    """Return the hidden state, the cell's and what its gradient needs: its gates, (n, 4 * size)."""
    i, f, g, o = _sum(gates, hidden, bias, hidden_bias).chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    new = f * cell + i * g
    return o * new.tanh(), new, torch.cat([i, f, g, o], 1)


@_of("_thnn_fused_lstm_cell_backward_impl")
def lstm_cell_backward(grad_hidden, grad_cell, cell, new, gates, has_bias):
    """Return the gradients of gates (n, 4 * size), of the cell (n, size) and of a bias (4 * size,)."""
    i, f, g, o = gates.chunk(4, 1)
    grad_hidden = torch.zeros_like(cell) if grad_hidden is None else grad_hidden
    grad = grad_hidden * o * (1 - new.tanh() ** 2) + (0 if grad_cell is None else grad_cell)
    of_gates = [grad * g * i * (1 - i), grad * cell * f * (1 - f), grad * i * (1 - g * g)]
    of_gates = torch.cat([*of_gates, grad_hidden * new.tanh() * o * (1 - o)], 1)
    return of_gates, grad * f, of_gates.sum(0) if has_bias else None


@_of("_thnn_fused_gru_cell")
def gru_cell(gates, hidden, state, bias=None, hidden_bias=None):
    """Return the hidden state and what its gradient needs, (n, 5 * size)."""
    if bias is not None:
        gates, hidden = gates + bias, hidden + hidden_bias
    (r, z, n), (hr, hz, hn) = gates.chunk(3, 1), hidden.chunk(3, 1)
    r, z = (r + hr).sigmoid(), (z + hz).sigmoid()
    n = (n + r * hn).tanh()
    return n + z * (state - n), torch.cat([r, z, n, state, hn], 1)


@_of("_thnn_fused_gru_cell_backward")
def gru_cell_backward(grad, saved, has_bias):
    """Return the gradients of the gates of inputs and of states, (n, 3 * size), of the state, and of both biases."""
    r, z, n, state, hn = saved.chunk(5, 1)
    of_n = grad * (1 - z) * (1 - n * n)
    of_z = grad * (state - n) * z * (1 - z)
    of_r = of_n * hn * r * (1 - r)
    inputs, states = torch.cat([of_r, of_z, of_n], 1), torch.cat([of_r, of_z, of_n * r], 1)
    biases = (inputs.sum(0), states.sum(0)) if has_bias else (None, None)
    return inputs, states, grad * z, *biases


# Processes exchange CUDA tensors by Gloo, since NCCL calls the driver for what it lacks here.
_init_process_group = torch.distributed.init_process_group


def init_process_group(backend=None, *args, **kwargs):
    """Call torch's function with Gloo in place of NCCL."""
    return _init_process_group("gloo", *args, **kwargs)


torch.distributed.init_process_group = torch.distributed.distributed_c10d.init_process_group = init_process_group

# Nothing is measured here: of the launch settings of a Triton kernel, the first are taken.
Autotuner._bench = lambda self, *args, config, **meta: [0.0, 0.0, 0.0]

if os.environ.get("TRITON_INTERPRET") == "1":  # the interpreter copies tensors to the host, which a kernel does not
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle

    _run_grid = GridExecutor.__call__

    def run_grid(self, *args, **kwargs):
        """Call Triton's function, allowed to wait."""
        mode = torch.cuda.get_sync_debug_mode()
        torch._C._cuda_set_sync_debug_mode(0)
        try:
            return _run_grid(self, *args, **kwargs)
        finally:
            torch._C._cuda_set_sync_debug_mode(mode)

    GridExecutor.__call__ = run_grid

    _create_dot = InterpreterBuilder.create_dot

    def create_dot(self, a, b, *args):
        """Call Triton's function on float32 in place of bfloat16, whose bits it would multiply as integers."""
        a, b = (
            TensorHandle((one.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
            if one.dtype.scalar == tl.bfloat16
            else one
            for one in (a, b)
        )
        return _create_dot(self, a, b, *args)

    InterpreterBuilder.create_dot = create_dot
