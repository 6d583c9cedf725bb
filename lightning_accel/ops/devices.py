"""Where the tensors of an operation lie."""

from torch import Tensor


def check_one_device(**tensors: Tensor | None) -> None:
    """For fakes: torch hands them tensors of mixed devices, if one is on ``meta``, and what they return has no values.

    Raises:
        ValueError: if not all are on the same device.
    """
    devices = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    if len(set(devices.values())) > 1:
        found = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ValueError(f"tensors must be on one device; got {found}. Call .to(device)")
