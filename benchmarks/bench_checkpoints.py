"""How long does training wait for its checkpoints, and what do they cost in all?

python benchmarks/bench_checkpoints.py [--quick] [--parts whole sharded store] [--rounds 5] [--json FILE]

A module of linear layers with Adam, 600 MB of weights and states (60 with ``--quick``), is trained for 40 steps with a
checkpoint after every tenth, one process a run; subjects take turns.

**whole**: one file on the local disk: Lightning's own, its AsyncCheckpointIO, ours at once and in the background.
**sharded**: two processes with FSDP2, a folder: ours at once and in the background, and ``async_save`` of torch, called
by hand as its documentation shows (which writes to the final place, without a rename).
**store**: one file to S3, moto's server on the same machine (pip install "moto[server]" s3fs): Lightning's two, ours
at once and in the background with a local folder.

Columns: seconds that training waits at the first checkpoint and, median, at the others; seconds that the run takes
longer than without checkpoints, for each of the four, until all is written; memory that it takes beyond that of the run
without, MB; megabytes that lie there at the end. Medians over rounds, and the range.
"""

import argparse
import json
import os
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STEPS, EVERY = 40, 10
SUBJECTS = {
    "whole": ("none", "lightning", "lightning async", "ours", "ours, background"),
    "sharded": ("none", "ours", "torch async_save", "ours, background"),
    "store": ("none", "lightning", "lightning async", "ours", "ours, background"),
}
PAUSE = 3.0  # seconds for which a row of ten steps computes at least, so that there is time to write in


def plugin(subject: str, folder: Path) -> Any:
    from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

    from lightning_accel.strategies import AtomicCheckpointIO, BackgroundCheckpointIO

    copies = folder / "copies"
    return {
        "lightning": TorchCheckpointIO,
        "lightning async": AsyncCheckpointIO,
        "ours": lambda: AtomicCheckpointIO(copies),
        "ours, background": lambda: BackgroundCheckpointIO(copies),
    }.get(subject, TorchCheckpointIO)()


def work(part: str, subject: str, megabytes: int, folder: Path, place: str) -> dict[str, Any] | None:
    """Train once; return seconds and bytes, on the first process."""
    import lightning as L
    import torch
    import torch.distributed as dist
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from lightning_accel import FullyShardedStrategy
    from lightning_accel.strategies.sharding.state import local_state

    torch.set_num_threads(1)
    width = 1024
    layers = max(2, megabytes * 1_000_000 // (width * width * 4 * 3))

    class Layers(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.blocks(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=1e-5, foreach=True)

    class Steps(Callback):
        """Make steps long enough, and note how long each save holds them."""

        def __init__(self) -> None:
            self.waits: list[float] = []
            self.began = 0.0

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            save = trainer.save_checkpoint
            if part == "sharded" and subject == "torch async_save":
                self.group, self.future = dist.new_group(backend="gloo"), None

            def timed(path: Any, *arguments: Any, **options: Any) -> None:
                start = time.perf_counter()
                if subject == "torch async_save":
                    self.by_hand(trainer, path)
                else:
                    save(path, *arguments, **options)
                self.waits.append(time.perf_counter() - start)

            trainer.save_checkpoint = timed

        def by_hand(self, trainer: Any, path: str) -> None:
            from torch.distributed.checkpoint import async_save

            if self.future is not None:
                self.future.result()
            state = local_state(trainer.lightning_module, trainer.optimizers)
            self.future = async_save(state, checkpoint_id=path, process_group=self.group)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            if getattr(self, "future", None) is not None:
                self.future.result()

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            self.began = time.perf_counter()

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            x = torch.randn(256, 256)
            while time.perf_counter() - self.began < PAUSE / EVERY:
                x = torch.tanh(x @ x / 16)

    torch.manual_seed(0)
    steps = Steps()
    keeper = ModelCheckpoint(place, "{step}", every_n_train_steps=EVERY, save_top_k=0 if subject == "none" else 1)
    is_sharded = part == "sharded"
    trainer = L.Trainer(
        accelerator="cpu", devices=2 if is_sharded else 1, logger=False, max_steps=STEPS, callbacks=[keeper, steps],
        strategy=FullyShardedStrategy(checkpoints="sharded") if is_sharded else "auto",
        plugins=[plugin(subject, folder)], enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
    )  # fmt: skip
    rows = DataLoader(TensorDataset(torch.randn(16 * STEPS * 2, width)), batch_size=8)
    begin = time.perf_counter()
    trainer.fit(Layers(), rows)
    seconds = time.perf_counter() - begin
    if not trainer.is_global_zero:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"waits": steps.waits, "seconds": seconds, "peak": peak, "size": size_of(place)}


def size_of(place: str) -> float:
    import fsspec

    fs, path = fsspec.core.url_to_fs(place)
    return float(sum(fs.du(path, total=False).values())) / 1e6 if fs.exists(path) else 0.0


def run(part: str, subject: str, megabytes: int) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(dir=os.environ.get("TMPDIR", "/tmp")))
    place = f"s3://bucket/{folder.name}" if part == "store" else str(folder / "kept")
    script = [__file__, "--worker", part, subject, str(megabytes), str(folder), place]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"] if part == "sharded" else []
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", *launcher, *script], capture_output=True, text=True, timeout=600
        )
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        return dict(json.loads((folder / "result.json").read_text()))
    finally:
        shutil.rmtree(folder)


def serve() -> subprocess.Popen[bytes]:
    """Start moto's server, with a bucket."""
    import s3fs

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
    os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{port}"
    server = subprocess.Popen([sys.executable, "-m", "moto.server", "-p", str(port)], stderr=subprocess.DEVNULL)
    for _ in range(120):
        with socket.socket() as client:
            if client.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.5)
    s3fs.S3FileSystem().mkdir("bucket")
    return server


def measure(part: str, megabytes: int, rounds: int) -> dict[str, list[dict[str, Any]]]:
    server = serve() if part == "store" else None
    try:
        found: dict[str, list[dict[str, Any]]] = {subject: [] for subject in SUBJECTS[part]}
        for number in range(rounds):
            for subject in SUBJECTS[part][:: 1 if number % 2 else -1]:
                found[subject].append(run(part, subject, megabytes))
        return found
    finally:
        if server is not None:
            server.kill()


def middle(values: list[float], digits: int) -> str:
    shown = f"{statistics.median(values):.{digits}f}"
    return shown if len(values) == 1 else f"{shown} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="60 MB, one round")
    parser.add_argument("--parts", nargs="+", default=list(SUBJECTS), choices=list(SUBJECTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        part, subject, megabytes, folder, place = options.worker
        result = work(part, subject, int(megabytes), Path(folder), place)
        if result is not None:
            Path(folder, "result.json").write_text(json.dumps(result))
        return
    everything = {}
    for part in options.parts:
        found = measure(part, 60 if options.quick else 600, 1 if options.quick else options.rounds)
        everything[part] = found
        base = statistics.median(each["seconds"] for each in found["none"])
        peak = statistics.median(each["peak"] for each in found["none"])
        columns = "waits first, s | waits later, s | costs each, s | memory, MB | size, MB"
        print(f"\n| {part} | {columns} |\n|---|---|---|---|---|---|")
        for subject, runs in found.items():
            if subject != "none":
                row = [
                    middle([each["waits"][0] for each in runs], 2),
                    middle([statistics.median(each["waits"][1:]) for each in runs], 2),
                    middle([(each["seconds"] - base) / len(each["waits"]) for each in runs], 2),
                    middle([each["peak"] - peak for each in runs], 0),
                    middle([each["size"] for each in runs], 0),
                ]
                print(f"| {subject} | {' | '.join(row)} |")
    if options.json:
        options.json.write_text(json.dumps(everything))


if __name__ == "__main__":
    main()
