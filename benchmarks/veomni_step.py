r"""A training step and an export of engine-veomni on several GPUs, with ratios from one run.

The model has the layer sizes of Qwen3-30B-A3B, 12 layers, and random weights that are drawn on the
devices; every rank trains 8 sequences of 2048 tokens per step. Beside the steps it measures what
the machine can do: the matrix product and NCCL's all-gather. Prints tables and writes JSON.

    torchrun --nproc-per-node 2 benchmarks/veomni_step.py \
        --output benchmarks/results/veomni_step.json

``--tiny --device cpu`` shows that it runs, and ``--small --export --device cpu`` counts what an
export copies: 128 experts of a layer, four layers.
"""

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import grouped_mm
from veomni_export import measure_export

from engine_veomni import OptimConfig, VeomniConfig, VeomniEngine
from engine_veomni.config import ExpertKernel
from parallel_state import ExtraParallelSizes, ParallelState
from parallel_state.process_group import init_process_group
from rl_contracts.train import LossOutput, PackedBatch

SEQUENCES = 8
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What the model and its batches measure."""

    num_layers: int = 12
    hidden: int = 2048
    inner: int = 768
    num_experts: int = 128
    top_k: int = 8
    num_heads: int = 32
    num_kv_heads: int = 4
    head_dim: int = 128
    vocab: int = 151936
    length: int = 2048

    def flops_per_token(self) -> float:
        """Forward and backward over active weights and causal attention; nothing twice."""
        heads = self.num_heads * self.head_dim
        attention = self.hidden * (2 * heads + 2 * self.num_kv_heads * self.head_dim)
        experts = 3 * self.top_k * self.hidden * self.inner + self.hidden * self.num_experts
        per_layer = 6 * (attention + experts) + 6 * self.length * heads
        return self.num_layers * per_layer + 6 * self.hidden * self.vocab


TINY = Sizes(
    num_layers=2,
    hidden=64,
    inner=32,
    num_experts=8,
    top_k=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab=512,
    length=32,
)

SMALL = Sizes(
    num_layers=4,
    hidden=512,
    inner=192,
    num_experts=128,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    vocab=16384,
    length=32,
)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to train the same step."""

    ep: int
    kernel: ExpertKernel
    checkpointing: bool

    @property
    def name(self) -> str:
        """How tables call it."""
        memory = "checkpointed" if self.checkpointing else "activations kept"
        return f"ep {self.ep}, {self.kernel}, {memory}"


def write_config(folder: Path, sizes: Sizes) -> None:
    """config.json alone: the weights are drawn on the devices."""
    from transformers import Qwen3MoeConfig  # noqa: PLC0415 - heavy

    config = Qwen3MoeConfig.from_dict(
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "vocab_size": sizes.vocab,
            "hidden_size": sizes.hidden,
            "intermediate_size": 3 * sizes.hidden,
            "moe_intermediate_size": sizes.inner,
            "num_hidden_layers": sizes.num_layers,
            "num_attention_heads": sizes.num_heads,
            "num_key_value_heads": sizes.num_kv_heads,
            "head_dim": sizes.head_dim,
            "num_experts": sizes.num_experts,
            "num_experts_per_tok": sizes.top_k,
            "norm_topk_prob": True,
            "tie_word_embeddings": False,
        }
    )
    config.save_pretrained(folder)


@contextmanager
def random_weights() -> Iterator[None]:
    """Engines that are built in this block draw their weights and read none."""
    from veomni.distributed import torch_parallelize as veomni  # noqa: PLC0415 - as engines do

    load = veomni._materialize_and_load_weights  # noqa: SLF001

    def draw(model: torch.nn.Module, _: str, device: str, **settings: object) -> None:
        load(model, None, device, **settings)

    with (
        mock.patch.object(veomni, "_materialize_and_load_weights", draw),
        mock.patch("engine_veomni.build.check_folder"),
    ):
        yield


def batch(sizes: Sizes) -> PackedBatch:
    """Sequences of one length; the loss looks at all tokens but the first of each."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    num_tokens = SEQUENCES * sizes.length
    mask = torch.ones(SEQUENCES, sizes.length, dtype=torch.bool)
    mask[:, 0] = False
    return PackedBatch(
        token_ids=torch.randint(0, sizes.vocab, (num_tokens,), generator=generator),
        positions=torch.arange(sizes.length).repeat(SEQUENCES),
        cu_seqlens=torch.arange(0, num_tokens + 1, sizes.length, dtype=torch.int32),
        loss_mask=mask.flatten(),
        advantages=torch.ones(SEQUENCES),
        rollout_logprobs=torch.zeros(num_tokens),
        trajectory_ids=tuple(map(str, range(SEQUENCES))),
    )


def loss_fn(policy_logprobs: Float[Tensor, " tokens"], given: PackedBatch) -> LossOutput:
    """Mean negative log-probability, up to the masked tokens."""
    total = given.token_ids.shape[0] * dist.get_world_size()
    return LossOutput(loss=-policy_logprobs.sum() / total, metrics={})


def synchronize(device: torch.device) -> None:
    """Wait for the device and for the other ranks."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def seconds(work: Callable[[], object], device: torch.device, *, repeats: int) -> float:
    """Median wall time of `work`, after two repetitions that are not counted."""
    measured = []
    for _ in range(repeats + 2):
        synchronize(device)
        begin = time.perf_counter()
        work()
        synchronize(device)
        measured.append(time.perf_counter() - begin)
    return statistics.median(measured[2:])


def peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    """Most memory that `work` had beside what was there before; 0 on a CPU."""
    if device.type != "cuda":
        work()
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def machine(device: torch.device, *, tiny: bool) -> dict[str, float]:
    """What the matrix units and the links of this machine reach."""
    side = 256 if tiny else 8192
    left, right = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    product_s = seconds(lambda: left @ right, device, repeats=10)
    share = torch.empty((1 if tiny else 256) * MIB, dtype=torch.uint8, device=device)
    whole = share.new_empty(dist.get_world_size() * share.numel())
    gather_s = seconds(lambda: dist.all_gather_into_tensor(whole, share), device, repeats=10)
    received = whole.numel() - share.numel()
    return {
        "matrix_tflops": 2 * side**3 / product_s / 1e12,
        "gather_gbs": received / gather_s / 1e9,
    }


def products(sizes: Sizes, device: torch.device) -> dict[str, float]:
    """TFLOP/s of the grouped product of the first expert matrices, by experts on a rank."""
    rows = SEQUENCES * sizes.length * sizes.top_k
    found = {}
    for num_local in (sizes.num_experts, sizes.num_experts // 2):
        tokens = torch.randn(rows, sizes.hidden, device=device, dtype=torch.bfloat16)
        stack = torch.randn(
            num_local, 2 * sizes.inner, sizes.hidden, device=device, dtype=torch.bfloat16
        )
        ends = torch.arange(1, num_local + 1, device=device, dtype=torch.int32)
        ends *= rows // num_local
        work = 2 * rows * 2 * sizes.inner * sizes.hidden
        grouped_s = seconds(
            partial(grouped_mm, tokens, stack.transpose(1, 2), offs=ends), device, repeats=5
        )
        found[f"grouped_mm, {num_local} experts"] = work / grouped_s / 1e12
        if device.type == "cuda":
            from veomni.ops.kernels.moe._kernels.kernel.group_gemm import (  # noqa: PLC0415
                group_gemm_same_nk,
            )

            triton_s = seconds(
                partial(group_gemm_same_nk, tokens, stack, ends, rows, transpose_b=True),
                device,
                repeats=5,
            )
            found[f"veomni, {num_local} experts"] = work / triton_s / 1e12
    return found


def build(folder: Path, variant: Variant, device: torch.device) -> VeomniEngine:
    """An engine with random weights."""
    config = VeomniConfig(
        model_path=str(folder),
        optim=OptimConfig(learning_rate=1e-6),
        expert_kernel=variant.kernel,
        activation_checkpointing=variant.checkpointing,
        parallel=ParallelState(
            dp_size=dist.get_world_size(),
            extra_parallel_sizes=ExtraParallelSizes.of(ep=variant.ep),
        ),
    )
    with random_weights():
        return VeomniEngine(config, device=device)


def profile(work: Callable[[], object], device: torch.device) -> None:
    """Print where the device's time goes in one repetition, on rank 0."""
    if device.type != "cuda":
        return
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    ) as profiler:
        work()
        torch.cuda.synchronize()
    if dist.get_rank() == 0:
        averages = profiler.key_averages()
        print(
            averages.table(sort_by="self_cuda_time_total", row_limit=28, max_name_column_width=60)
        )


def stack_bytes(sizes: Sizes) -> int:
    """Bytes of all experts in bfloat16."""
    return sizes.num_layers * sizes.num_experts * 3 * sizes.hidden * sizes.inner * 2


def export(engine: VeomniEngine, sizes: Sizes, device: torch.device) -> dict[str, float]:
    """Exports of one engine."""
    return measure_export(
        engine,
        stack_bytes=stack_bytes(sizes),
        seconds=lambda work: seconds(work, device, repeats=3),
        peak_bytes=lambda work: peak_bytes(work, device),
    )


def measure(
    folder: Path,
    variant: Variant,
    sizes: Sizes,
    device: torch.device,
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """Steps and exports of one variant; or exports alone."""
    engine = build(folder, variant, device)
    if arguments.export:
        return export(engine, sizes, device)
    given = [batch(sizes)]

    def step() -> None:
        engine.forward_backward(given, loss_fn)
        engine.optim_step()

    step_s = seconds(step, device, repeats=arguments.repeats)
    if arguments.profile and not variant.checkpointing:
        profile(step, device)
    peak = peak_bytes(step, device)
    resident = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    tokens = SEQUENCES * sizes.length * dist.get_world_size()
    return {
        "step_s": step_s,
        "tokens_per_s": tokens / step_s,
        "tflops_per_rank": tokens * sizes.flops_per_token() / step_s / 1e12 / dist.get_world_size(),
        "peak_gib": (resident + peak) / 2**30,
        **export(engine, sizes, device),
    }


def show_machine(result: dict[str, Any]) -> None:
    """Print what the machine reaches, and the grouped products as shares of it."""
    limits = result["machine"]
    print(
        f"matrix product {limits['matrix_tflops']:.0f} TFLOP/s, "
        f"all-gather {limits['gather_gbs']:.0f} GB/s received"
    )
    for name, tflops in result["products"].items():
        print(f"{name:32} {tflops:6.1f} TFLOP/s {tflops / limits['matrix_tflops']:6.1%}")


def show_variant(name: str, found: dict[str, float], limits: dict[str, float]) -> None:
    """Print one variant as shares of what the machine reaches."""
    limit = limits["gather_gbs"] or 1.0  # 0 on one rank
    step = ""
    if "tokens_per_s" in found:
        step = (
            f"{found['tokens_per_s']:9.0f} tokens/s "
            f"{found['tflops_per_rank'] / limits['matrix_tflops']:6.1%} of the product "
            f"{found['peak_gib']:6.1f} GiB; "
        )
    print(
        f"{name:36} {step}export {found['export_s']:.2f} s "
        f"{found['export_received_gbs'] / limit:6.1%} of the all-gather (its stacks alone "
        f"{found['gather_gbs'] / limit:6.1%}), {found['export_copies']:.0f} copies of "
        f"{found['export_copied_per_byte']:.2f} bytes per byte, {found['export_collectives']:.0f} "
        f"collectives, peak {found['export_peak_mib']:.0f} MiB; with a copy of each expert "
        f"{found['cloned_over_export']:.2f} times as long, {found['cloned_copies']:.0f} copies of "
        f"{found['cloned_copied_per_byte']:.2f}; "
        f"unstreamed {found['unstreamed_peak_mib']:.0f} MiB in {found['unstreamed_s']:.2f} s",
        flush=True,
    )


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="JSON file")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    parser.add_argument("--match", default="", help="only variants whose name holds this")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("--small", action="store_true", help="sizes to measure exports on a CPU by")
    parser.add_argument("--export", action="store_true", help="measure no steps")
    arguments = parser.parse_args()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    sizes = TINY if arguments.tiny else SMALL if arguments.small else Sizes()
    device = torch.device("cpu")
    if arguments.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    init_process_group(
        rank=rank,
        world_size=world_size,
        init_method="env://",
        backend="nccl" if device.type == "cuda" else "gloo",
    )
    result: dict[str, Any] = {
        "sizes": asdict(sizes),
        "ranks": world_size,
        "tokens_per_rank": SEQUENCES * sizes.length,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "machine": machine(device, tiny=arguments.tiny or arguments.small),
        "products": products(sizes, device),
        "variants": {},
    }
    if rank == 0:
        show_machine(result)
    variants = [
        Variant(ep=world_size, kernel="veomni", checkpointing=True),
        Variant(ep=world_size, kernel="grouped_mm", checkpointing=True),
        Variant(ep=world_size, kernel="grouped_mm", checkpointing=False),
        Variant(ep=1, kernel="grouped_mm", checkpointing=False),
        Variant(ep=1, kernel="veomni", checkpointing=True),
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_config(folder, sizes)
        for variant in (each for each in variants if arguments.match in each.name):
            result["variants"][variant.name] = measure(folder, variant, sizes, device, arguments)
            gc.collect()  # the engine, whose parts refer to each other
            if device.type == "cuda":
                torch.cuda.empty_cache()
            if rank == 0:  # what was measured is kept, whatever comes after
                show_variant(variant.name, result["variants"][variant.name], result["machine"])
                if arguments.output:
                    arguments.output.parent.mkdir(parents=True, exist_ok=True)
                    arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
