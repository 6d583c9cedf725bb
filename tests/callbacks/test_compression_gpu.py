"""What the callbacks that make models smaller do to a model that is on a GPU."""

import lightning as L
import onnxruntime
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_accel.callbacks import Distillation, Export, Pruning, Quantization, RestoringEarlyStopping
from lightning_accel.compress import load_compressed, quantize
from lightning_accel.compress.quantization.inputs import noise_share
from lightning_accel.compress.quantization.layers import find_layers
from lightning_accel.compress.quantization.pt2e import torchao_int4

pytestmark = pytest.mark.gpu
ROWS = TensorDataset(torch.randn(96, 32, generator=torch.Generator().manual_seed(0)), torch.arange(96) % 3)


class Plain(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(
            nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 3)
        )

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        scores = self.net(batch[0])
        self.log("val/accuracy", scores.argmax(1).eq(batch[1]).float().mean(), batch_size=len(scores))
        self.log("val/loss", nn.functional.cross_entropy(scores, batch[1]), batch_size=len(scores))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.01, fused=True)


def fit(folder, *callbacks, accelerator="gpu", max_epochs=4, **options):
    trainer = L.Trainer(
        accelerator=accelerator, devices=1, max_epochs=max_epochs, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, default_root_dir=folder, callbacks=list(callbacks),
        **options,
    )  # fmt: skip
    module = Plain()
    trainer.fit(module, DataLoader(ROWS, 32), DataLoader(ROWS, 48))
    return module


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("options", [{"scope": "global"}, {"structure": "2:4"}, {"regrowth": "rigl"}], ids=str)
def test_what_is_pruned_is_zero(options, precision, tmp_path):
    pruning = Pruning(sparsity=0.5, **options)
    module = fit(tmp_path, pruning, precision=precision)
    weights = torch.cat([one.weight.flatten() for one in module.net if isinstance(one, nn.Linear)])
    assert weights.is_cuda or weights.device.type == "cpu"  # the Trainer brings it back in the end
    assert weights.eq(0).float().mean().item() == pytest.approx(0.5, abs=0.01)


def test_masks_of_one_shot_are_those_of_a_cpu(tmp_path):
    found = [
        fit(tmp_path, Pruning(sparsity=0.7, schedule="one_shot", scope="global"), accelerator=accelerator, max_epochs=1)
        for accelerator in ("cpu", "gpu")
    ]
    same = [
        a.eq(0).eq(b.cpu().eq(0)).float().mean().item()
        for a, b in zip(found[0].parameters(), found[1].parameters(), strict=True)
    ]
    assert min(same) > 0.99


def test_channels_are_removed_where_they_are(tmp_path):
    module = fit(tmp_path, Pruning(sparsity=0.5, structure="channel", end=0.5))
    assert [one.out_features for one in module.net if isinstance(one, nn.Linear)] == [32, 24, 3]


@pytest.mark.parametrize("mode", ["auto", pytest.param("dynamic", marks=pytest.mark.gpu(kernels=True)), "weight_only"])
def test_forms_of_the_gpu_are_measured_and_exported(mode, tmp_path):
    quantization, export = (
        Quantization(mode, device="cuda", monitor="val/accuracy", max_drop=0.1),
        Export(compare=False),
    )
    fit(tmp_path, quantization, export)
    rows = {row.name: row for row in quantization.result.report.rows}
    assert {"fp32 eager", "fp32 compiled", "bf16 compiled"} < set(rows)
    assert any(row.latencies for name, row in rows.items() if "torchao" in name)
    assert quantization.result.device.startswith("cuda")
    x = ROWS.tensors[0][:7].cuda()
    found = load_compressed(export.exported.path)(x)
    expected = quantization.result.run(x)
    limit = 0.1 if "float8" in quantization.result.name else 0.02  # float8 has three binary digits
    assert (found - expected).abs().max() < limit * expected.abs().max()
    if mode == "dynamic":
        assert "cannot run at batch 1" in rows["int8 torchao dynamic"].note
    assert export.report.device.type == "cuda"


@pytest.mark.gpu(kernels=True)
def test_int8_products_of_a_gpu_take_17_rows_and_multiples_of_8():
    inputs = [((ROWS.tensors[0][:32].cuda(),), {})]
    quantized = quantize(Plain().net.cuda().eval(), inputs, "dynamic", batch_sizes=[17, 32])
    row = next(row for row in quantized.report.rows if row.name == "int8 torchao dynamic")
    assert set(row.latencies) == {17, 32}, row.note
    assert row.note == "1 layers in float: 5"  # of three outputs


def test_training_for_int8_on_a_gpu_gives_the_form_of_a_cpu(tmp_path):
    quantization = Quantization("qat", "onnxruntime", begin=0.5)
    fit(tmp_path, quantization, precision="bf16-mixed")
    assert quantization.result.name == "int8 ONNX Runtime static"
    assert onnxruntime.InferenceSession(quantization.result.onnx).get_inputs()


def test_float8_follows_the_float_module():
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs compute capability 8.9")
    module = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 16)).cuda().eval()
    x = torch.randn(32, 64, device="cuda")
    found = quantize(module, [((x,), {})], "dynamic", "torchao")
    row = next(row for row in found.report.rows if row.name == "float8 torchao dynamic")
    assert row.latencies, row.note
    assert found.device == "cuda:0"


@pytest.mark.gpu(kernels=True)
def test_weights_of_4_bits_follow_the_float_module():
    module = (
        nn.Sequential(nn.Linear(256, 192), nn.ReLU(), nn.Linear(192, 96), nn.ReLU(), nn.Linear(96, 16)).cuda().eval()
    )
    x = torch.randn(32, 256, device="cuda")
    form = torchao_int4(module, [((x,), {})], find_layers(module))
    with torch.no_grad():
        assert noise_share(module(x), form.run(x)) < 0.05
    assert not form.left_float


def test_teacher_and_best_weights_are_on_the_gpu(tmp_path):
    stopping = RestoringEarlyStopping("val/loss", patience=2)
    distillation = Distillation("initial")
    module = fit(tmp_path, distillation, stopping, Export(compare=False))
    x = ROWS.tensors[0][:5]
    file = load_compressed(next(tmp_path.glob("**/model.pt2")))
    torch.testing.assert_close(file(x), module.eval().cpu().net(x), rtol=1e-3, atol=1e-3)
