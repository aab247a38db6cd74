"""A training step of engine-fsdp on GPUs, as a share of what the GPU can multiply.

The reference is what one would write by hand with the same parts: transformers' model in bfloat16,
torch's variable-length attention, compiled blocks, whole logits in micro-batches, fused AdamW on
the bfloat16 weights. Engine, reference and the ceiling (a product of two 8192 x 8192 matrices of
random bfloat16 numbers) run one after the other in this process, on random weights.

Counted are six operations per weight and token (weights that are multiplied: an embedding that is
no head as well does not count) and causal attention, 6 * layers * heads * head_dim * length per
token. What activation checkpointing computes again is not counted.

    python benchmarks/fsdp_train.py --kept-logits-gib 6 --output benchmarks/results/fsdp_train.json
    torchrun --nproc-per-node 2 benchmarks/fsdp_train.py --kept-logits-gib 6
"""

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AutoModelForCausalLM, Qwen3Config

from engine_fsdp import FsdpConfig, FsdpEngine, OptimConfig
from engine_fsdp.attention_varlen import flash_kernel
from parallel_state import ParallelState
from parallel_state.process_group import init_process_group
from rl_contracts import PolicyVersion, Trajectory
from rl_contracts.packing import pack
from rl_contracts.train import LossOutput, PackedBatch

SIZES: dict[str, dict[str, Any]] = {
    "qwen3-1.7b": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "tie_word_embeddings": True,
    },
}
"""Of Qwen/Qwen3-1.7B and Qwen/Qwen3-8B (their config.json), and one to see that it runs."""

VOCAB_SIZE = 151936
PLAIN_TOKENS = 8192
"""Tokens of the reference's micro-batches, whose logits exist as a whole."""


def model_config(sizes: str, layers: int | None) -> Qwen3Config:
    """Sizes as a transformers config."""
    given = {
        "vocab_size": VOCAB_SIZE,
        "head_dim": 128,
        "num_key_value_heads": 8 if sizes != "tiny" else 1,
        "max_position_embeddings": 40960,
        "dtype": "bfloat16",
        **SIZES[sizes],
    }
    if layers is not None:
        given["num_hidden_layers"] = layers
    return Qwen3Config.from_dict(given)


def write_model(folder: Path, config: Qwen3Config, device: torch.device) -> None:
    """Random weights of a config."""
    torch.manual_seed(0)
    with device:
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def token_rows(num_rows: int, length: int) -> list[list[int]]:
    """Token ids of every row."""
    generator = torch.Generator().manual_seed(1 + int(os.environ.get("RANK", "0")))
    rows: list[list[int]] = torch.randint(
        VOCAB_SIZE, (num_rows, length), generator=generator
    ).tolist()
    return rows


def packed(rows: list[list[int]], *, max_tokens: int, last_only: bool = False) -> list[PackedBatch]:
    """The rows as micro-batches in which every token but the first is learnt from, or the last."""
    trajectories = [
        Trajectory(
            trajectory_id=str(index),
            group_id="g",
            token_ids=tuple(row),
            loss_mask=(False,) + (not last_only,) * (len(row) - 2) + (True,),
            rollout_logprobs=(-1.0,) * len(row),
            oldest_version=PolicyVersion(0),
            newest_version=PolicyVersion(0),
        )
        for index, row in enumerate(rows)
    ]
    (batches,) = pack(trajectories, [1.0] * len(rows), max_tokens=max_tokens)
    return batches


def seconds_of(work: Callable[[], object], *, repeats: int, warmup: int = 2) -> float:
    """Median wall time."""
    for _ in range(warmup):
        work()
    measured = []
    for _ in range(repeats):
        _synchronize()
        begin = time.perf_counter()
        work()
        _synchronize()
        measured.append(time.perf_counter() - begin)
    return statistics.median(measured)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def ceiling(device: torch.device) -> float:
    """Operations per second of a large product of bfloat16 matrices of random numbers.

    Many in a row, after a second of them: clocks follow the load within tenths of a second.
    """
    size, in_a_row = (8192, 100) if device.type == "cuda" else (256, 2)
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))

    def products() -> None:
        for _ in range(in_a_row):
            left @ right

    return in_a_row * 2 * size**3 / seconds_of(products, repeats=5, warmup=7)


def operations_per_token(config: Any, length: int) -> float:  # noqa: ANN401  # transformers' own
    """Of a training step."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    weights = sum(parameter.numel() for parameter in model.parameters())
    if not config.tie_word_embeddings:
        weights -= config.vocab_size * config.hidden_size
    width = config.num_attention_heads * config.head_dim
    return float(6 * weights + 6 * config.num_hidden_layers * width * length)


def varlen_attention(
    _: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    __: Tensor | None,
    **given: Any,  # noqa: ANN401
) -> tuple[Tensor, None]:
    """Variable-length attention of torch, for the reference."""
    states = (part[0].transpose(0, 1) for part in (query, key, value))
    attended = given["kernel"](
        *states, cu_seqlens=given["starts"], max_length=given["longest"], scaling=None
    )
    return attended[None], None


def plain_step(
    folder: Path, rows: list[list[int]], device: torch.device, *, compiled: bool, recompute: bool
) -> Callable[[], None]:
    """The step by hand."""
    AttentionInterface.register("plain_varlen", varlen_attention)
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.bfloat16,
        attn_implementation="plain_varlen" if device.type == "cuda" else "sdpa",
    )
    model.to(device)
    model.train()
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if compiled:
        for block in model.model.layers:
            block.forward = torch.compile(block.forward)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    length = len(rows[0])
    chunks = torch.tensor(rows, device=device).split(max(1, PLAIN_TOKENS // length))
    total = len(rows) * (length - 1)

    def work() -> None:
        for chunk in chunks:
            starts = torch.arange(chunk.shape[0] + 1, device=device, dtype=torch.int32) * length
            positions = torch.arange(length, device=device).repeat(chunk.shape[0])[None]
            hidden = model.model(
                input_ids=chunk.reshape(1, -1),
                position_ids=positions,
                use_cache=False,
                starts=starts,
                longest=length,
                kernel=flash_kernel(),
            ).last_hidden_state
            hidden = hidden.view(*chunk.shape, -1)[:, :-1].flatten(0, 1)
            logits = model.lm_head(hidden).float()
            loss = functional.cross_entropy(logits, chunk[:, 1:].flatten(), reduction="sum")
            (loss / total).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return work


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", choices=list(SIZES), default="qwen3-1.7b")
    parser.add_argument("--layers", type=int, help="another number of blocks")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--max-tokens", type=int, default=32768, help="of a micro-batch")
    parser.add_argument("--checkpointing", choices=["none", "full", "selective"], default="none")
    parser.add_argument("--kept-logits-gib", type=float, default=0.25)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--no-plain", action="store_true", help="the engine only")
    parser.add_argument("--no-logprobs", action="store_true", help="training steps only")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="print where a step's time goes")
    parser.add_argument("--output", type=Path, help="JSON file")
    arguments = parser.parse_args()
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cpu")
    if arguments.device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    init_process_group(
        rank=rank,
        world_size=world_size,
        init_method="env://" if world_size > 1 else None,
        backend="cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
    )
    config = model_config(arguments.sizes, arguments.layers)
    rows = token_rows(arguments.rows, arguments.length)
    with tempfile.TemporaryDirectory() as name:
        folder = [str(Path(name) / "model")]
        if rank == 0:
            write_model(Path(folder[0]), config, device)
        if world_size > 1:
            dist.broadcast_object_list(folder, device=torch.device("cpu"))
        measure(arguments, config, Path(folder[0]), rows, device)
        if world_size > 1:
            dist.barrier()
    dist.destroy_process_group()


def report(result: dict[str, object], output: Path | None, **new: object) -> None:
    """Add to the result, and print and write it at once: the machine may be taken away."""
    result.update({name.replace("_", " "): value for name, value in new.items()})
    if dist.get_rank() == 0:
        for name, value in new.items():
            shown = f"{value:.4g}" if isinstance(value, float) else value
            print(f"{name.replace('_', ' '):40} {shown}", flush=True)
        if output is not None:
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(json.dumps(result, indent=2) + "\n")


def measure(
    arguments: argparse.Namespace,
    config: Qwen3Config,
    folder: Path,
    rows: list[list[int]],
    device: torch.device,
) -> None:
    """Ceiling, engine, reference."""
    note = partial(report, {}, arguments.output)
    per_second = ceiling(device)
    of_ceiling = (
        arguments.rows
        * arguments.length
        * operations_per_token(config, arguments.length)
        / per_second
    )
    note(
        sizes=arguments.sizes,
        layers=config.num_hidden_layers,
        ranks=dist.get_world_size(),
        rows_per_rank=arguments.rows,
        tokens_per_row=arguments.length,
        most_tokens_per_micro_batch=arguments.max_tokens,
        activation_checkpointing=arguments.checkpointing,
        compiled_blocks=device.type == "cuda" and not arguments.no_compile,
        most_kept_logits_GiB=arguments.kept_logits_gib,
        torch=torch.__version__,
        device=torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        ceiling_TFLOP_per_s=per_second / 1e12,
    )
    step = engine_step(arguments, folder, rows, device, note)
    train = partial(step, "training")
    engine_seconds = seconds_of(train, repeats=arguments.repeats)
    with_head = peak(device, "engine")
    note(
        engine_step_s=engine_seconds,
        engine_tokens_per_s_per_rank=arguments.rows * arguments.length / engine_seconds,
        engine_share_of_the_ceiling=of_ceiling / engine_seconds,
        **with_head,
    )
    if device.type == "cuda":
        step("training without the head")
        without_head = peak(device, "engine_without_head")
        note(
            **without_head,
            peak_over_that_without_head=with_head["engine_peak_GB"]
            / without_head["engine_without_head_peak_GB"],
        )
    if arguments.profile:
        profile(train)
    if not arguments.no_logprobs:
        forward_seconds = seconds_of(partial(step, "logprobs"), repeats=arguments.repeats)
        note(
            engine_logprobs_s=forward_seconds,
            logprobs_rate_over_training_rate=engine_seconds / forward_seconds,
        )
    del step, train
    if arguments.no_plain or dist.get_world_size() > 1:
        return
    gc.collect()
    peak(device, "")
    torch.compiler.reset()
    plain = plain_step(
        folder,
        rows,
        device,
        compiled=device.type == "cuda" and not arguments.no_compile,
        recompute=arguments.checkpointing != "none",
    )
    plain_seconds = seconds_of(plain, repeats=arguments.repeats)
    note(
        plain_step_s=plain_seconds,
        plain_share_of_the_ceiling=of_ceiling / plain_seconds,
        plain_over_engine=plain_seconds / engine_seconds,
        **peak(device, "plain"),
    )


def peak(device: torch.device, who: str) -> dict[str, float]:
    """The most memory in use since the last call, if it is a GPU's."""
    if device.type != "cuda":
        return {}
    most = torch.cuda.max_memory_allocated() / 1e9
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return {f"{who}_peak_GB": most}


def engine_step(
    arguments: argparse.Namespace,
    folder: Path,
    rows: list[list[int]],
    device: torch.device,
    note: Callable[..., None],
) -> Callable[[Literal["training", "logprobs", "training without the head"]], None]:
    """What the engine is asked for; compiles on the way."""
    world_size = dist.get_world_size()
    engine = FsdpEngine(
        FsdpConfig(
            model_path=str(folder),
            optim=OptimConfig(learning_rate=1e-6),
            compile_blocks=device.type == "cuda" and not arguments.no_compile,
            activation_checkpointing=arguments.checkpointing,
            kept_logits_gib=arguments.kept_logits_gib,
            parallel=ParallelState(dp_size=world_size),
        ),
        device=device,
    )
    batches, without_head = (
        packed(rows, max_tokens=arguments.max_tokens, last_only=last_only)
        for last_only in (False, True)
    )
    total = arguments.rows * (arguments.length - 1) * world_size

    def loss_fn(policy_logprobs: Float[Tensor, " tokens"], _: PackedBatch) -> LossOutput:
        return LossOutput(loss=-policy_logprobs.sum() / total, metrics={})

    def step(what: Literal["training", "logprobs", "training without the head"]) -> None:
        if what == "logprobs":
            engine.logprobs(batches)
            return
        engine.forward_backward(batches if what == "training" else without_head, loss_fn)
        engine.optim_step()

    begin = time.perf_counter()
    step("training")
    _synchronize()
    note(engine_first_step_s=time.perf_counter() - begin)
    peak(device, "")
    return step


def profile(step: Callable[[], None]) -> None:
    """Kernels by their share of one step."""
    from torch.profiler import ProfilerActivity, profile as recorded  # noqa: PLC0415

    with recorded(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as run:
        step()
        _synchronize()
    kernels: dict[str, list[float]] = {}
    for event in run.events():
        # Spans that the CPU named are on the GPU's side as well; they are no kernels.
        named = ("FSDP::", "Optimizer.", "Torch-Compiled", "## Call")
        if event.device_type.name == "CUDA" and not event.name.startswith(named):
            kernels.setdefault(event.name, []).append(event.device_time / 1e3)
    total = sum(map(sum, kernels.values()))
    print(f"kernels take {total:.1f} ms; total, share, calls, the longest three")
    for name, spent in sorted(kernels.items(), key=lambda item: -sum(item[1]))[:32]:
        longest = " ".join(f"{each:.2f}" for each in sorted(spent)[-3:])
        print(
            f"{sum(spent):7.1f} ms {sum(spent) / total:5.1%} {len(spent):4} [{longest}] {name[:90]}"
        )


if __name__ == "__main__":
    main()
