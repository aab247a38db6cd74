"""Memory of a training step of engine-fsdp on one GPU: the measured peak against the plan.

Random weights of Qwen3's published sizes, bfloat16 compute, packed rows. Prints a table and writes
JSON, one entry per setting, all in bytes.

    ./run benchmarks/fsdp_memory.py --output benchmarks/results/fsdp_memory.json
"""

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from engine_fsdp import FsdpConfig, FsdpEngine, OptimConfig, plan
from parallel_state.process_group import init_process_group
from rl_contracts import PolicyVersion, Trajectory
from rl_contracts.packing import pack
from rl_contracts.train import LossOutput, PackedBatch

SIZES: dict[str, dict[str, int]] = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "vocab_size": 512,
    },
    # huggingface.co/Qwen/Qwen3-0.6B and Qwen3-1.7B, config.json
    "qwen3-0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    },
    "qwen3-1.7b": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    },
}

ROW_TOKENS = 2048
PARTS = ("logprobs", "forward_backward", "optim_step")


def write_model(folder: Path, size: str) -> None:
    """Random weights; zeros would do, but not for a loss that is finite."""
    config = Qwen3Config.from_dict({**SIZES[size], "tie_word_embeddings": True})
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen3ForCausalLM(config)
    model.bfloat16().cpu().save_pretrained(folder)


def batches(
    vocab_size: int, *, num_rows: int, row_tokens: int, max_tokens: int
) -> list[PackedBatch]:
    """Rows of one length, all but the first token scored."""
    rows = [
        Trajectory(
            trajectory_id=str(index),
            group_id="g",
            token_ids=tuple((7 * place + 31 * index) % vocab_size for place in range(row_tokens)),
            loss_mask=(False,) + (True,) * (row_tokens - 1),
            rollout_logprobs=(0.0,) * row_tokens,
            oldest_version=PolicyVersion(0),
            newest_version=PolicyVersion(0),
        )
        for index in range(num_rows)
    ]
    (packed,) = pack(rows, [1.0] * num_rows, max_tokens=max_tokens)
    return packed


def loss_fn(policy_logprobs: Float[Tensor, " tokens"], batch: PackedBatch) -> LossOutput:
    """Mean negative log-probability."""
    return LossOutput(loss=-policy_logprobs.sum() / batch.token_ids.shape[0], metrics={})


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


def measure(folder: Path, packed: list[PackedBatch], settings: dict[str, Any]) -> dict[str, Any]:
    """Peaks of logprobs, of forward_backward and of the step, all moments being there."""
    config = FsdpConfig(model_path=str(folder), optim=OptimConfig(learning_rate=1e-6), **settings)
    device = torch.device("cuda", 0)
    planned = plan(config, tokens=max(batch.token_ids.shape[0] for batch in packed))
    found: dict[str, Any] = {"plan": {**attrs.asdict(planned), "peak": planned.peak}}
    engine = FsdpEngine(config, device=device)
    engine.forward_backward(packed, loss_fn)
    engine.optim_step()
    found["logprobs"] = peak(lambda: engine.logprobs(packed))
    found["forward_backward"] = peak(lambda: engine.forward_backward(packed, loss_fn))
    found["optim_step"] = peak(engine.optim_step)
    begin = time.perf_counter()
    engine.to_host()
    found["to_host_seconds"] = time.perf_counter() - begin
    found["asleep"] = torch.cuda.memory_allocated()
    begin = time.perf_counter()
    engine.to_device()
    found["to_device_seconds"] = time.perf_counter() - begin
    return found


def main() -> None:
    """Measure each case in this process, and write down what there is after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--cases",
        nargs="+",
        default=[
            *("qwen3-1.7b:16384:none", "qwen3-1.7b:32768:full", "qwen3-0.6b:16384:none"),
            *("qwen3-0.6b:16384:selective", "qwen3-0.6b:32768:full"),
        ],
        metavar="SIZE:TOKENS:CHECKPOINTING",
    )
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    init_process_group(backend="cpu:gloo,cuda:nccl")
    results: list[dict[str, Any]] = []
    folders: dict[str, Path] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for case in arguments.cases:
            size, tokens, checkpointing = case.split(":")
            if size not in folders:
                folders[size] = Path(temporary) / size
                write_model(folders[size], size)
            packed = batches(
                SIZES[size]["vocab_size"],
                num_rows=2 * int(tokens) // ROW_TOKENS,  # two micro-batches
                row_tokens=ROW_TOKENS,
                max_tokens=int(tokens),
            )
            found = measure(folders[size], packed, {"activation_checkpointing": checkpointing})
            results.append({"case": case, **found})
            peaks = {k: round(found[k]["peak"] / 2**30, 2) for k in ("plan", *PARTS)}
            ratio = found["plan"]["peak"] / max(found[part]["peak"] for part in PARTS)
            print(case, peaks, f"planned over measured {ratio:.3f}", flush=True)
            if arguments.output:
                arguments.output.write_text(json.dumps(results, indent=1) + "\n")
            gc.collect()
            torch.cuda.empty_cache()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
