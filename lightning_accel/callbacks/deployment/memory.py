"""Memory that a form of a module takes in a process that has nothing else."""

import io
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_accel._private.torch import traced_inputs
from lightning_accel.compress.autotuning import compile_frozen
from lightning_accel.compress.calls import Inputs, Run, device_of
from lightning_accel.compress.export.loading import load_compressed, onnx_session
from lightning_accel.compress.export.writing import export
from lightning_accel.compress.quantization.form import CannotConvertError, Form
from lightning_accel.compress.quiet import suppress_output
from lightning_accel.measure import PeakMemory
from lightning_accel.ops.extras import require_module

_COMMAND = "import sys; from lightning_accel.callbacks.deployment.memory import run_file; run_file(*sys.argv[1:])"


def memory_of(module: nn.Module, form: Form, calls: Sequence[Inputs], seconds: float = 120.0) -> int:
    """Return the most bytes that a process needs to load the file of a form and to run it, beside what it has imported.

    The file is read and run in a process of its own, where nothing else of the model is. A program is compiled there,
    once for all sizes of calls, unless ``form`` is the module itself. On the CPU, this is the rise of the peak of
    resident memory, that of the compilation included; on CUDA, the peak of what tensors take.

    Args:
        module: in evaluation mode.
        form: form of ``module``, whose ``run`` is ``module`` if it is the module itself.
        calls: calls to run.
        seconds: time for that process.

    Raises:
        RuntimeError: if that process fails.
        TimeoutError: if it takes longer than ``seconds``.
        CannotConvertError: if the form has no file.
    """
    if form.program is None and form.onnx is None:
        raise CannotConvertError(f"it has no file: {form.no_file}")
    with tempfile.TemporaryDirectory() as folder:
        path, inputs = Path(folder, "form"), Path(folder, "calls.pt")
        if form.program is None:
            path = export(module, calls, path.with_suffix(".onnx"), "onnx", quantized=form).path
        else:  # not by export, which would compile the form for further sizes, to compare the file with it
            with suppress_output():
                torch.export.save(form.program, path := path.with_suffix(".pt2"))
        torch.save(list(calls), inputs)
        is_compiled = path.suffix == ".pt2" and form.run is not module
        options = str(device_of(module)), str(torch.get_num_threads()), str(int(is_compiled))
        return int(_run_alone([str(path), str(inputs), *options], seconds))


def _run_alone(arguments: Sequence[str], seconds: float) -> str:
    """Call :func:`run_file` in a process of its own, and return the last line that it prints."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # else processes that compile would count
    }
    command = [sys.executable, "-c", _COMMAND, *arguments]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"a process takes longer than {seconds:.0f} s to load its file and run it") from error
    if done.returncode:
        reason = next(iter(done.stderr.strip().splitlines()[-1:]), f"it ended with {done.returncode}")
        raise RuntimeError(f"a process cannot load its file and run it: {reason}")
    return done.stdout.splitlines()[-1]


@torch.no_grad()
def run_file(path: str, inputs: str, device: str, num_threads: str, is_compiled: str) -> None:
    """Load a file and run it, and print the bytes that this takes, on the last line."""
    torch.set_num_threads(int(num_threads))
    _run_small(path, device, bool(int(is_compiled)))
    peak = PeakMemory(torch.device(device))
    calls = torch.load(inputs, device, weights_only=True)
    run: Run = load_compressed(path) if path.endswith(".onnx") else _load_program(path, bool(int(is_compiled)))
    for args, kwargs in calls:
        run(*args, **kwargs)
    print(peak.read())


def _run_small(path: str, device: str, is_compiled: bool) -> None:
    """Import and allocate what the first call of any model does, which is not the memory of one."""
    if path.endswith(".onnx"):
        helper: Any = require_module("onnx.helper")
        sides = [helper.make_tensor_value_info(name, 1, [2, 2]) for name in ("a", "b", "c")]
        graph = helper.make_graph([helper.make_node("MatMul", ["a", "b"], ["c"])], "small", sides[:2], sides[2:])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        one = torch.ones(2, 2).numpy()
        onnx_session(model.SerializeToString(), ["CPUExecutionProvider"]).run(None, {"a": one, "b": one})
        return
    if is_compiled:
        with suppress(ModuleNotFoundError):
            require_module("torchao.quantization.pt2e")  # registers the operators of quantized programs
    example = torch.ones(1, 2, device=device)
    with io.BytesIO() as file:
        torch.export.save(torch.export.export(nn.Linear(2, 2, device=device), (example,)), file)
        file.seek(0)
        _load_program(file, is_compiled)(example)


def _load_program(file: str | io.BytesIO, is_compiled: bool) -> Run:
    """Load a program; compile it once for calls of all sizes, as :func:`load_compressed` does of what is exported."""
    program: Any = torch.export.load(file).module(check_guards=False)
    return compile_frozen(program, traced_inputs(program)) if is_compiled else program
