"""Memory of a training step of engine-fsdp on one GPU: the measured peak against the plan.

Random weights of Qwen3's published sizes, bfloat16 compute, packed rows, blocks that are not
compiled. The forward and backward pass is measured once more with the mean of each hidden state in
the place of the head: what the head adds to the peak. Prints a table and writes JSON, one entry per
setting, all in bytes.

    ./run benchmarks/fsdp_memory.py --output benchmarks/results/fsdp_memory.json
    ./run benchmarks/fsdp_memory.py --cases qwen3-1.7b:32768:full --no-parking   # half a minute
"""

import argparse
import gc
import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch
from fsdp_parts import EngineRun, model_config, model_folder, token_rows, without_head

from engine_fsdp import plan
from parallel_state.process_group import init_process_group

ROW_TOKENS = 2048
PARTS = ("logprobs", "forward_backward", "optim_step")


def peak(work: Callable[[], object]) -> dict[str, int]:
    """Allocated before and after, and at the most in between."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return {
        "before": before,
        "peak": torch.cuda.max_memory_allocated(),
        "after": torch.cuda.memory_allocated(),
    }


def measure(case: str, *, parking: bool) -> dict[str, Any]:
    """Peaks of logprobs, of forward_backward and of the step, all moments being there."""
    size, tokens, checkpointing = case.split(":")
    config = model_config(size)
    device = torch.device("cuda", 0)
    with model_folder(config, device) as folder:
        run = EngineRun(
            folder,
            # two micro-batches
            token_rows(config.vocab_size, 2 * int(tokens) // ROW_TOKENS, ROW_TOKENS),
            device,
            max_tokens=int(tokens),
            activation_checkpointing=checkpointing,
        )
        planned = plan(run.engine.config, tokens=int(tokens))
    found: dict[str, Any] = {
        "case": case,
        "plan": {**attrs.asdict(planned), "peak": planned.peak},
    }
    run.train()
    found["logprobs"] = peak(run.logprobs)
    found["forward_backward"] = peak(run.forward_backward)
    found["optim_step"] = peak(run.engine.optim_step)
    with without_head():
        found["forward_backward_without_head"] = peak(run.forward_backward)
    run.engine.optim_step()
    if parking:
        begin = time.perf_counter()
        run.engine.to_host()
        found["to_host_seconds"] = time.perf_counter() - begin
        found["asleep"] = torch.cuda.memory_allocated()
        begin = time.perf_counter()
        run.engine.to_device()
        found["to_device_seconds"] = time.perf_counter() - begin
    return found


def main() -> None:
    """Measure each case in this process, and write down what there is after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cases",
        nargs="+",
        default=[
            *("qwen3-1.7b:16384:none", "qwen3-1.7b:32768:full", "qwen3-0.6b:16384:none"),
            *("qwen3-0.6b:16384:selective", "qwen3-0.6b:32768:full"),
        ],
        metavar="SIZE:TOKENS:CHECKPOINTING",
    )
    parser.add_argument(
        "--no-parking",
        action="store_true",
        help="leave out to_host and to_device, which pin host memory for a quarter of a minute",
    )
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    init_process_group(backend="cpu:gloo,cuda:nccl")
    results: list[dict[str, Any]] = []
    failed: list[str] = []
    for case in arguments.cases:
        try:
            found = measure(case, parking=not arguments.no_parking)
        except torch.OutOfMemoryError:  # the other cases may fit
            traceback.print_exc()
            failed.append(case)
        else:
            results.append(found)
            show(found)
        if arguments.output:
            arguments.output.write_text(json.dumps(results, indent=1) + "\n")
        gc.collect()
        torch.cuda.empty_cache()
    torch.distributed.destroy_process_group()
    if failed:
        raise SystemExit(f"did not fit, see above: {', '.join(failed)}")


def show(found: dict[str, Any]) -> None:
    """A line: GiB, and the two ratios."""
    peaks = {k: round(found[k]["peak"] / 2**30, 2) for k in ("plan", *PARTS)}
    over_plan = found["plan"]["peak"] / max(found[part]["peak"] for part in PARTS)
    over_bare = found["forward_backward"]["peak"] / found["forward_backward_without_head"]["peak"]
    print(
        found["case"],
        peaks,
        f"planned over measured {over_plan:.3f}, peak over that without the head {over_bare:.3f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
