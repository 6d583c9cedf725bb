from itertools import pairwise

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.aggregation import SumMetric

from lightning_accel.models import MoEClassifier, MoELanguageModel
from lightning_accel.strategies import PipelineStrategy
from tests.ranks import run_ranks


class Plain(L.LightningModule):
    """Knows nothing of pipelines."""

    def __init__(self):
        super().__init__()
        widths = [6, 10, 7, 9, 3]
        layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise(widths)]
        self.net = nn.Sequential(*layers)
        self.count = SumMetric()
        self.seen = []

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, target = batch
        loss = F.cross_entropy(self(x), target)
        self.log("train/loss", loss)
        self.log("train/rows", float(len(x)), reduce_fx="sum")
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append((float(outputs["loss"]), float(self.trainer.callback_metrics["train/loss"])))

    def validation_step(self, batch, batch_idx):
        x, target = batch
        scores = self(x)
        self.count.update((scores.argmax(dim=1) == target).sum())
        self.log("val/correct", self.count)
        self.log("val/loss", F.cross_entropy(scores, target))

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def loader(num_rows=56, batch_size=8):
    draw = torch.Generator().manual_seed(7)
    data = TensorDataset(torch.randn(num_rows, 6, generator=draw), torch.randint(3, (num_rows,), generator=draw))
    return DataLoader(data, batch_size)


def make_trainer(folder, strategy="auto", **options):
    several = strategy != "auto"
    return L.Trainer(
        **{
            "accelerator": "cpu",
            "strategy": strategy,
            "devices": "auto" if not several else torch.distributed.get_world_size(),
            "max_epochs": 1,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": False,
            "default_root_dir": folder,
            "num_sanity_val_steps": 1,
            "use_distributed_sampler": False,
            "log_every_n_steps": 1,
        }
        | options
    )


def trained(folder, strategy="auto", module=None, data=None, checkpoint=None, **options):
    """Weights after a fit, what was logged, and the checkpoint's path."""
    torch.manual_seed(3)
    module = module or Plain()
    trainer = make_trainer(folder, strategy, **options)
    data = data or loader()
    trainer.fit(module, data, data, ckpt_path=checkpoint)
    kind = "one" if strategy == "auto" else "pipeline"
    trainer.save_checkpoint(f"{folder}/{kind}.ckpt")
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {"logged": logged, "seen": getattr(module, "seen", None)}


def load(folder, kind):
    return torch.load(f"{folder}/{kind}.ckpt", weights_only=True)


def check_plain(rank, folder, strategy, options):
    return trained(folder, PipelineStrategy(**strategy), **options)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_plain_module_equals_one_process(tmp_path, schedule):
    one = trained(tmp_path, gradient_clip_val=0.05)
    for result in run_ranks(check_plain, tmp_path, {"schedule": schedule}, {"gradient_clip_val": 0.05}):
        assert result["logged"] == pytest.approx(one["logged"], abs=1e-5)
        torch.testing.assert_close(result["seen"], one["seen"], rtol=0, atol=1e-5)
    whole, pipeline = load(tmp_path, "one"), load(tmp_path, "pipeline")
    torch.testing.assert_close(pipeline["state_dict"], whole["state_dict"], rtol=0, atol=1e-5)
    assert list(pipeline["state_dict"]) == list(whole["state_dict"])
    torch.testing.assert_close(pipeline["optimizer_states"], whole["optimizer_states"], rtol=0, atol=1e-5)


SMALL = {"dim": 8, "num_layers": 2, "num_heads": 2, "num_experts": 4, "expert_dim": 8, "balance_weight": 0.5}


def language_model(**options):
    return MoELanguageModel(vocab_size=11, **SMALL | options)


def tokens(num_rows=40, batch_size=8):
    draw = torch.Generator().manual_seed(7)
    return DataLoader(torch.randint(11, (num_rows, 6), generator=draw), batch_size)


def check_language_model(rank, folder, strategy, options):
    torch.manual_seed(3)
    return trained(folder, PipelineStrategy(**strategy), language_model(), tokens(), **options)


def test_language_model_equals_one_process(tmp_path):
    torch.manual_seed(3)
    one = trained(tmp_path, module=language_model(), data=tokens(), gradient_clip_val=0.5)
    for result in run_ranks(check_language_model, tmp_path, {}, {"gradient_clip_val": 0.5}):
        assert result["logged"] == pytest.approx(one["logged"], abs=1e-4)
    whole, pipeline = load(tmp_path, "one"), load(tmp_path, "pipeline")
    torch.testing.assert_close(pipeline["state_dict"], whole["state_dict"], rtol=0, atol=1e-5)
