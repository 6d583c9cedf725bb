"""Precision plug-ins for Lightning's Trainer, which serve any LightningModule."""
