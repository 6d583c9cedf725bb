"""Errors of models that lack sizes name the datamodules that have them."""

import re

import lightning as L
import pytest

import lightning_accel.data
from lightning_accel.models import (
    DeepBeliefNetwork,
    FineTuning,
    MoEClassifier,
    MoELanguageModel,
    MoERegressor,
    SequenceModel,
)
from lightning_accel.models.relational import RelationalGNN


class Bare(L.LightningDataModule):
    """A datamodule without attributes."""

    def train_dataloader(self):
        return [0]


CASES = [
    (lambda: MoELanguageModel(dim=8, attention={"num_heads": 2}), "vocab_size", {"TextDataModule"}),
    (MoEClassifier, "num_features and num_classes",
     {"TabularDataModule", "DigitsDataModule", "IdxDataModule"}),
    (MoERegressor, "num_features", {"TabularDataModule"}),
    (RelationalGNN, "level", {"GraphDataModule"}),
    (lambda: RelationalGNN(level="graph", target_kind="regression"), "num_features", {"GraphDataModule"}),
    (lambda: SequenceModel(target_kind="regression"), "num_features or vocab_size", {"SequenceDataModule"}),
    (lambda: SequenceModel(target_kind=None), "target_kind", {"SequenceDataModule"}),
    (lambda: DeepBeliefNetwork(fine_tuning=FineTuning("classifier")), "num_visible",
     {"DigitsDataModule", "IdxDataModule", "BarsAndStripesDataModule", "TabularDataModule"}),
]  # fmt: skip


@pytest.mark.parametrize(("model", "lacking", "datamodules"), CASES)
def test_missing_sizes_name_the_datamodules_that_have_them(model, lacking, datamodules, tmp_path):
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=1, default_root_dir=tmp_path, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with pytest.raises(ValueError, match=f"needs {lacking}") as refused:
        trainer.fit(model(), datamodule=Bare())
    named = set(re.findall(r"\w+DataModule", str(refused.value)))
    assert named == datamodules
    assert named <= set(lightning_accel.data.__all__)
