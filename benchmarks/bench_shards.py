"""How fast are shuffled batches of files that are larger than memory, and is each row taken once?

python benchmarks/bench_shards.py [--quick] [--gigabytes 50 --folder DIR] [--cgroup DIR] [--json FILE]

**Rates.** Batches of 256 rows (31 float32 features, a class) of Parquet files, shuffled, on one machine: ours, with two
threads; litdata, of the same files and of its own format, if it is installed, with and without worker processes;
row groups in random order with a buffer of rows that are shuffled, as a loop by hand does it; and the limit, pyarrow's
scan of the files in their order. Subjects take turns; the median of the rounds is quoted.

**An epoch** of ``--gigabytes``: one process takes 30% of the rows and is killed, two take the next 30% and are killed,
four take the rest. Rows have numbers, of which each must be taken once, but for those that do not fill a last batch.
Peak memory is that of each process; ``--cgroup`` puts them into one whose memory is limited.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_accel.data import ShardOptions, TabularDataModule, shard_loader
from lightning_accel.data.shards.blocks import find_blocks

FEATURES = [f"f{number}" for number in range(31)]
GROUP = 1 << 15  # rows of a row group, 4 MB
BATCH = 256
LOST = 37  # batches that a process takes after its last checkpoint, before it is killed


def make(folder: Path, gigabytes: float, file_rows: int = 1 << 21) -> int:
    """Write files of rows with their numbers, 136 bytes each; return the number of rows."""
    folder.mkdir(parents=True, exist_ok=True)
    num_rows = int(gigabytes * 1e9 / 136)
    rng = np.random.default_rng(0)
    for start in range(0, num_rows, file_rows):
        count = min(file_rows, num_rows - start)
        numbers = rng.random((len(FEATURES), count), np.float32)
        columns: dict[str, Any] = dict(zip(FEATURES, numbers, strict=True))
        columns |= {"row": np.arange(start, start + count), "label": rng.integers(0, 10, count, np.int32)}
        path = folder / f"part-{start // file_rows:05d}.parquet"
        pq.write_table(pa.table(columns), path, row_group_size=GROUP, compression="none", use_dictionary=False)
    return num_rows


def collate(table: pa.Table) -> tuple[Tensor, Tensor]:
    features = np.stack([table[name].to_numpy() for name in FEATURES], axis=1)
    return torch.from_numpy(features), torch.from_numpy(table["label"].to_numpy().astype(np.int64))


def collate_numbered(table: pa.Table) -> tuple[Tensor, np.ndarray]:
    return collate(table)[0], table["row"].to_numpy()


def ours(folder: Path) -> Iterator[Any]:
    return iter(shard_loader(folder, BATCH, collate, columns=[*FEATURES, "label"], cache_dir=folder / "cache"))


class ByHand(IterableDataset[Any]):
    """Shuffle row groups, and rows within a buffer of eight of them."""

    def __init__(self, folder: Path) -> None:
        self.files = sorted(folder.glob("*.parquet"))

    def __iter__(self) -> Iterator[Any]:
        rng = np.random.default_rng(0)
        groups = [(file, n) for file in self.files for n in range(pq.ParquetFile(file).num_row_groups)]
        order = rng.permutation(len(groups))
        for start in range(0, len(order), 8):
            read = [
                pq.ParquetFile(groups[i][0]).read_row_group(groups[i][1], [*FEATURES, "label"])
                for i in order[start : start + 8]
            ]
            table = pa.concat_tables(read)
            features, labels = collate(table)
            for rows in torch.from_numpy(rng.permutation(len(labels))).split(BATCH):
                yield features[rows], labels[rows]


def by_hand(folder: Path) -> Iterator[Any]:
    return iter(DataLoader(ByHand(folder), batch_size=None, num_workers=2))


def scan(folder: Path) -> Iterator[Any]:
    data = ds.dataset([str(file) for file in sorted(folder.glob("*.parquet"))])
    for batch in data.to_batches(columns=[*FEATURES, "label"], batch_size=BATCH):
        yield collate(pa.Table.from_batches([batch]))


def tensors_of_row(row: Any) -> tuple[Tensor, Tensor]:
    values = [*row.values()] if isinstance(row, dict) else [*row]
    return torch.tensor(values[: len(FEATURES)]), torch.tensor(values[-1])


def litdata_subjects(folder: Path, sample: Path) -> dict[str, Callable[[Path], Iterator[Any]]]:
    """Return loaders of litdata: of our Parquet files, and of its own format, which is written for it."""
    try:
        import litdata
        from litdata.streaming.item_loader import ParquetLoader
    except ImportError:
        print("litdata is not installed: its rows are left out")
        return {}

    def tensors(number: int) -> Iterator[tuple[Tensor, Tensor]]:
        features, labels = collate(pq.read_table(sorted(folder.glob("*.parquet"))[number]))
        yield from zip(features[:LITDATA_ROWS], labels[:LITDATA_ROWS], strict=True)

    own = sample / "litdata"
    litdata.optimize(tensors, inputs=[0], output_dir=str(own), chunk_bytes="64MB", num_workers=1, start_method="fork")
    (sample / "index").mkdir()
    litdata.index_parquet_dataset(str(folder), str(sample / "index"), num_workers=1)

    def of_own(workers: int) -> Iterator[Any]:
        data = litdata.StreamingDataset(str(own), shuffle=True)
        return iter(litdata.StreamingDataLoader(data, batch_size=BATCH, num_workers=workers))

    def of_parquet(workers: int) -> Iterator[Any]:
        data = litdata.StreamingDataset(
            str(folder),
            item_loader=ParquetLoader(),
            index_path=str(sample / "index"),
            shuffle=True,
            transform=tensors_of_row,
        )
        return iter(
            litdata.StreamingDataLoader(
                data, batch_size=BATCH, num_workers=workers, multiprocessing_context="spawn" if workers else None
            )
        )

    return {
        "litdata, its own format": lambda _: of_own(0),
        "litdata, its own format, 2 workers": lambda _: of_own(2),
        "litdata, Parquet": lambda _: of_parquet(0),
        "litdata, Parquet, 2 workers": lambda _: of_parquet(2),
    }


LITDATA_ROWS = 400_000


def rate(batches: Iterator[Any], seconds: float) -> float:
    """Return rows a second from the first batch on, until ``seconds`` are over or no batch is left."""
    next(batches)
    start, rows = time.perf_counter(), 0
    for features, _ in batches:
        rows += len(features)
        if time.perf_counter() - start > seconds:
            break
    return rows / (time.perf_counter() - start)


def compare(folder: Path, rounds: int, seconds: float, record: list[dict[str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as sample:
        subjects = {"ours": ours, "by hand, 2 workers": by_hand, "scan in order": scan}
        subjects |= litdata_subjects(folder, Path(sample))
        rates: dict[str, list[float]] = {name: [] for name in subjects}
        for _ in range(rounds):
            for name, subject in subjects.items():
                rates[name].append(rate(subject(folder), seconds))
    base = statistics.median(rates["ours"])
    print("| subject | rows/s, median | range | times ours |\n| --- | ---: | ---: | ---: |")
    for name, found in rates.items():
        middle = statistics.median(found)
        print(f"| {name} | {middle:,.0f} | {min(found):,.0f} to {max(found):,.0f} | {middle / base:.2f} |")
        row = {"case": "rates", "subject": name, "metric": "rows", "value": middle, "unit": "1/s"}
        record.append(row | {"baseline": "ours", "ratio": middle / base})
    step_s = 2 * BATCH / base
    mean, most = waits(folder, step_s, int(seconds / step_s))
    print(
        f"\nA step of {step_s * 1e3:.2f} ms, twice what a batch takes, waits {mean:.1%} of it; 99 of 100, < {most:.1%}"
    )
    of_statistics = statistics_rate(folder)
    print(f"Statistics of {len(FEATURES)} columns: {of_statistics:,.0f} rows/s")
    for name, value, unit in (("wait", mean, "step"), ("statistics", of_statistics, "1/s")):
        record.append({"case": name, "subject": "ours", "metric": name, "value": value, "unit": unit})


def waits(folder: Path, step_s: float, steps: int) -> tuple[float, float]:
    """Return the mean and the 99th percentile of what a step waits for its batch, in shares of ``step_s``."""
    batches = ours(folder)
    next(batches)
    found = []
    for _ in range(steps):
        time.sleep(step_s)  # as a step on an accelerator, which leaves the CPU alone
        start = time.perf_counter()
        if next(batches, None) is None:
            break
        found.append((time.perf_counter() - start) / step_s)
    return statistics.mean(found), float(np.quantile(found, 0.99))


def statistics_rate(folder: Path) -> float:
    """Return the rows a second of the pass that collects the statistics of a table."""
    with tempfile.TemporaryDirectory() as cache:
        data = TabularDataModule(folder, "label", exclude="row", shards=ShardOptions(cache_dir=cache))
        start = time.perf_counter()
        data.prepare_data()
        return find_blocks(folder).num_rows / (time.perf_counter() - start)


def read_part(folder: Path, work: Path, replicas: int, rank: int, until: int | None) -> None:
    """Take an epoch from the last checkpoint on, and be killed after that at ``until`` rows of all processes."""
    loader = shard_loader(
        folder,
        BATCH,
        collate_numbered,
        shuffle_bytes=128 << 20,
        cache_dir=work / "cache",
        columns=[*FEATURES, "label", "row"],
    )
    loader.sampler.deal_to(replicas, rank)
    state = work / "state.json"
    if state.exists():
        loader.load_state_dict(json.loads(state.read_text()))
    num_rows = loader.sampler.num_rows
    taken = np.zeros(-(-num_rows // 8), np.uint8)  # a bit for each row
    start, rows, twice, left = time.perf_counter(), 0, 0, LOST
    kept: dict[str, Any] | None = None
    for features, numbers in loader:
        assert torch.isfinite(features).all()
        if kept is None:
            bits = np.uint8(1) << (numbers % 8).astype(np.uint8)
            twice += int(((taken[numbers // 8] & bits) > 0).sum()) + len(numbers) - len(np.unique(numbers))
            np.bitwise_or.at(taken, numbers // 8, bits)
            rows += len(numbers)
            if until is not None and loader.state_dict()["rows"] >= until:
                kept = loader.state_dict()
        else:
            left -= 1
            if not left:
                break
    seconds = time.perf_counter() - start
    taken.tofile(work / f"taken-{replicas}-{rank}.bin")
    status = Path("/proc/self/status").read_text()
    peak = int(status.split("VmHWM:")[1].split()[0]) / 1024
    (work / f"done-{replicas}-{rank}.json").write_text(
        json.dumps({"rows": rows, "twice": twice, "seconds": seconds, "MiB": peak})
    )
    if kept is not None:
        if rank == 0:
            state.write_text(json.dumps(kept))
        os.kill(os.getpid(), signal.SIGKILL)


def epoch(folder: Path, num_rows: int, cgroup: Path | None, record: list[dict[str, Any]]) -> None:
    work = Path(tempfile.mkdtemp(dir=folder.parent))
    print("\n| processes | rows | rows/s, all | MiB of a process, at most |\n| ---: | ---: | ---: | ---: |")
    for replicas, share in ((1, 0.3), (2, 0.6), (4, None)):
        until = [] if share is None else ["--until", str(int(share * num_rows))]
        until += [] if cgroup is None else ["--cgroup", str(cgroup)]
        command = [sys.executable, __file__, "--folder", str(folder), "--part", str(work), str(replicas)]
        running = [subprocess.Popen([*command, str(rank), *until]) for rank in range(replicas)]
        codes = {process.wait() for process in running}
        assert codes == ({0} if share is None else {-signal.SIGKILL}), codes
        done = [json.loads((work / f"done-{replicas}-{rank}.json").read_text()) for rank in range(replicas)]
        rows, peak = sum(one["rows"] for one in done), max(one["MiB"] for one in done)
        speed = rows / max(one["seconds"] for one in done)
        print(f"| {replicas} | {rows:,} | {speed:,.0f} | {peak:.0f} |", flush=True)
        for metric, value, unit in (("rows", speed, "1/s"), ("peak memory", peak, "MiB")):
            record.append(
                {
                    "case": f"epoch, {replicas} processes",
                    "subject": "ours",
                    "metric": metric,
                    "value": value,
                    "unit": unit,
                }
            )
    twice = sum(json.loads(path.read_text())["twice"] for path in work.glob("done-*.json"))
    taken = np.zeros(-(-num_rows // 8), np.uint8)
    for path in work.glob("taken-*.bin"):
        found = np.fromfile(path, np.uint8)
        twice += int(np.bitwise_count(taken & found).sum())
        taken |= found
    once = int(np.bitwise_count(taken).sum())
    left = num_rows - once
    print(f"\n{num_rows:,} rows: {once:,} taken once, {twice:,} twice, {left:,} left, less than a step")
    assert twice == 0
    assert left < 4 * BATCH
    shutil.rmtree(work)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short round, and an epoch of .1 GB")
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the files of the epoch")
    parser.add_argument("--folder", type=Path, help="folder of these files, which is made if it is not there")
    parser.add_argument("--only", choices=["rates", "epoch"], help="one of the two parts")
    parser.add_argument("--json", type=Path, help="file for the rows")
    parser.add_argument("--cgroup", type=Path, help="folder of a control group for the processes of the epoch")
    parser.add_argument("--part", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        if options.cgroup is not None:
            (options.cgroup / "cgroup.procs").write_text(str(os.getpid()))
        work, replicas, rank = options.part
        read_part(options.folder, Path(work), int(replicas), int(rank), options.until)
        return
    record: list[dict[str, Any]] = []
    print(f"torch {torch.__version__}, pyarrow {pa.__version__}, {os.cpu_count()} cores\n")
    with tempfile.TemporaryDirectory() as folder:
        if options.only != "epoch":
            make(Path(folder) / "rates", 0.1 if options.quick else 1.0)
            compare(Path(folder) / "rates", *((1, 1.0) if options.quick else (5, 6.0)), record)
        files = options.folder or Path(folder) / "epoch"
        if options.only != "rates":
            gigabytes = 0.1 if options.quick else options.gigabytes
            epoch(
                files,
                make(files, gigabytes) if not files.exists() else find_blocks(files).num_rows,
                options.cgroup,
                record,
            )
    if options.json:
        options.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
