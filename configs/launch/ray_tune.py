"""Search hyperparameters of a config with Ray Tune, several trials at a time.

    python configs/launch/ray_tune.py --trials 20 --gpus 1 -- --config $PWD/configs/moe_digits.yaml

What follows ``--`` are the arguments of ``lightning-accel fit``, to which each trial adds what it draws. Trials that
lag behind are ended early. Each runs in a folder of its own below ``--storage``, so paths must be absolute.
"""

import argparse
import contextlib
import os
import sys

from ray import tune
from ray.tune import RunConfig, TuneConfig
from ray.tune.integration.pytorch_lightning import TuneReportCheckpointCallback
from ray.tune.schedulers import ASHAScheduler

from lightning_accel.cli import AccelCLI, run

METRIC, MODE = "val/accuracy", "max"  # of the config above, as are the options below
SPACE = {
    "model.dropout": tune.uniform(0.0, 0.5),
    "model.experts.num_experts": tune.choice([2, 4, 8]),
    "optimizer.weight_decay": tune.loguniform(1e-3, 0.3),
}


def run_trial(settings: dict) -> None:
    os.makedirs(folder := f"{settings['storage']}/{tune.get_context().get_trial_id()}")
    os.chdir(folder)
    drawn = [f"--{name}={settings[name]}" for name in SPACE]
    report = TuneReportCheckpointCallback(metrics={"metric": METRIC}, save_checkpoints=False)
    status = run(
        ["fit", *settings["arguments"], *drawn, "--run_report=false"],
        lambda arguments, callbacks: AccelCLI(arguments, [*callbacks, report]),
    )
    if status:
        raise RuntimeError(f"lightning-accel fit ended with status {status}; the output of the trial says why")


def main() -> None:
    parser = argparse.ArgumentParser(
        usage="%(prog)s [options] -- --config $PWD/fit.yaml ...",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--trials", type=int, default=20, help="number of runs")
    parser.add_argument("--gpus", type=float, default=0, help="GPUs of each trial, or a part of one")
    parser.add_argument("--storage", default="search", help="folder for the trials")
    parser.add_argument("arguments", nargs="+", help="of lightning-accel fit, after --")
    given = parser.parse_args()
    drawn = [f"--{name}={values.sample()}" for name, values in SPACE.items()]
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        if status := run(["fit", *given.arguments, *drawn, "--print_config"]):  # wrong options are told at once
            sys.exit(status)
    storage = os.path.abspath(given.storage)
    tuner = tune.Tuner(
        tune.with_resources(run_trial, {"cpu": 1, "gpu": given.gpus}),
        param_space={**SPACE, "arguments": given.arguments, "storage": storage},
        tune_config=TuneConfig(
            metric="metric", mode=MODE, num_samples=given.trials, scheduler=ASHAScheduler(max_t=1000, grace_period=10)
        ),
        run_config=RunConfig(storage_path=storage),
    )
    best = tuner.fit().get_best_result()
    drawn = {name: best.config[name] for name in SPACE}
    print(f"best {METRIC}: {best.metrics['metric']:.4f}, with {drawn}, in {storage}/{best.metrics['trial_id']}")


if __name__ == "__main__":
    main()
