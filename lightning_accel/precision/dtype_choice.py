"""The choice of a half-precision format that a device computes in, rather than emulates."""

from typing import Literal, NamedTuple, TypeAlias

import torch

MixedDtype: TypeAlias = Literal["auto", "bf16", "fp16"]
MixedPrecisionName: TypeAlias = Literal["bf16-mixed", "16-mixed", "32-true"]

_BF16_CAPABILITY = (8, 0)  # Ampere; older devices emulate bf16, which is slower than float32


class PrecisionChoice(NamedTuple):
    """Hold a precision, as Lightning names it, and the reason for it."""

    precision: MixedPrecisionName
    reason: str


def choose_precision(dtype: MixedDtype, device: torch.device) -> PrecisionChoice:
    """Return the precision for ``dtype``, or for ``auto`` the fastest on ``device`` that trains as well as float32.

    >>> choose_precision("fp16", torch.device("cpu"))
    PrecisionChoice(precision='16-mixed', reason='it was asked for')
    """
    if dtype != "auto":
        precision: MixedPrecisionName = "bf16-mixed" if dtype == "bf16" else "16-mixed"
        return PrecisionChoice(precision, "it was asked for")
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        found = f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}"
        if capability >= _BF16_CAPABILITY:
            return PrecisionChoice("bf16-mixed", f"{found}, and computes in bf16 from 8.0 on")
        return PrecisionChoice("16-mixed", f"{found}, and computes in bf16 from 8.0 on only, but in fp16")
    if device.type == "cpu":
        if instructions := bf16_instructions():
            return PrecisionChoice("bf16-mixed", f"the CPU computes in bf16, by {instructions}")
        return PrecisionChoice("32-true", "the CPU emulates bf16, which is slower than float32")
    return PrecisionChoice("32-true", f"nothing else is known to be faster on {device.type}; name a dtype to try it")


def bf16_instructions() -> str | None:
    """Return the name of this CPU's instructions for bf16 products, or None if it emulates them."""
    capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else _capabilities()
    return next((name for name in ("amx_bf16", "avx512_bf16", "sve_bf16", "bf16") if capabilities.get(name)), None)


def _capabilities() -> dict[str, bool]:
    # torch 2.11 has only private functions for this
    return {
        "amx_bf16": torch.cpu._is_amx_tile_supported(),
        "avx512_bf16": torch.cpu._is_avx512_bf16_supported(),
    }
