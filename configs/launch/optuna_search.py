"""Search hyperparameters of a config with Optuna.

    python configs/launch/optuna_search.py --trials 20 -- --config configs/moe_digits.yaml

What follows ``--`` are the arguments of ``lightning-accel fit``, to which each trial adds what it draws. Trials that
lag behind are ended early. A search that is stopped goes on, since Optuna keeps the trials in ``--storage``.
"""

import argparse

import optuna
from optuna_integration import PyTorchLightningPruningCallback

from lightning_accel.cli import AccelCLI

METRIC = "val/accuracy"


def draw(trial: optuna.Trial) -> dict:
    """Return options of ``fit``: the space that is searched, to be changed for other configs."""
    return {
        "model.dropout": trial.suggest_float("dropout", 0.0, 0.5),
        "model.experts.num_experts": trial.suggest_categorical("num_experts", [2, 4, 8]),
        "optimizer.weight_decay": trial.suggest_float("weight_decay", 1e-3, 0.3, log=True),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20, help="number of runs")
    parser.add_argument("--storage", default="sqlite:///search.db", help="database that keeps the trials")
    parser.add_argument("arguments", nargs="+", help="of lightning-accel fit, after --")
    given = parser.parse_args()

    def objective(trial: optuna.Trial) -> float:
        drawn = [f"--{name}={value}" for name, value in draw(trial).items()]
        prune = PyTorchLightningPruningCallback(trial, monitor=METRIC)
        run = AccelCLI(["fit", *given.arguments, *drawn, "--run_report=false"], callbacks=[prune])
        return run.trainer.callback_metrics[METRIC].item()

    study = optuna.create_study(
        study_name="search", storage=given.storage, load_if_exists=True, direction="maximize",
        pruner=optuna.pruners.MedianPruner(n_warmup_steps=10),
    )  # fmt: skip
    study.optimize(objective, n_trials=given.trials)
    print(f"best {METRIC}: {study.best_value:.4f}, with {study.best_params}")


if __name__ == "__main__":
    main()
