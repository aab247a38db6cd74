"""A training step of engine-fsdp on GPUs, as a share of what the GPU can multiply.

The reference is what one would write by hand with the same parts: transformers' model in bfloat16,
torch's variable-length attention, compiled blocks, whole logits in micro-batches, fused AdamW on
the bfloat16 weights. Engine, reference and the ceiling (a product of two 8192 x 8192 matrices of
random bfloat16 numbers) run one after the other in this process, on the same random weights.

Counted are six operations per weight and token (weights that are multiplied: an embedding that is
no head as well does not count) and causal attention, 6 * layers * heads * head_dim * length per
token. What activation checkpointing computes again is not counted.

float32 master weights, gradient and moments and a bfloat16 copy take 18 bytes per weight, so that
all 36 blocks of Qwen3-8B do not fit a GPU of 141 GB (`engine_fsdp.plan`: 168 GB). They do with
moments in 8 bits (128 GB); with float32 moments 26 blocks and the whole head do (132 GB), and
operations are counted for these.

    python benchmarks/fsdp_train.py --kept-logits-gib 6 --output benchmarks/results/fsdp_train.json
    python benchmarks/fsdp_train.py --sizes qwen3-8b --layers 26 --checkpointing full \
        --kept-logits-gib 6 --parts plain --repeats 3 --warmup 1   # or --eight-bit-moments
    torchrun --nproc-per-node 2 benchmarks/fsdp_train.py --kept-logits-gib 6 --parts logprobs
"""

import argparse
import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fsdp_parts import (
    SIZES,
    EngineRun,
    Report,
    ceiling,
    model_config,
    model_folder,
    operations_per_token,
    peak,
    random_model,
    seconds_of,
    synchronize,
    token_rows,
    without_head,
)
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, Qwen3Config

from engine_fsdp.attention_varlen import flash_kernel
from parallel_state import ParallelState
from parallel_state.process_group import init_process_group

PLAIN_TOKENS = 8192
"""Tokens of the reference's micro-batches, whose logits exist as a whole."""

PARTS = ("head", "logprobs", "plain")
"""Of the measurement, after the engine's step: the step without the head, a forward pass, and the
reference."""


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
    config: Qwen3Config,
    rows: list[list[int]],
    device: torch.device,
    *,
    compiled: bool,
    recompute: bool,
) -> Callable[[], None]:
    """The step by hand."""
    AttentionInterface.register("plain_varlen", varlen_attention)
    model = random_model(
        config,
        device,
        attn_implementation="plain_varlen" if device.type == "cuda" else "sdpa",
    )
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", choices=list(SIZES), default="qwen3-1.7b")
    parser.add_argument("--layers", type=int, help="another number of blocks")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--max-tokens", type=int, default=32768, help="of a micro-batch")
    parser.add_argument("--checkpointing", choices=["none", "full", "selective"], default="none")
    parser.add_argument("--kept-logits-gib", type=float, default=0.25)
    parser.add_argument("--eight-bit-moments", action="store_true")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS, help="besides a step")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2, help="steps after the first")
    parser.add_argument("--profile", action="store_true", help="print where a step's time goes")
    parser.add_argument("--output", type=Path, help="JSON file")
    arguments = parser.parse_args()
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if "plain" in arguments.parts and world_size > 1:
        parser.error("the reference is for one rank: leave plain out of --parts")
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
    measure(arguments, device)
    dist.destroy_process_group()


def measure(arguments: argparse.Namespace, device: torch.device) -> None:
    """Ceiling, engine, reference."""
    note = Report(arguments.output)
    config = model_config(arguments.sizes, arguments.layers)
    rows = token_rows(config.vocab_size, arguments.rows, arguments.length)
    compiled = device.type == "cuda" and not arguments.no_compile
    per_second = ceiling(device)
    num_tokens = arguments.rows * arguments.length
    of_ceiling = num_tokens * operations_per_token(config, arguments.length) / per_second
    note(
        sizes=arguments.sizes,
        layers=config.num_hidden_layers,
        layers_of_the_published_model=SIZES[arguments.sizes]["num_hidden_layers"],
        ranks=dist.get_world_size(),
        rows_per_rank=arguments.rows,
        tokens_per_row=arguments.length,
        most_tokens_per_micro_batch=arguments.max_tokens,
        activation_checkpointing=arguments.checkpointing,
        moments="8 bits" if arguments.eight_bit_moments else "float32",
        compiled_blocks=compiled,
        most_kept_logits_GiB=arguments.kept_logits_gib,
        torch=torch.__version__,
        device=torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        ceiling_TFLOP_per_s=per_second / 1e12,
    )
    with note.part("engine"):
        measure_engine(arguments, config, rows, device, note, of_ceiling=of_ceiling)
    if "plain" in arguments.parts:
        gc.collect()
        peak(device, "")
        torch.compiler.reset()
        with note.part("plain"):
            plain = plain_step(
                config,
                rows,
                device,
                compiled=compiled,
                recompute=arguments.checkpointing != "none",
            )
            plain()
            seconds = seconds_of(plain, repeats=arguments.repeats, warmup=arguments.warmup)
            note(
                plain_step_s=seconds,
                plain_share_of_the_ceiling=of_ceiling / seconds,
                **peak(device, "plain"),
            )
            engine_seconds = note.found.get("engine step s")
            if isinstance(engine_seconds, float):
                note(plain_over_engine=seconds / engine_seconds)
    note.finish()


def measure_engine(
    arguments: argparse.Namespace,
    config: Qwen3Config,
    rows: list[list[int]],
    device: torch.device,
    note: Report,
    *,
    of_ceiling: float,
) -> None:
    """The engine's step; and without its head, and its forward pass, if asked for."""
    begin = time.perf_counter()
    with model_folder(config, device) as folder:
        note(model_written_s=time.perf_counter() - begin)
        begin = time.perf_counter()
        run = EngineRun(
            folder,
            rows,
            device,
            max_tokens=arguments.max_tokens,
            compile_blocks=device.type == "cuda" and not arguments.no_compile,
            activation_checkpointing=arguments.checkpointing,
            kept_logits_gib=arguments.kept_logits_gib,
            eight_bit_moments=arguments.eight_bit_moments,
            parallel=ParallelState(dp_size=dist.get_world_size()),
        )
        note(engine_loaded_s=time.perf_counter() - begin)
    begin = time.perf_counter()
    run.train()
    synchronize()
    note(engine_first_step_s=time.perf_counter() - begin)
    peak(device, "")
    seconds = seconds_of(run.train, repeats=arguments.repeats, warmup=arguments.warmup)
    with_head = peak(device, "engine")
    note(
        engine_step_s=seconds,
        engine_tokens_per_s_per_rank=arguments.rows * arguments.length / seconds,
        engine_share_of_the_ceiling=of_ceiling / seconds,
        **with_head,
    )
    if arguments.profile:
        profile(run.train)
    # see `without_head` for the last
    if "head" in arguments.parts and device.type == "cuda" and config.tie_word_embeddings:
        with without_head():
            run.train()
        without = peak(device, "engine_without_head")
        note(
            **without,
            peak_over_that_without_head=with_head["engine_peak_GB"]
            / without["engine_without_head_peak_GB"],
        )
    if "logprobs" in arguments.parts:
        forward_seconds = seconds_of(
            run.logprobs, repeats=arguments.repeats, warmup=max(1, arguments.warmup)
        )
        note(
            engine_logprobs_s=forward_seconds,
            logprobs_rate_over_training_rate=seconds / forward_seconds,
        )


def profile(step: Callable[[], object]) -> None:
    """Kernels by their share of one step."""
    from torch.profiler import ProfilerActivity, profile as recorded  # noqa: PLC0415

    with recorded(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as run:
        step()
        synchronize()
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
