"""A training step of engine-fsdp beside that of verl's own FSDP engine, on one GPU.

Both take the mean negative log-probability of the same rows, clip and step once, with float32
master weights and bfloat16 products, in this process and on the same random weights; the norms of
the first gradients are compared. verl (0.9.1 was tried) is imported here only.

verl is given the fastest settings that run where flash-attn is not installed, which its
`use_remove_padding` needs: torch's SDPA, which the mask of rows of one length leaves causal and so
to its flash kernel; a fused head, since the other one takes the softmax of one token at a time;
weights that stay gathered; torch's fused AdamW. `use_torch_compile` is on, as by default; with the
entropy off it has nothing to compile. Its activations of 32768 tokens do not fit 141 GB, so there
are two micro-batches, or one with its gradient checkpointing, which is verl's default.

    python benchmarks/fsdp_verl.py --output benchmarks/results/fsdp_verl.json
    python benchmarks/fsdp_verl.py --variants "checkpointed, triton head" --seconds 60
"""

import argparse
import gc
import time
from dataclasses import dataclass
from functools import partial
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, final

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
    seconds_of,
    synchronize,
    token_rows,
)

from parallel_state.process_group import init_process_group

NORM_TOLERANCE = 0.05
"""Of the norms of the two first gradients, relative: bfloat16 in another order."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Settings of verl's engine."""

    strategy: str = "fsdp2"
    head: str = "triton"
    """`fused_kernel_options.impl_backend`."""
    checkpointed: bool = False
    micro_batches: int = 2


VARIANTS = {
    "activations kept, triton head": Variant(),
    "checkpointed, triton head": Variant(checkpointed=True, micro_batches=1),
    "activations kept, torch head": Variant(head="torch"),
    "activations kept, triton head, fsdp 1": Variant(strategy="fsdp"),
}
"""By what is said of them; likely fast ones first."""


@final
class VerlRun:
    """verl's FSDP engine on given rows, built and called as verl's training worker does it."""

    def __init__(
        self, folder: Path, rows: list[list[int]], device: torch.device, variant: Variant
    ) -> None:
        """Load the engine and put the rows into its tensors."""
        configs = import_module("verl.workers.config")
        engine_class = import_module("verl.workers.engine").FSDPEngineWithLMHead
        self._engine: Any = engine_class(
            model_config=configs.HFModelConfig(
                path=str(folder),
                load_tokenizer=False,
                override_config={"attn_implementation": "sdpa"},
                enable_gradient_checkpointing=variant.checkpointed,
                use_remove_padding=False,
                use_fused_kernels=True,
                fused_kernel_options={"impl_backend": variant.head},
            ),
            engine_config=configs.FSDPEngineConfig(
                strategy=variant.strategy,
                use_dynamic_bsz=False,
                reshard_after_forward=False,
                use_remove_padding=False,
                use_fused_kernels=True,
            ),
            optimizer_config=configs.FSDPOptimizerConfig(
                lr=1e-6, total_training_steps=100, override_optimizer_config={"fused": True}
            ),
            checkpoint_config=import_module("verl.trainer.config").CheckpointConfig(),
        )
        self._engine.initialize()
        self._device = device
        self._rows = rows
        self._micro_batch_size = len(rows) // variant.micro_batches
        self._loss = partial(import_module("verl.workers.utils.losses").sft_loss, config=None)

    def train(self) -> float:
        """A whole training step; the gradient's norm."""
        with self._engine.train_mode(disable_auto_offload=True):
            output = self._engine.train_batch(self._batch(), loss_function=self._loss)
        norm: float = output["metrics"]["grad_norm"]
        return norm

    def _batch(self) -> Any:  # noqa: ANN401  # a TensorDict
        """The rows as verl's data set hands them out; made anew, since a step adds to it."""
        tensordict_utils = import_module("verl.utils.tensordict_utils")
        pad_mode = import_module("verl.utils.dataset.dataset_utils").DatasetPadMode

        def jagged(values: list[torch.Tensor]) -> torch.Tensor:
            return torch.nested.as_nested_tensor(values, layout=torch.jagged)

        return tensordict_utils.get_tensordict(
            tensor_dict={
                "input_ids": jagged([torch.tensor(row) for row in self._rows]),
                "position_ids": jagged([torch.arange(len(row)) for row in self._rows]),
                "loss_mask": jagged(
                    [(torch.arange(len(row)) > 0).to(torch.int64) for row in self._rows]
                ),
            },
            non_tensor_dict={
                "use_remove_padding": False,
                "use_fused_kernels": True,
                "use_dynamic_bsz": False,
                "micro_batch_size_per_gpu": self._micro_batch_size,
                "temperature": 1.0,
                "global_batch_size": len(self._rows),
                "pad_mode": pad_mode.NO_PADDING,
                "pad_token_id": 0,
            },
        )


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", choices=list(SIZES), default="qwen3-1.7b")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--kept-logits-gib", type=float, default=6.0, help="of ours")
    parser.add_argument("--variants", nargs="*", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--seconds", type=float, help="begin no variant of verl's after these")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, help="JSON file")
    return parser.parse_args()


def main() -> None:
    """Measure, print, write."""
    begin = time.perf_counter()
    arguments = parse()
    on_gpu = arguments.device == "cuda"
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    init_process_group(backend="cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    note = Report(arguments.output)
    config = model_config(arguments.sizes)
    rows = token_rows(config.vocab_size, arguments.rows, arguments.length)
    num_tokens = arguments.rows * arguments.length
    per_second = ceiling(device)
    of_ceiling = num_tokens * operations_per_token(config, arguments.length) / per_second
    note(
        sizes=arguments.sizes,
        rows=arguments.rows,
        tokens_per_row=arguments.length,
        torch=torch.__version__,
        verl_version=metadata.version("verl"),
        device=torch.cuda.get_device_name() if on_gpu else "cpu",
        ceiling_TFLOP_per_s=per_second / 1e12,
    )

    def measure(run: EngineRun | VerlRun) -> dict[str, float]:
        first = time.perf_counter()
        norm = run.train()
        synchronize()
        first = time.perf_counter() - first
        seconds = seconds_of(run.train, repeats=arguments.repeats, warmup=1)
        return {
            "first_step_s": first,
            "step_s": seconds,
            "tokens_per_s": num_tokens / seconds,
            "share_of_the_ceiling": of_ceiling / seconds,
            "first_gradient_norm": norm,
            **peak(device, "step"),
        }

    with model_folder(config, device) as folder:
        ours: dict[str, float] = {}
        # First, since verl replaces the forward function of transformers' class.
        with note.part("engine-fsdp"):
            run = EngineRun(
                folder,
                rows,
                device,
                max_tokens=num_tokens,
                compile_blocks=on_gpu,
                kept_logits_gib=arguments.kept_logits_gib,
            )
            ours = measure(run)
            note(ours=ours)
            del run
        torch.compiler.reset()  # compiled blocks keep what they were compiled for
        theirs: dict[str, dict[str, float]] = {}
        for name in arguments.variants:
            gc.collect()
            peak(device, "")
            if arguments.seconds and time.perf_counter() - begin > arguments.seconds:
                print(f"verl, {name}: left out, {arguments.seconds:g} s are over", flush=True)
                continue
            with note.part(f"verl, {name}"):
                found = measure(VerlRun(folder, rows, device, VARIANTS[name]))
                check_gradient(ours, found)
                theirs[name] = found
                note(verl=theirs)
                compare(ours, theirs, note)
    dist.destroy_process_group()
    note.finish()


def compare(ours: dict[str, float], theirs: dict[str, dict[str, float]], note: Report) -> None:
    """Ours, if it ran, over the fastest of theirs."""
    if not ours:
        return
    name, best = max(theirs.items(), key=lambda item: item[1]["tokens_per_s"])
    note(
        fastest_of_verl=name,
        ours_over_verl=ours["tokens_per_s"] / best["tokens_per_s"],
    )


def check_gradient(ours: dict[str, float], found: dict[str, float]) -> None:
    """Refuse a run of verl's that did something else than ours, if that ran.

    Raises:
        ValueError: if it did not compute the same gradient.
    """
    if not ours:
        return
    ratio = found["first_gradient_norm"] / ours["first_gradient_norm"]
    if abs(ratio - 1) > NORM_TOLERANCE:
        message = (
            f"the norm of its first gradient is {ratio:.3f} times that of engine-fsdp: they did "
            "not take the same step"
        )
        raise ValueError(message)


if __name__ == "__main__":
    main()
