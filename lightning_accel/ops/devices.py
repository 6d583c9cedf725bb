"""Checks of the devices that tensors are on."""

from torch import Tensor


def check_one_device(**tensors: Tensor | None) -> None:
    """Require that all tensors are on one device.

    Fake kernels call it: torch passes them tensors of mixed devices if one of them is on ``meta``.

    Raises:
        ValueError: if the tensors are on different devices.
    """
    devices = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    if len(set(devices.values())) > 1:
        found = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ValueError(f"tensors must be on one device; got {found}. Call .to(device)")
