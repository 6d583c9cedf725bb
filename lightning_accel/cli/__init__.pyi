from lightning_accel.cli.command import AccelCLI as AccelCLI
from lightning_accel.cli.command import run as run

__all__ = ["AccelCLI", "run"]
