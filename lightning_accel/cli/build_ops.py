"""Subcommand ``lightning-accel build-ops``, which builds native kernels before their first use."""

import re
import sys
import time
from collections.abc import Sequence

import torch

from lightning_accel.ops.native import KERNELS
from lightning_accel.ops.native_build import BuildError, cpu_target, cuda_target

_HELP = """\
usage: lightning-accel build-ops [TARGET ...]

Build the native kernels of lightning_accel now, not when they are first used, into ~/.cache/lightning_accel or the
folder that LIGHTNING_ACCEL_CACHE names; where they are there already, say where.

  TARGET   AVX512, AVX2 or DEFAULT for processors, sm_80, sm_90, ... for GPUs; by default this machine's processor and
           GPUs. Name those of the machines that train where this one is another: a login node, say.
"""


def build_ops(targets: Sequence[str]) -> int:
    """Build the kernels for each of ``targets``, print the results, and return the exit status."""
    if "-h" in targets or "--help" in targets:
        print(_HELP, end="")
        return 0
    wrong = [target for target in targets if not re.fullmatch(r"AVX512|AVX2|DEFAULT|sm_\d{2,3}", target)]
    if wrong:
        print(
            f"build-ops: no such target: {wrong[0]}. Take AVX512, AVX2, DEFAULT, or sm_90 and its like", file=sys.stderr
        )
        return 2
    status = 0
    for target in targets or _targets_of_this_machine():
        start = time.perf_counter()
        try:
            path = KERNELS.build(target)
        except BuildError as error:
            print(f"{target}: failed: {error}")
            status = 1
        else:
            print(f"{target}: {path} ({time.perf_counter() - start:.1f} s)")
    return status


def _targets_of_this_machine() -> list[str]:
    gpus = {cuda_target(torch.device("cuda", index)) for index in range(torch.cuda.device_count())}
    return [cpu_target(), *sorted(gpus)]
