"""A training step of engine-fsdp against a plain transformers loop on the same tokens, on the CPU.

The reference is what one would write by hand: padded rows, all logits, bfloat16 autocast. Both run
in this process on random weights of SmolLM2-135M's sizes (or `--tiny`); CPU seconds, since wall
time on shared cores says little. Prints a table and writes JSON.

    ./run benchmarks/fsdp_step.py --output benchmarks/results/fsdp_step.json
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from engine_fsdp import FsdpConfig, FsdpEngine, OptimConfig
from parallel_state.process_group import init_process_group
from rl_contracts import Completion, PolicyVersion, Trajectory
from rl_contracts.packing import pack
from rl_contracts.train import LossOutput, PackedBatch

PROMPT_TOKENS = 17
COMPLETION_TOKENS = 16
NUM_ROWS = 64


def write_model(folder: Path, *, tiny: bool) -> None:
    """Random weights of SmolLM2-135M's sizes, or of a fraction of them."""
    torch.manual_seed(0)
    config = LlamaConfig.from_dict(
        {
            "vocab_size": 512 if tiny else 49152,
            "hidden_size": 64 if tiny else 576,
            "intermediate_size": 128 if tiny else 1536,
            "num_hidden_layers": 2 if tiny else 30,
            "num_attention_heads": 1 if tiny else 9,
            "num_key_value_heads": 1 if tiny else 3,
            "tie_word_embeddings": True,
            "dtype": "bfloat16",
        }
    )
    model = LlamaForCausalLM(config)
    model.bfloat16()
    model.save_pretrained(folder)


def rows(vocab_size: int) -> list[list[int]]:
    """Token ids of every row."""
    generator = torch.Generator().manual_seed(1)
    shape = (NUM_ROWS, PROMPT_TOKENS + COMPLETION_TOKENS)
    ids: list[list[int]] = torch.randint(0, vocab_size, shape, generator=generator).tolist()
    return ids


def packed(ids: list[list[int]]) -> list[PackedBatch]:
    """The rows as micro-batches of the engine."""
    trajectories = [
        Trajectory.from_completion(
            row[:PROMPT_TOKENS],
            Completion(
                token_ids=tuple(row[PROMPT_TOKENS:]),
                rollout_logprobs=(-1.0,) * COMPLETION_TOKENS,
                policy_versions=(PolicyVersion(0),) * COMPLETION_TOKENS,
                finish_reason="length",
            ),
            trajectory_id=str(index),
            group_id="g",
        )
        for index, row in enumerate(ids)
    ]
    (batches,) = pack(trajectories, [1.0] * len(ids), max_tokens=2112)
    return batches


def loss_fn(policy_logprobs: Float[Tensor, " tokens"], batch: PackedBatch) -> LossOutput:
    """Mean negative log-probability of the completions."""
    total = NUM_ROWS * COMPLETION_TOKENS
    return LossOutput(
        loss=-torch.where(batch.loss_mask, policy_logprobs, 0.0).sum() / total, metrics={}
    )


def cpu_seconds(work: Callable[[], None], *, repeats: int) -> list[float]:
    """CPU time of each repetition, after one that is not counted."""
    work()
    seconds = []
    for _ in range(repeats):
        begin = time.process_time()
        work()
        seconds.append(time.process_time() - begin)
    return seconds


def engine_step(folder: Path, dtype: str, batches: list[PackedBatch]) -> Callable[[], None]:
    """A whole training step of engine-fsdp."""
    config = FsdpConfig(
        model_path=str(folder),
        optim=OptimConfig(learning_rate=1e-6),
        compute_dtype="bfloat16" if dtype == "bfloat16" else "float32",
    )
    engine = FsdpEngine(config, device=torch.device("cpu"))

    def work() -> None:
        engine.forward_backward(batches, loss_fn)
        engine.optim_step()

    return work


def plain_step(folder: Path, ids: list[list[int]], *, rows_at_once: int) -> Callable[[], None]:
    """The same step as a loop over transformers' model."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    tokens = torch.tensor(ids)

    def work() -> None:
        for chunk in tokens.split(rows_at_once):
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(input_ids=chunk).logits
            logprobs = torch.log_softmax(logits[:, PROMPT_TOKENS - 1 : -1].float(), dim=-1)
            scored = logprobs.gather(-1, chunk[:, PROMPT_TOKENS:, None])
            (-scored.sum() / (NUM_ROWS * COMPLETION_TOKENS)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return work


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="JSON file")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tiny", action="store_true", help="small sizes, to see that it runs")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    init_process_group()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder, tiny=arguments.tiny)
        ids = rows(512 if arguments.tiny else 49152)
        batches = packed(ids)
        variants = {
            "engine-fsdp, packed, bfloat16": engine_step(folder, "bfloat16", batches),
            "engine-fsdp, packed, float32": engine_step(folder, "float32", batches),
            "transformers, padded, bfloat16, 8 rows": plain_step(folder, ids, rows_at_once=8),
            "transformers, padded, bfloat16, 64 rows": plain_step(folder, ids, rows_at_once=64),
        }
        measured = {
            name: statistics.median(cpu_seconds(work, repeats=arguments.repeats))
            for name, work in variants.items()
        }
    torch.distributed.destroy_process_group()
    best = measured["engine-fsdp, packed, bfloat16"]
    for name, seconds in measured.items():
        print(f"{name:42} {seconds:7.2f} CPU s   {seconds / best:5.2f}x")
    if arguments.output:
        result = {
            "unit": "CPU seconds per step, median",
            "tokens": NUM_ROWS * (PROMPT_TOKENS + COMPLETION_TOKENS),
            "threads": arguments.threads,
            "repeats": arguments.repeats,
            "tiny": arguments.tiny,
            "torch": torch.__version__,
            "machine": platform.machine(),
            "measured": measured,
        }
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
