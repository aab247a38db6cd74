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

    ./run benchmarks/algos_loss.py --output benchmarks/results/algos_loss.json     # a GPU
    ./run benchmarks/algos_loss.py --device cpu --tokens 20000                     # that it runs
"""

import argparse
import importlib
import importlib.util
import json
import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch._inductor import compile_fx, metrics as inductor_metrics
from torch.profiler import ProfilerActivity, profile

from algos_gspo_dapo_grpo import (
    BatchCounts,
    CispoLoss,
    DapoLoss,
    DecoupledPpoLoss,
    GmpoLoss,
    GrpoLoss,
    GspoLoss,
    GspoTokenLoss,
    KlPenalty,
    PolicyLoss,
    Sequences,
    SequenceTruncation,
    TokenTruncation,
    count_batch,
    policy_loss,
)

COMPILE_OPTIONS: dict[str, str | int | bool | Callable[..., object]] = {"combo_kernels": True}
"""As the package's README advises."""

COMPLETION_SHARE = 0.9
"""Tokens in the loss mask; the rest are the prompts'."""

Work = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A loss, and which of the tensors that may be given it is given."""

    name: str
    config: PolicyLoss
    rollout: bool = False
    ref: bool = False
    metrics: bool = True
    large: bool = False
    """Also compiled for any lengths, and at 16 times the tokens, where no cache is enough."""

    @property
    def bytes_per_token(self) -> int:
        """Policy, proximal, mask, gradient, and what else the formula reads."""
        return 4 + 4 + 1 + 4 + 4 * self.rollout + 4 * self.ref


KL = KlPenalty(coefficient=0.04)
CASES = (
    Case(name="dapo", config=DapoLoss(), large=True),
    Case(name="dapo, metrics not read", config=DapoLoss(), metrics=False),
    Case(name="grpo, sequence mean", config=GrpoLoss()),
    Case(
        name="grpo, dual clip, kl, truncated weights",
        config=GrpoLoss(dual_clip=3.0, kl=KL, rollout_correction=TokenTruncation()),
        rollout=True,
        ref=True,
    ),
    Case(name="gspo", config=GspoLoss(), large=True),
    Case(
        name="gspo, kl, sequence weights",
        config=GspoLoss(kl=KL, rollout_correction=SequenceTruncation()),
        rollout=True,
        ref=True,
        large=True,
    ),
    Case(name="gspo_token", config=GspoTokenLoss()),
    Case(name="gmpo", config=GmpoLoss()),
    Case(name="cispo", config=CispoLoss()),
    Case(name="decoupled ppo", config=DecoupledPpoLoss(), rollout=True),
)


class Batch:
    """Packed tokens of sequences whose lengths differ up to sevenfold."""

    def __init__(self, tokens: int, device: torch.device) -> None:
        """Draw a batch; a prompt's share of every sequence is outside the mask."""
        generator = torch.Generator().manual_seed(4)
        num_sequences = max(tokens // 2048, 2)
        shares = torch.rand(num_sequences, generator=generator) + 1 / 6
        lengths = (shares / shares.sum() * tokens).to(torch.int64)
        lengths[-1] += tokens - lengths.sum()
        proximal = -2.0 * torch.rand(tokens, generator=generator) - 0.1

        def near(distance: float) -> Tensor:
            noise = torch.randn(tokens, generator=generator)
            return (proximal + distance * noise).clamp(max=-1e-3).to(device)

        self.tokens = tokens
        self.lengths = lengths
        self.policy = near(0.05).requires_grad_()
        self.proximal = proximal.to(device)
        self.rollout = near(0.02)
        self.ref = near(0.1)
        self.mask = (torch.rand(tokens, generator=generator) < COMPLETION_SHARE).to(device)
        self.advantages = torch.randn(num_sequences, generator=generator).to(device)
        bounds = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        self.cu_seqlens = bounds.to(torch.int32).to(device)
        sequences = Sequences.packed(self.cu_seqlens, num_tokens=tokens)
        self.counts = count_batch(self.mask, sequences)

    def padded(self, values: Tensor) -> Tensor:
        """Values as verl wants them, one row per sequence."""
        rows = torch.split(values, self.lengths.tolist())
        return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def ours(case: Case, batch: Batch, *, kind: str) -> Work:
    """Forward and backward through `policy_loss`."""
    counts: BatchCounts = batch.counts

    def loss_of(  # noqa: PLR0917  # what a graph takes
        policy: Tensor,
        proximal: Tensor,
        rollout: Tensor | None,
        ref: Tensor | None,
        advantages: Tensor,
        mask: Tensor,
        cu_seqlens: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        share = policy_loss(
            policy,
            proximal_logprobs=proximal,
            advantages=advantages,
            loss_mask=mask,
            sequences=Sequences.packed(cu_seqlens, num_tokens=policy.shape[0]),
            config=case.config,
            counts=counts,
            rollout_logprobs=rollout,
            ref_logprobs=ref,
        )
        return share.loss, share.metrics if case.metrics else {}

    function = loss_of
    if kind != "eager":
        function = torch.compile(
            loss_of, fullgraph=True, dynamic=kind == "any lengths", options=COMPILE_OPTIONS
        )

    def work() -> None:
        batch.policy.grad = None
        loss, _ = function(
            batch.policy,
            batch.proximal,
            batch.rollout if case.rollout else None,
            batch.ref if case.ref else None,
            batch.advantages,
            batch.mask,
            batch.cu_seqlens,
        )
        loss.backward()

    return work


def verls(mode: str, batch: Batch, *, compiled: bool) -> Work:
    """Forward and backward through verl's function, on the same tokens in padded rows."""
    core_algos = importlib.import_module("verl.trainer.ppo.core_algos")
    actor_config = importlib.import_module("verl.workers.config").ActorConfig
    clips = (0.2, 0.28) if mode == "vanilla" else (3e-4, 4e-4)
    config = actor_config(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=clips[0],
        clip_ratio_high=clips[1],
    )
    policy = batch.padded(batch.policy.detach()).requires_grad_()
    proximal, mask = batch.padded(batch.proximal), batch.padded(batch.mask).to(torch.float32)
    advantages = batch.advantages[:, None].expand_as(mask).contiguous()
    mean = "token-mean" if mode == "vanilla" else "seq-mean-token-mean"
    function = core_algos.get_policy_loss_fn(mode)
    if compiled:
        function = torch.compile(function, dynamic=False, options=COMPILE_OPTIONS)

    def work() -> None:
        policy.grad = None
        loss, _ = function(proximal, policy, advantages, mask, mean, config, None)
        loss.backward()

    return work


def copy_of(num_bytes: int, device: torch.device) -> Work:
    """Read half of the bytes and write the other half."""
    source = torch.zeros(num_bytes // 8, device=device)
    target = torch.empty_like(source)

    def work() -> None:
        target.copy_(source)

    return work


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
    """Median microseconds of ten replays of a CUDA graph, divided by ten."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        work()
    measured: list[float] = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(10):
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


def measure(
    work: Work,
    floor_bytes: int,
    device: torch.device,
    *,
    repeats: int,
    compiled: bool,
    captured: bool,
) -> dict[str, float | bool]:
    """All figures of one variant."""
    inductor_metrics.reset()
    work()
    result: dict[str, float | bool] = {}
    if compiled:
        result["bytes_passes"] = inductor_metrics.num_bytes_accessed / floor_bytes
    result["wall_us"] = wall(work, device, repeats=repeats)
    if device.type != "cuda":
        return result
    copy = copy_of(floor_bytes, device)
    copy_us, _ = kernels(copy, repeats=repeats)
    result["kernel_us"], result["num_kernels"] = kernels(work, repeats=repeats)
    result["copy_kernel_us"] = copy_us
    result["kernel_passes"] = result["kernel_us"] / copy_us
    result["no_wait"] = without_waiting(work)
    if captured:
        result["graph_us"], result["copy_graph_us"] = (
            graph(work, repeats=repeats),
            graph(copy, repeats=repeats),
        )
        result["graph_passes"] = result["graph_us"] / result["copy_graph_us"]
    return result


def line(name: str, figures: dict[str, float | bool]) -> str:
    """A row of the table."""
    cells = [
        f"{figures[key]:{width}}" if key in figures else " " * 9
        for key, width in (
            ("bytes_passes", "9.2f"),
            ("kernel_passes", "9.2f"),
            ("graph_passes", "9.2f"),
            ("num_kernels", "9.1f"),
            ("kernel_us", "9.1f"),
            ("graph_us", "9.1f"),
            ("wall_us", "9.1f"),
        )
    ]
    return f"{name:48} {' '.join(cells)}  {figures.get('no_wait', '')}"


def write(
    output: Path,
    measured: dict[str, dict[str, float | bool]],
    *,
    tokens: int,
    device: torch.device,
) -> None:
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--only", nargs="*", help="names of cases, in this order")
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
    measured: dict[str, dict[str, float | bool]] = {}
    header = ("bytes", "kernels", "graph", "launches", "kernel us", "graph us", "wall us")
    print(f"{'passes by':48} {' '.join(f'{h:>9}' for h in header)}  no wait")

    def record(name: str, figures: dict[str, float | bool]) -> None:
        measured[name] = figures
        print(line(name, figures), flush=True)
        if arguments.output:  # each time: a machine on loan may go before the end
            write(arguments.output, measured, tokens=arguments.tokens, device=device)

    sizes = [arguments.tokens, *([16 * arguments.tokens] if arguments.large else [])]
    for tokens in sizes:
        batch = Batch(tokens, device)
        by_name = {case.name: case for case in CASES}
        chosen = [
            by_name[name]
            for name in arguments.only or by_name
            if tokens == arguments.tokens or by_name[name].large
        ]
        for case in chosen:
            for kind in ("compiled", *(("any lengths",) if case.large else ()), "eager"):
                torch.compiler.reset()
                record(
                    f"{case.name}, {kind}, {tokens:,}",
                    measure(
                        ours(case, batch, kind=kind),
                        case.bytes_per_token * tokens,
                        device,
                        repeats=arguments.repeats,
                        compiled=kind != "eager",
                        captured=kind != "eager",
                    ),
                )
        if importlib.util.find_spec("verl") is None:
            print("verl is not installed; left out")
            continue
        for kind in ("eager", "compiled"):
            for mode in ("vanilla", "gspo"):
                torch.compiler.reset()
                record(
                    f"verl {mode}, padded, {kind}, {tokens:,}",
                    measure(
                        verls(mode, batch, compiled=kind == "compiled"),
                        13 * tokens,
                        device,
                        repeats=arguments.repeats,
                        compiled=kind == "compiled",
                        captured=False,
                    ),
                )


if __name__ == "__main__":
    main()
