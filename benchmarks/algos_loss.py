"""Passes over the data of a whole policy loss, forward and backward, on packed tokens.

A *pass* is what has to be moved at least: every input that the formula reads, once (the
log-probabilities and the loss mask), and the gradient, written once. Three ratios against it:

    bytes    what the compiled kernels read and write, by inductor's own count, over those bytes
    kernels  time that the GPU spends in kernels, over that of a plain copy of as many bytes
    graph    the same for the replay of a CUDA graph, gaps between kernels included

Three passes at most is what the package promises of a compiled loss at a million tokens. The
same tokens go through verl's functions, which want them padded and read their metrics back from
the device; verl is imported here only, and left out if it is not installed. `wall` is the time of
a plain call, which for kernels this short is mostly Python's.

What matters most comes first, and each figure is written as soon as it is known: all chosen losses
compiled, verl's, ours without compiling, compiled for any lengths, verl's compiled.

    ./run benchmarks/algos_loss.py --output benchmarks/results/algos_loss.json     # a GPU
    ./run benchmarks/algos_loss.py --device cpu --tokens 20000                     # that it runs
"""

import argparse
import importlib.util
import json
import logging
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from algos_variants import CASES, COMPILE_OPTIONS, Batch, Case, Work, copy_of, ours, verls
from torch._inductor import compile_fx, metrics as inductor_metrics
from torch.profiler import ProfilerActivity, profile

Figures = dict[str, float | bool]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One row of the table."""

    name: str
    make: Callable[[], Work]
    floor_bytes: int
    compiled: bool
    captured: bool
    against: str | None = None
    """Name of our row with the same formula."""


def wall(work: Work, device: torch.device, *, repeats: int) -> float:
    """Median microseconds of a call."""
    measured: list[float] = []
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        measured.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(measured)


def kernels(work: Work, *, repeats: int) -> tuple[float, float]:
    """Microseconds in kernels, and kernels, per call. The accumulation of no gradient is in it."""
    work()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(repeats):
            work()
        torch.cuda.synchronize()
    events = [e for e in profiler.events() if e.device_type.name == "CUDA"]
    return sum(e.device_time for e in events) / repeats, len(events) / repeats


def graph(work: Work, *, repeats: int) -> float:
    """Median microseconds of a call, ten of which are replayed as one CUDA graph.

    Of one copy alone the replay would be bound by the host, which begins it.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        for _ in range(10):
            work()
    measured: list[float] = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        captured.replay()
        end.record()
        torch.cuda.synchronize()
        measured.append(begin.elapsed_time(end) * 1e3 / 10)
    return statistics.median(measured)


def without_waiting(work: Work) -> bool:
    """Whether a call never makes the host wait for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        work()
    except RuntimeError as error:
        print(f"  waits for the device: {error}".splitlines()[0])
        return False
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return True


@cache
def copy_times(num_bytes: int, device: torch.device, *, repeats: int) -> tuple[float, float]:
    """Microseconds of a plain copy: in its kernel, and as a replayed graph."""
    copy = copy_of(num_bytes, device)
    return kernels(copy, repeats=repeats)[0], graph(copy, repeats=repeats)


def measure(variant: Variant, result: Figures, device: torch.device, *, repeats: int) -> None:
    """Fill in all figures of one variant."""
    work = variant.make()
    inductor_metrics.reset()
    begin = time.perf_counter()
    work()
    result["first_call_s"] = time.perf_counter() - begin
    if variant.compiled:
        result["bytes_passes"] = inductor_metrics.num_bytes_accessed / variant.floor_bytes
    result["wall_us"] = wall(work, device, repeats=repeats)
    if device.type != "cuda":
        return
    copy_us, copy_graph_us = copy_times(variant.floor_bytes, device, repeats=repeats)
    result["kernel_us"], result["num_kernels"] = kernels(work, repeats=repeats)
    result["copy_kernel_us"] = copy_us
    result["kernel_passes"] = result["kernel_us"] / copy_us
    result["no_wait"] = without_waiting(work)
    if variant.captured:
        result["graph_us"] = graph(work, repeats=repeats)
        result["copy_graph_us"] = copy_graph_us
        result["graph_passes"] = result["graph_us"] / copy_graph_us


def line(name: str, figures: Figures) -> str:
    """A row of the table."""
    cells = [
        f"{figures[key]:9.{digits}f}" if key in figures else " " * 9
        for key, digits in (
            ("bytes_passes", 2),
            ("kernel_passes", 2),
            ("graph_passes", 2),
            ("num_kernels", 1),
            ("kernel_us", 1),
            ("graph_us", 1),
            ("wall_us", 1),
            ("kernels_over_ours", 2),
            ("wall_over_ours", 2),
        )
    ]
    return f"{name:60} {' '.join(cells)}  {figures.get('no_wait', '')}"


def variants(cases: list[Case], batch: Batch) -> Iterator[Variant]:
    """What is measured of these tokens, in this order."""
    tokens = batch.tokens
    with_verl = importlib.util.find_spec("verl") is not None

    def of_ours(kind: str) -> Iterator[Variant]:
        for case in cases:
            if kind != "any lengths" or case.large:
                yield Variant(
                    name=f"{case.name}, {kind}, {tokens:,}",
                    make=partial(ours, case, batch, kind=kind),
                    floor_bytes=case.bytes_per_token * tokens,
                    compiled=kind != "eager",
                    captured=kind != "eager",
                )

    def of_verl(kind: str) -> Iterator[Variant]:
        for case in cases:
            if case.verl is not None and with_verl:
                yield Variant(
                    name=f"verl {case.verl.mode}, padded, {kind}, {tokens:,}",
                    make=partial(verls, case.verl, batch, compiled=kind == "compiled"),
                    floor_bytes=case.bytes_per_token * tokens,
                    compiled=kind == "compiled",
                    captured=False,
                    against=f"{case.name}, compiled, {tokens:,}",
                )

    if not with_verl:
        print("verl is not installed; left out")
    yield from of_ours("compiled")
    yield from of_verl("eager")
    yield from of_ours("eager")
    yield from of_ours("any lengths")
    yield from of_verl("compiled")


def write(output: Path, measured: dict[str, Figures], *, tokens: int, device: torch.device) -> None:
    """What was measured so far, as JSON."""
    result = {
        "unit": "passes: multiples of reading every input and writing the gradient, once each",
        "tokens": tokens,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "compile_options": COMPILE_OPTIONS,
        "measured": measured,
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Measure, print, write."""
    begin = time.perf_counter()
    by_name = {case.name: case for case in CASES}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--only", nargs="*", choices=list(by_name), help="cases, in this order")
    parser.add_argument("--seconds", type=float, help="begin no variant after these")
    parser.add_argument(
        "--large", action="store_true", help="some cases at 16 times the tokens too"
    )
    parser.add_argument("--output", type=Path, help="JSON file")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    torch.compiler.config.force_disable_caches = True  # a hit counts no bytes
    # Inductor counts bytes only for this logger.
    compile_fx.inductor_metrics_log.setLevel(logging.INFO)
    compile_fx.inductor_metrics_log.propagate = False
    measured: dict[str, Figures] = {}
    failed: list[str] = []
    header = (
        *("bytes", "kernels", "graph", "launches", "kernel us", "graph us", "wall us"),
        *("over ours", "its wall"),
    )
    print(f"{'passes by':60} {' '.join(f'{h:>9}' for h in header)}  no wait")
    for tokens in [arguments.tokens, *([16 * arguments.tokens] if arguments.large else [])]:
        chosen = [by_name[name] for name in arguments.only or by_name]
        cases = [case for case in chosen if tokens == arguments.tokens or case.large]
        for variant in variants(cases, Batch(tokens, device)):
            if arguments.seconds and time.perf_counter() - begin > arguments.seconds:
                print(f"{variant.name:60} left out: {arguments.seconds:g} s are over", flush=True)
                continue
            torch.compiler.reset()
            figures = measured.setdefault(variant.name, {})
            try:
                measure(variant, figures, device, repeats=arguments.repeats)
            except Exception:  # noqa: BLE001  # named at the end; the machine may not come back
                traceback.print_exc()
                failed.append(variant.name)
            for key, ratio in (("kernel_us", "kernels_over_ours"), ("wall_us", "wall_over_ours")):
                if variant.against and key in figures and key in measured.get(variant.against, {}):
                    figures[ratio] = figures[key] / measured[variant.against][key]
            print(line(variant.name, figures), flush=True)
            if arguments.output:  # each time: a machine on loan may go before the end
                write(arguments.output, measured, tokens=arguments.tokens, device=device)
    print(f"{time.perf_counter() - begin:.0f} s")
    if failed:
        raise SystemExit(f"failed, see above: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
