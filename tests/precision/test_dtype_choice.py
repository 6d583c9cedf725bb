import pytest
import torch

from lightning_accel.precision.amp import bf16_instructions, choose_precision


@pytest.mark.parametrize(
    ("capability", "precision"), [((7, 5), "16-mixed"), ((8, 0), "bf16-mixed"), ((9, 0), "bf16-mixed")]
)
def test_cuda_computes_in_bf16_from_ampere_on(monkeypatch, capability, precision):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Card")
    choice = choose_precision("auto", torch.device("cuda", 0))
    assert choice.precision == precision
    assert f"Card has compute capability {capability[0]}.{capability[1]}" in choice.reason


@pytest.mark.parametrize(
    ("capabilities", "precision", "reason"),
    [
        ({"amx_bf16": True, "avx512_bf16": True}, "bf16-mixed", "by amx_bf16"),
        ({"amx_bf16": False, "avx512_bf16": True}, "bf16-mixed", "by avx512_bf16"),
        ({"avx2": True}, "32-true", "emulates"),
    ],
)
def test_cpus_that_emulate_bf16_stay_in_float32(monkeypatch, capabilities, precision, reason):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    choice = choose_precision("auto", torch.device("cpu"))
    assert choice.precision == precision
    assert reason in choice.reason


def test_older_torch_tells_by_other_names(monkeypatch):
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    assert bf16_instructions() == "avx512_bf16"


def test_unknown_devices_stay_in_float32():
    assert choose_precision("auto", torch.device("mps")).precision == "32-true"
    assert choose_precision("bf16", torch.device("mps")).precision == "bf16-mixed"
