"""Run ``lightning-accel fit`` on the workers of Ray Train, and start them again when one dies.

    python configs/launch/ray_train.py --workers 4 --gpu --storage /shared/runs/mine -- --config fit.yaml

What follows ``--`` are the arguments of ``lightning-accel fit``. The run goes on from its newest checkpoint below
``--storage``, which all machines must see.
"""

import argparse
import os
import sys

import ray
import ray.train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def fit(settings: dict) -> None:
    from ray.train.lightning import RayLightningEnvironment

    from lightning_accel.cli import AccelCLI

    class RayCLI(AccelCLI):
        """Keep what is Ray's out of the config that the run saves."""

        def instantiate_trainer(self, **options: object) -> object:
            context = ray.train.get_context()
            devices = context.get_local_world_size()
            plugins = self.config_init["fit"].trainer.plugins or []
            plugins = [*(plugins if isinstance(plugins, list) else [plugins]), RayLightningEnvironment()]
            num_nodes = context.get_world_size() // devices
            return super().instantiate_trainer(devices=devices, num_nodes=num_nodes, plugins=plugins, **options)

    os.chdir(settings["folder"])
    sys.path.insert(0, settings["folder"])  # for modules and data beside the config
    RayCLI(["fit", *settings["arguments"], f"--trainer.default_root_dir={settings['storage']}", "--ckpt_path=auto"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="number of processes, one GPU or CPU each")
    parser.add_argument("--gpu", action="store_true", help="give each process a GPU")
    parser.add_argument("--storage", required=True, help="folder for checkpoints and logs, which all machines see")
    parser.add_argument("--restarts", type=int, default=3, help="how often workers are started again")
    parser.add_argument("arguments", nargs="+", help="of lightning-accel fit, after --")
    options = parser.parse_args()
    storage = os.path.abspath(options.storage)
    settings = {"arguments": options.arguments, "folder": os.getcwd(), "storage": storage}
    TorchTrainer(
        fit,
        train_loop_config=settings,
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=options.gpu),
        run_config=RunConfig(storage_path=storage, failure_config=FailureConfig(max_failures=options.restarts)),
    ).fit()


if __name__ == "__main__":
    main()
