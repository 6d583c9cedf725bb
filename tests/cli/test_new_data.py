"""New data are predicted by the config of a run, without a change to it."""

import csv
import json

import pytest


def lines(rows):
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def table(count, *, with_target):
    rows = [("length", "species")[: 1 + with_target], *[(i, "ab"[i % 2])[: 1 + with_target] for i in range(count)]]
    return "".join(",".join(map(str, row)) + "\n" for row in rows)


def sequences(count, *, with_target):
    return lines({"values": [i, 1, 0]} | ({"target": "ab"[i % 2]} if with_target else {}) for i in range(count))


def graphs(count, *, with_target):
    edges = [[0, 1], [1, 2]], [[0, 1], [1, 2], [0, 2]]
    return lines({"edges": edges[i % 2]} | ({"y": "ab"[i % 2]} if with_target else {}) for i in range(count))


def quantities(count, *, with_target):
    rows = [("length", "price")[: 1 + with_target], *[(i, i / 8)[: 1 + with_target] for i in range(count)]]
    return "".join(",".join(map(str, row)) + "\n" for row in rows)


KINDS = {
    "quantities": (
        "MoERegressor",
        ["--data=TabularDataModule", "--data.target=price", "--data.target_kind=regression"],
        quantities,
        ".csv",
    ),
    "tables": ("MoEClassifier", ["--data=TabularDataModule", "--data.target=species"], table, ".csv"),
    "sequences": ("SequenceModel", ["--data=SequenceDataModule"], sequences, ".jsonl"),
    "graphs": ("RelationalGNN", ["--data=GraphDataModule"], graphs, ".jsonl"),
}


@pytest.mark.sampled(slow=2)
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_new_file_is_predicted(command, run_folder, kind):
    model, data, make, suffix = KINDS[kind]
    (run_folder / f"known{suffix}").write_text(make(60, with_target=True))
    (run_folder / f"new{suffix}").write_text(make(7, with_target=False))
    trainer = ["--trainer.max_epochs=1", "--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"]
    fitted = command("fit", f"--model={model}", *data, f"--data.path=known{suffix}", *trainer)
    assert fitted.status == 0, fitted.err
    (config,) = run_folder.rglob("config_fit.yaml")
    predict = ["predict", f"--config={config}", "--ckpt_path=best"]
    refused = command(*predict, f"--data.path=new{suffix}")
    assert refused.status == 1
    assert "data without a target as predict_path, on the command line --data.predict_path FILE" in refused.err
    predicted = command(*predict, f"--data.predict_path=new{suffix}")
    assert predicted.status == 0, predicted.err
    (path,) = run_folder.rglob("predictions.csv")
    with path.open() as file:
        assert len([*csv.DictReader(file)]) == 7
