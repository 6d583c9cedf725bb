"""Command line: LightningCLI with short errors, a run folder with every config, and checkpoints by name."""

from lightning_accel.cli.command import AccelCLI, run

__all__ = ["AccelCLI", "run"]
