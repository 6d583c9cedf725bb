"""Every module under every strategy, precision and set of callbacks.

By default a dozen cells; the slow ones cover every pair of values, the weekly ones are all.
A cell trains as one process does, saves, and resumes, or is refused before training. ``python -m tests.test_matrix``
writes the table of docs/compatibility.md from it.
"""

import re
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import NamedTuple

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor

import lightning_accel.strategies  # noqa: F401  # its short names
from lightning_accel import AmpPrecision, Distillation, ExactResume, PredictionWriter, Pruning, RestoringEarlyStopping
from lightning_accel.callbacks import ExpertLoadMonitor, OneShotPruning, RBMMonitor
from tests.ranks import run_ranks
from tests.strategies.trained import ADAMW, SGD, fit
from tests.tolerance import rounding

PAGE = Path(__file__).parents[1] / "docs" / "compatibility.md"
ROWS = 8  # of a step, over all processes


class Way(NamedTuple):
    """How a strategy is asked for."""

    name: str
    processes: int
    replicas: int  # that share the rows of a step
    trainer: dict


def ways(number: int = 2) -> list[Way]:
    """Each strategy, with so many processes or devices."""
    tensor = ModelParallelStrategy(1, tensor_parallel_size=number, save_distributed_checkpoint=False)
    return [
        Way("single device", 1, 1, {}),
        Way("ddp", number, number, {"strategy": "ddp", "devices": number}),
        Way("accel_ddp", number, number, {"strategy": "accel_ddp", "devices": number}),
        Way("accel_fsdp2", number, number, {"strategy": "accel_fsdp2", "devices": number}),
        Way("accel_expert_parallel", number, number, {"strategy": "accel_expert_parallel", "devices": number}),
        Way("accel_pipeline", number, 1, {"strategy": "accel_pipeline", "devices": number}),
        Way("tensor parallel", number, 1, {"strategy": tensor, "devices": number}),
        Way("accel_dp", 1, 1, {"strategy": "accel_dp", "devices": number}),
    ]


def way_named(name: str, number: int) -> Way:
    return next(one for one in ways(number) if one.name == name)


MODULES = {
    "plain": "a plain LightningModule",
    "classifier": "MoEClassifier",
    "language_model": "MoELanguageModel",
    "sequence": "SequenceModel",
    "belief_network": "DeepBeliefNetwork",
    "graphs": "RelationalGNN",
    "regressor": "MoERegressor",
}
PRECISIONS = {
    "32-true": dict,
    "bf16-mixed": lambda: {"precision": "bf16-mixed"},
    "fp16": lambda: {"plugins": [AmpPrecision("fp16")]},
    "auto": lambda: {"plugins": [AmpPrecision()]},
}
CALLBACKS = {
    "Lightning's": lambda module, folder: [
        EarlyStopping("val/loss", patience=9, check_on_train_epoch_end=False),  # there is none where a run resumes
        LearningRateMonitor(),
    ],
    "ours": lambda module, folder: [
        ExactResume(),
        PredictionWriter(folder / "predictions.csv"),
        *(
            [ExpertLoadMonitor()] if module in ("classifier", "regressor", "language_model") else []
        ),  # which refuses others
        *([RBMMonitor()] if module == "belief_network" else []),  # likewise
    ],
    "compression": lambda module, folder: [
        ExactResume(),
        Pruning(0.5, schedule="one_shot", begin=1),
        RestoringEarlyStopping("val/loss", patience=9, check_on_train_epoch_end=False, restore_best=False),
    ],
    "calibrated": lambda module, folder: [ExactResume(), OneShotPruning(0.5, method="wanda", begin=1)],
    "distillation": lambda module, folder: [ExactResume(), Distillation("initial", weight=0.5)],
}


class Cell(NamedTuple):
    """What is trained together."""

    module: str
    way: str
    precision: str
    callbacks: str


QUICK = [
    Cell("plain", "ddp", "32-true", "compression"),
    Cell("plain", "accel_fsdp2", "32-true", "distillation"),
    Cell("plain", "accel_dp", "auto", "ours"),
    Cell("plain", "accel_expert_parallel", "32-true", "ours"),
    Cell("plain", "tensor parallel", "32-true", "Lightning's"),
    Cell("classifier", "accel_expert_parallel", "bf16-mixed", "ours"),
    Cell("regressor", "accel_pipeline", "32-true", "ours"),
    Cell("graphs", "accel_ddp", "32-true", "calibrated"),
    Cell("language_model", "accel_ddp", "fp16", "ours"),
    Cell("sequence", "accel_pipeline", "32-true", "Lightning's"),
    Cell("sequence", "single device", "32-true", "ours"),
    Cell("belief_network", "accel_ddp", "32-true", "Lightning's"),
    Cell("graphs", "accel_dp", "32-true", "Lightning's"),
]
CHANGING = "compression", "calibrated", "distillation"  # what is trained
REFUSED = {  # patterns of messages, by module, strategy and precision
    ("plain", "accel_expert_parallel", "any"): "Plain has no layer that holds experts.*'accel_fsdp2'",
    ("plain", "tensor parallel", "any"): r"required to override the `configure_model\(\)` hook",
    ("sequence", "accel_expert_parallel", "any"): "SequenceModel has no layer that holds experts.*'accel_fsdp2'",
    ("sequence", "tensor parallel", "any"): "SequenceModel has no plan for tensor parallelism.*'accel_fsdp2'",
    ("belief_network", "accel_expert_parallel", "any"): "DeepBeliefNetwork has no layer that holds experts",
    ("belief_network", "tensor parallel", "any"): "DeepBeliefNetwork has no plan for tensor parallelism.*'accel_fsdp2'",
    ("belief_network", "accel_pipeline", "any"): "DeepBeliefNetwork trains one RBM at a time.*'accel_fsdp2'",
    ("belief_network", "accel_dp", "any"): "DeepBeliefNetwork has one set of chains in each process.*strategy=ddp",
    ("graphs", "accel_expert_parallel", "any"): "RelationalGNN has no layer that holds experts.*'accel_fsdp2'",
    ("graphs", "tensor parallel", "any"): "RelationalGNN has no plan for tensor parallelism.*'accel_fsdp2'",
    ("regressor", "tensor parallel", "any"): "MoERegressor has no plan for tensor parallelism.*'accel_fsdp2'",
    ("regressor", "any", "distillation"): "student gives values of shape .*loss='mse'",
    ("classifier", "tensor parallel", "any"): "MoEClassifier has no plan for tensor parallelism.*'accel_fsdp2'",
}


REFUSED |= {  # by module, strategy and callbacks
    ("belief_network", "any", "distillation"): "training_step of DeepBeliefNetwork does not call",
    ("any", "accel_pipeline", "distillation"): "Distillation does not work under accel_pipeline.*'accel_fsdp2'",
    (
        "language_model",
        "tensor parallel",
        "calibrated",
    ): "configure_model of MoELanguageModel splits its weights.*'accel_fsdp2'",
    ("any", "tensor parallel", "distillation"): "teacher='initial' needs a whole copy.*'accel_fsdp2'",
}


def refusal(module: str, way: str, precision: str, callbacks: str = "ours") -> str | None:
    """The pattern of the first refusal that comes."""
    strategy = ((module, way, precision), (module, way, "any"), ("any", way, precision))
    for key in (("any", way, callbacks), (module, way, callbacks), *strategy, (module, "any", callbacks)):
        if pattern := REFUSED.get(key):
            return pattern
    return None


def run(module, way: str, precision, callbacks, folder, steps, ckpt_path=None, number=2) -> L.Trainer:
    one = way_named(way, number)
    keeper = ModelCheckpoint(folder, filename="{step}", monitor="val/loss", save_top_k=-1)
    options = {"callbacks": [keeper, *CALLBACKS[callbacks](module, folder)], "max_steps": steps}
    options |= one.trainer | PRECISIONS[precision]()
    logger = L.pytorch.loggers.CSVLogger(folder)
    files = {"logger": logger, "enable_checkpointing": True, "default_root_dir": folder, "log_every_n_steps": 1}
    optimizer = ADAMW if precision == "32-true" else SGD  # Adam makes rounding errors of small gradients large
    rows = ROWS // one.replicas
    return fit(module, rows, num_rows=ROWS, optimizer=optimizer, ckpt_path=ckpt_path, **files, **options)


def check_cell(rank, module, way, precision, callbacks, folder):
    """Keep checkpoints of two steps, and of one step that goes on from the checkpoint of the first."""
    run(module, way, precision, callbacks, folder / "through", 2)
    run(module, way, precision, callbacks, folder / "resumed", 2, folder / "through" / "step=1.ckpt")


def check_refused(rank, module, way, precision, callbacks, folder):
    with pytest.raises((ValueError, TypeError)) as error:
        run(module, way, precision, callbacks, folder, 2)
    return str(error.value)


@cache
def of_one_process(module: str, precision: str, callbacks: str) -> dict[str, Tensor]:
    one = run(module, "single device", precision, callbacks, Path("one"), 2)
    return {name: value.clone() for name, value in one.lightning_module.state_dict().items()}


def weights(path: Path) -> dict[str, Tensor]:
    return torch.load(path, weights_only=True)["state_dict"]


def every_cell() -> list[Cell]:
    """Each module, strategy and precision together, with the callbacks in turn; all of it at 32-true."""
    turns = {
        key: ("Lightning's", "ours")[(turn + turn // 2) % 2]
        for turn, key in enumerate(product(MODULES, ("bf16-mixed", "fp16")))
    }
    return [
        Cell(module, way.name, precision, callbacks)
        for module in MODULES
        for way in ways()
        for precision in PRECISIONS
        for callbacks in CALLBACKS
        if precision == "32-true"
        or turns.get((module, precision)) == callbacks
        or (module, precision, callbacks) == ("plain", "auto", "ours")
    ]


def covered(cell: Cell) -> set[object]:
    """Return the pairs of values that the cell trains with, or the message that refuses it."""
    pattern = refusal(*cell)
    return set(combinations(zip(Cell._fields, cell, strict=True), 2)) if pattern is None else {pattern}


def cells() -> list[object]:
    """Return the quick cells, those that cover all pairs with them (slow), and all others (weekly)."""
    others = [cell for cell in every_cell() if cell not in QUICK]
    remaining = set().union(*map(covered, others)) - set().union(*map(covered, QUICK))
    pairwise = []
    while remaining:
        best = max(others, key=lambda cell: len(covered(cell) & remaining))
        pairwise.append(best)
        others.remove(best)
        remaining -= covered(best)
    return [
        *QUICK,
        *(pytest.param(*cell, marks=pytest.mark.slow) for cell in pairwise),
        *(pytest.param(*cell, marks=[pytest.mark.slow, pytest.mark.weekly]) for cell in others),
    ]


def test_quick_cells_hold_every_value_and_no_other():
    for values, known in zip(zip(*QUICK, strict=True), zip(*every_cell(), strict=True), strict=True):
        assert set(values) == set(known)
    assert set(QUICK) <= set(every_cell())


@pytest.mark.sampled(default=6, slow=30)
@pytest.mark.parametrize(("module", "way", "precision", "callbacks"), cells())
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_cell(module, way, precision, callbacks, run_folder):
    processes = way_named(way, 2).processes
    pattern = refusal(module, way, precision, callbacks)
    check = check_cell if pattern is None else check_refused
    arguments = module, way, precision, callbacks, run_folder
    answers = [check(0, *arguments)] if processes == 1 else run_ranks(check, *arguments, world_size=processes)
    if pattern is not None:
        assert all(re.search(pattern, answer, flags=re.DOTALL) for answer in answers), answers[0]
        assert not list(run_folder.glob("**/*.ckpt"))
        return
    plain = callbacks if callbacks in CHANGING else "Lightning's"
    expected, through = of_one_process(module, precision, plain), weights(run_folder / "through" / "step=2.ckpt")
    assert list(through) == list(expected)
    tolerance = 1e-5 if precision == "32-true" else rounding(torch.bfloat16, 4)  # one for each of up to four layers
    require_equal(through, expected, tolerance)
    torch.testing.assert_close(weights(run_folder / "resumed" / "step=2.ckpt"), through, rtol=1e-5, atol=1e-6)


def check_three_steps(rank, module, way, folder):
    run(module, way, "32-true", "Lightning's", folder, 3, number=4)


def cells_of_four() -> list[object]:
    """Return each module with each strategy that does not refuse it; weekly where both stand in another slow cell."""
    few = "accel_expert_parallel", "tensor parallel"  # which take few modules
    return [
        pytest.param(
            module,
            way.name,
            marks=[pytest.mark.slow, *([] if (i + j) % 3 == 0 or way.name in few else [pytest.mark.weekly])],
        )
        for i, module in enumerate(MODULES)
        for j, way in enumerate(ways()[1:])
        if refusal(module, way.name, "32-true") is None
    ]


@pytest.mark.sampled(slow=6)
@pytest.mark.parametrize(("module", "way"), cells_of_four())
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_three_steps_of_four_equal_those_of_one(module, way, run_folder):
    processes = way_named(way, 4).processes
    if processes == 1:
        check_three_steps(0, module, way, run_folder)
    else:
        run_ranks(check_three_steps, module, way, run_folder, world_size=processes)
    one = run(
        module, "single device", "32-true", "Lightning's", run_folder / "one", 3, number=4
    ).lightning_module.state_dict()
    require_equal(weights(run_folder / "step=3.ckpt"), one, 1e-5)


def require_equal(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    for name, value in expected.items():
        if value.is_floating_point():  # counts are those of the first of several devices in one process
            torch.testing.assert_close(actual[name], value, rtol=tolerance, atol=tolerance)


def table() -> str:
    """What works, as Markdown: a row for each strategy, and in each cell the precisions it works with."""
    lines = ["| strategy | " + " | ".join(MODULES.values()) + " |", "| --- |" + " --- |" * len(MODULES)]
    for way in ways():
        row = []
        for module in MODULES:
            works = [precision for precision in PRECISIONS if refusal(module, way.name, precision) is None]
            row.append("all" if len(works) == len(PRECISIONS) else ", ".join(works) or "refused")
        lines.append(f"| {way.name} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def test_table_of_the_readme_is_this_one():
    assert table() in PAGE.read_text(), "run python -m tests.test_matrix"


if __name__ == "__main__":
    begin, end = "<!-- table of tests/test_matrix.py -->\n", "\n<!-- end of table -->"
    before, _, after = PAGE.read_text().partition(begin)
    PAGE.write_text(before + begin + table() + end + after.partition(end)[2])
