"""Do kills, wrong configs, malformed data and hostile files end well? An attack on the library, with counts.

python benchmarks/campaign.py [PART ...] [--count N] [--seed S] [--only TEXT] [--jobs N] [--results FILE]

- kills: runs of configs and strategies get SIGKILL or SIGTERM at random moments, one process or all, and go on by
  ``fit --ckpt_path auto``. Every checkpoint must be whole after every kill, none may be lost, and the end must equal
  that of a run that was not killed: weights, optimizer, schedules, and every figure in metrics.csv.
- configs: one leaf of a config is of a wrong type, negative, huge, null, misspelt, a missing path ...: a message and a
  status other than 0 are wanted; a traceback, a hang and accepted nonsense are failures.
- data: malformed and hostile data files, read with bounded memory.
- files: hostile checkpoints and programs; a marker that their code would leave must not be there.

Everything is drawn from --seed. Without --count: 500 kills, 300 configs, all data files and all hostile files.
"""

import argparse
import itertools
import os
import platform
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import campaign_configs
import campaign_files
import campaign_kills
import campaign_process
import torch

DATA_MEMORY = 2 << 30  # bytes beyond what the process has when it begins to read
DATA_SECONDS = 60
CONFIG_SECONDS = 120
KILLS_SECONDS = 2400  # after which no further run is begun


class Part(NamedTuple):
    """What a part of the campaign came to."""

    counts: Counter[str]
    failures: list[str]
    notes: list[str]


def kills(context: Any, folder: Path, count: int, draw: random.Random, only: str, jobs: int) -> Part:
    until = time.monotonic() + KILLS_SECONDS
    subjects = {name: each for name, each in campaign_kills.SUBJECTS.items() if only in name}

    part = Part(Counter(), [], [])

    def whole(name: str) -> None:
        try:
            campaign_kills.run_whole(context, folder / name / "whole", subjects[name])
        except RuntimeError as error:
            part.failures.append(f"{name}: {error}")

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(whole, subjects))
    running = [name for name in subjects if (folder / name / "whole/seconds").exists()]
    if not running:
        return part
    names = itertools.cycle(running)

    def live() -> None:
        name, seed = next(names), draw.randrange(2**32)
        number = min(campaign_kills.KILLS_OF_A_RUN, count - part.counts["kills"])
        place = folder / name / str(seed)
        try:
            outcome = campaign_kills.kill_and_compare(
                context, place, subjects[name], folder / name / "whole", number, random.Random(seed)
            )
        except Exception as error:  # the campaign goes on with the next run
            part.failures.append(f"{name}, seed {seed}: {type(error).__name__}: {error}")
            return
        part.counts["kills"] += outcome.kills
        part.counts["runs that came to their end"] += 1
        part.counts["runs with a failure"] += bool(outcome.failures)
        part.failures.extend(f"{name}, seed {seed}: {each}" for each in outcome.failures)
        part.notes.extend(f"{name}: {each}" for each in outcome.others)
        if not outcome.failures:
            shutil.rmtree(place)
        print(f"  {part.counts['kills']} kills, {name}: {len(outcome.failures)} failures", flush=True)

    def work(_: int) -> None:
        while part.counts["kills"] < count and time.monotonic() < until:
            live()

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(work, range(jobs)))
    return part


def configs(context: Any, folder: Path, count: int, draw: random.Random, only: str, jobs: int) -> Part:
    part = Part(Counter(), [], [])

    def try_one(numbered: tuple[int, campaign_configs.Mutation]) -> None:
        number, mutation = numbered
        place = folder / str(number)
        place.mkdir(parents=True)
        (place / "config.yaml").write_text(campaign_configs.mutated(mutation))
        ended = campaign_process.run(
            context, place, campaign_process.command_line, ["fit", "--config", "config.yaml"], seconds=CONFIG_SECONDS
        )
        verdict = campaign_configs.verdict(mutation, ended)
        part.counts[verdict] += 1
        if verdict == "accepted":
            part.notes.append(f"accepted: {mutation}")
        elif verdict != "refused":
            part.failures.append(f"{verdict}: {mutation}\n    {ended.output.strip()[-400:]}")
        shutil.rmtree(place)

    drawn = [each for each in campaign_configs.sampled(count, draw) if only in str(each)]
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(try_one, enumerate(drawn)))
    return part


def read_file(name: str, memory_bytes: int) -> int:
    """Read the file of one case; the status says how it ended, for :func:`data`."""
    import malformed_data

    case = next(case for case in malformed_data.cases() if case.name == name)
    path = case.write(Path.cwd())
    campaign_process.bound_memory(memory_bytes)
    try:
        case.read(path)
    except (ValueError, TypeError) as error:
        print(f"{type(error).__name__}: {error}"[:2000])
        is_named = path.name in str(error) or path.stem in str(error)
        return (10 if is_named else 11) if len(str(error)) < 1500 else 12
    except MemoryError as error:
        print(f"MemoryError: {error}")
        return 13
    return 0


def data(context: Any, folder: Path, count: int, draw: random.Random, only: str, jobs: int) -> Part:
    import malformed_data

    part = Part(Counter(), [], [])
    wanted = {True: (0,), False: (10,), None: (0, 10)}
    words = {
        0: "read",
        10: "clear error",
        11: "error without the file's name",
        12: "endless message",
        13: "memory bomb",
    }

    def try_one(numbered: tuple[int, Any]) -> None:
        number, case = numbered
        place = folder / str(number)
        ended = campaign_process.run(context, place, read_file, case.name, DATA_MEMORY, seconds=DATA_SECONDS)
        word = "hang" if ended.status is None else words.get(ended.status, f"crash ({ended.status})")
        part.counts[word] += 1
        if ended.status not in wanted[case.accept]:
            part.failures.append(f"{word}: {case.name}\n    {ended.output.strip()[-400:]}")
            print(f"  {number} of {len(cases)}, {part.failures[-1]}", flush=True)
        shutil.rmtree(place)

    cases = [case for case in malformed_data.cases() if only in case.name]
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(try_one, enumerate(cases[:count])))
    return part


def files(context: Any, folder: Path, count: int, draw: random.Random, only: str, jobs: int) -> Part:
    part = Part(Counter(), [], [])

    def try_one(numbered: tuple[int, campaign_files.Attack]) -> None:
        number, attack = numbered
        place = folder / str(number)
        place.mkdir(parents=True)
        ended = attack.run(place)
        has_run = (place / campaign_files.MARKER).exists()
        word = "code ran" if has_run else "hang" if ended.status is None else "refused" if ended.status else "read"
        part.counts[word] += 1
        if has_run or ended.status is None or ended.status < 0 or ended.has_traceback:
            part.failures.append(f"{word}: {attack.name}\n    {ended.output.strip()[-400:]}")
        elif word == "read":
            part.notes.append(f"read: {attack.name}")

    attacks = [each for each in campaign_files.attacks(context, folder / "sound") if only in each.name]
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(try_one, enumerate(attacks[:count])))
    return part


PARTS: dict[str, tuple[Callable[..., Part], int]] = {
    "kills": (kills, 500), "configs": (configs, 300), "data": (data, 10**6), "files": (files, 10**6),
}  # fmt: skip


def report(parts: dict[str, Part], seed: int, seconds: float) -> str:
    lines = [
        f"# Campaign of {time.strftime('%Y-%m-%d')}", "",
        f"`python benchmarks/campaign.py {' '.join(parts)} --seed {seed}`, {seconds / 60:.0f} minutes, "
        f"{os.cpu_count()} cores of {_cpu()}, torch {torch.__version__}.", "",
    ]  # fmt: skip
    for name, part in parts.items():
        lines += [f"## {name}", "", "| outcome | count |", "| --- | ---: |"]
        lines += [f"| {outcome} | {number} |" for outcome, number in sorted(part.counts.items())]
        lines += [f"| failures | {len(part.failures)} |", ""]
        lines += [f"- {each}" for each in sorted(part.failures)]
        if part.notes:
            lines += ["", "Besides, no failures:", "", *(f"- {each}" for each in sorted(set(part.notes)))]
        lines += [""]
    return "\n".join(lines).rstrip() + "\n"


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; by default all")
    parser.add_argument("--count", type=int, help="kills, configs or files")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="what a subject's or case's name holds")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    parser.add_argument("--results", type=Path, help="a Markdown file to write")
    options = parser.parse_args(arguments)
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    os.environ["OMP_NUM_THREADS"] = "1"
    context = campaign_process.server()
    began, parts = time.monotonic(), {}
    folder = Path(tempfile.mkdtemp(prefix="campaign-"))
    for name in options.parts or PARTS:
        function, count = PARTS[name]
        print(f"{name} in {folder / name}", flush=True)
        (folder / name).mkdir()
        draw = random.Random(f"{options.seed} {name}")
        parts[name] = function(context, folder / name, options.count or count, draw, options.only, options.jobs)
    text = report(parts, options.seed, time.monotonic() - began)
    print(text)
    if options.results:
        options.results.write_text(text)
    failed = any(part.failures for part in parts.values())
    if not failed:
        shutil.rmtree(folder)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
