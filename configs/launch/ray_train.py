"""Run ``lightning-accel fit`` on the workers of Ray Train, and start them again when one dies.

    python configs/launch/ray_train.py --workers 4 --gpu -- --config fit.yaml

What follows ``--`` are the arguments of ``lightning-accel fit``. All machines must see the folder where this is
started, and that of the run, from whose newest checkpoint it goes on.
"""

import argparse
import contextlib
import os
import sys

import ray.train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from lightning_accel.cli import AccelCLI, run


class RayCLI(AccelCLI):
    """Keep what is Ray's out of the config that the run saves."""

    def instantiate_trainer(self, **options: object) -> object:
        from ray.train.lightning import RayLightningEnvironment

        context = ray.train.get_context()
        devices = context.get_local_world_size()
        plugins = self.config_init["fit"].trainer.plugins or []
        plugins = [*(plugins if isinstance(plugins, list) else [plugins]), RayLightningEnvironment()]
        num_nodes = context.get_world_size() // devices
        return super().instantiate_trainer(devices=devices, num_nodes=num_nodes, plugins=plugins, **options)


def fit(settings: dict) -> None:
    os.chdir(settings["folder"])
    sys.path.insert(0, settings["folder"])  # for modules and data beside the config
    if status := run(["fit", *settings["arguments"], "--ckpt_path=auto"], RayCLI):
        raise RuntimeError(f"lightning-accel fit ended with status {status}; the output of the worker says why")


def main() -> None:
    parser = argparse.ArgumentParser(
        usage="%(prog)s [options] -- --config fit.yaml ...",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--workers", type=int, default=2, help="number of processes, one GPU or CPU each")
    parser.add_argument("--gpu", action="store_true", help="give each process a GPU")
    parser.add_argument("--storage", default="ray", help="folder for what Ray keeps, which all machines see")
    parser.add_argument("--restarts", type=int, default=3, help="how often workers are started again")
    parser.add_argument("arguments", nargs="+", help="of lightning-accel fit, after --")
    options = parser.parse_args()
    if options.workers < 1:
        parser.error(f"--workers must be at least 1; got {options.workers}")
    storage = os.path.abspath(options.storage)
    try:
        os.makedirs(storage, exist_ok=True)
    except OSError as error:
        parser.error(f"--storage must be a folder that can be written; got {storage} ({error.strerror})")
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        if status := run(["fit", *options.arguments, "--print_config"]):  # wrong options are told at once, and once
            sys.exit(status)
    TorchTrainer(
        fit,
        train_loop_config={"arguments": options.arguments, "folder": os.getcwd()},
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=options.gpu),
        run_config=RunConfig(storage_path=storage, failure_config=FailureConfig(max_failures=options.restarts)),
    ).fit()


if __name__ == "__main__":
    main()
