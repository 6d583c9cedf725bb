"""Search hyperparameters of a config with Optuna.

    python configs/launch/optuna_search.py --trials 20 -- --config configs/moe_digits.yaml

What follows ``--`` are the arguments of ``lightning-accel fit``, to which each trial adds what it draws. Trials that
lag behind are ended early. ``--storage`` keeps the trials, so that a search with the same arguments goes on.
"""

import argparse
import sys

import optuna
from optuna_integration import PyTorchLightningPruningCallback

from lightning_accel.cli import AccelCLI, run

METRIC, DIRECTION = "val/accuracy", "maximize"  # of the config above, as are the options below


def draw(trial: optuna.Trial) -> dict:
    """Return options of ``fit``: the space that is searched, to be changed for other configs."""
    return {
        "model.dropout": trial.suggest_float("dropout", 0.0, 0.5),
        "model.experts.num_experts": trial.suggest_categorical("num_experts", [2, 4, 8]),
        "optimizer.weight_decay": trial.suggest_float("weight_decay", 1e-3, 0.3, log=True),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        usage="%(prog)s [options] -- --config fit.yaml ...",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--trials", type=int, default=20, help="number of runs, with those of --storage")
    parser.add_argument("--storage", default="sqlite:///search.db", help="database that keeps the trials")
    parser.add_argument("arguments", nargs="+", help="of lightning-accel fit, after --")
    given = parser.parse_args()

    def objective(trial: optuna.Trial) -> float:
        prune, made = PyTorchLightningPruningCallback(trial, monitor=METRIC), []
        drawn = [f"--{name}={value}" for name, value in draw(trial).items()]
        status = run(
            ["fit", *given.arguments, *drawn, "--run_report=false"],
            lambda arguments, callbacks: made.append(AccelCLI(arguments, [*callbacks, prune])),
        )
        if status:  # its message is printed
            sys.exit(status)
        logged = made[0].trainer.callback_metrics
        if METRIC not in logged:
            sys.exit(f"METRIC of {__file__} is {METRIC!r}, and the run logs {', '.join(sorted(logged))}")
        return logged[METRIC].item()

    study = optuna.create_study(
        study_name=" ".join(given.arguments), storage=given.storage, load_if_exists=True, direction=DIRECTION,
        pruner=optuna.pruners.MedianPruner(n_warmup_steps=10),
    )  # fmt: skip
    ended = study.get_trials(states=[optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED])
    study.optimize(objective, n_trials=max(0, given.trials - len(ended)))
    print(f"best {METRIC}: {study.best_value:.4f}, with {study.best_params}")


if __name__ == "__main__":
    main()
