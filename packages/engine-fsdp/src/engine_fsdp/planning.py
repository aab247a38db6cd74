"""What a training step takes of a GPU's memory, before anything is loaded.

The model of config.json is run forward and backward over a micro-batch of the given size with
tensors that have shapes and no data, through this package's own code: attention, head, activation
checkpointing. What is alive then is counted (see `LiveBytes`). What FSDP2 adds is computed.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, final

import attrs
import torch
from torch import Tensor

from engine_fsdp.attention import ATTENTION_NAME, lay_out, register_attention
from engine_fsdp.config import FsdpConfig
from engine_fsdp.eight_bit import BYTES_PER_WEIGHT
from engine_fsdp.head import _chunk_rows
from engine_fsdp.live_bytes import LiveBytes
from engine_fsdp.lora import Adapters
from engine_fsdp.model import PackedCausalLM
from engine_fsdp.training_set import (
    block_matrices,
    eight_bit_weights,
    freeze,
    trained_parameters,
)

_MASTER_BYTES = 4
"""Master weights and gradient are float32, and moments that have not 8 bits."""

_COMPUTE_BYTES = 2
"""Gathered weights are bfloat16."""

_GATHERED_BLOCKS = 3
"""Blocks that are gathered at a time among shards: the one that computes, the one that is fetched
ahead, and the buffer that it arrives in (torch 2.13, fsdp/_fully_shard/_fsdp_collectives.py)."""

_LIBRARY_BYTES = 2**26
"""Workspaces of cuBLAS on a Hopper GPU, which torch counts as allocated (torch 2.11)."""


@final
@attrs.frozen(kw_only=True)
class MemoryPlan:
    """Bytes of one GPU, by what takes them, at the moment when a training step takes most."""

    weights: int
    """Master weights: this rank's shard."""

    gradient: int
    """Added up over micro-batches: this rank's shard."""

    moments: int
    """Of the optimizer: this rank's shard."""

    gathered: int
    """Whole weights in the type of the computation: all of them if there is one shard, else the
    embedding, the head and the blocks at work."""

    activations: int
    """What the blocks keep for the backward pass."""

    head: int
    """What the head keeps for it."""

    working: int
    """The most that comes on top at any time of the forward and backward pass."""

    library: int
    """Workspaces of the matrix products."""

    @property
    def peak(self) -> int:
        """All together."""
        return sum(attrs.astuple(self))

    def __str__(self) -> str:
        """A table in GiB."""
        rows = {**attrs.asdict(self), "peak": self.peak}
        return "\n".join(
            f"{name:<12}{num_bytes / 2**30:9.2f} GiB" for name, num_bytes in rows.items()
        )


def plan(config: FsdpConfig, *, tokens: int, scored_tokens: int | None = None) -> MemoryPlan:
    """Predict the memory of a training step on a GPU, from config.json and the layout alone.

    It is that of a step of several micro-batches after the first step, when gradient and moments
    are there. Memory is what torch counts as allocated; its allocator reserves more.

    Args:
        config: of the engine.
        tokens: of the largest micro-batch.
        scored_tokens: those of them in the loss mask; None for all.

    Raises:
        FileNotFoundError: if the folder lacks config.json.
        ValueError: for what cannot be run without data: compiled blocks, float32, and models with
            experts.
    """
    _check(config)
    with torch.device("meta"):
        model = _empty_model(config)
    adapters = None if config.lora is None else Adapters(model, config.lora)
    del adapters
    freeze(model, config.freeze)
    shards = config.parallel.fsdp_size
    on_device = 0 if config.offload == "parameters" else _MASTER_BYTES
    whole = sum(parameter.numel() for parameter in model.parameters())
    trained = trained_parameters(model)
    by_muon = block_matrices(model) & trained.keys() if config.muon else frozenset[str]()
    small = eight_bit_weights(model) if config.eight_bit_moments else frozenset[str]()
    moments = sum(
        p.numel() * (BYTES_PER_WEIGHT if n in small else _MASTER_BYTES * (1 if n in by_muon else 2))
        for n, p in trained.items()
    )
    kept, head, peak = _run(model, config, tokens, scored_tokens)
    blocks = [sum(p.numel() for p in block.parameters()) for block in model.blocks]
    at_work = min(sum(blocks), _GATHERED_BLOCKS * max(blocks)) if shards > 1 else sum(blocks)
    return MemoryPlan(
        weights=on_device * whole // shards,
        gradient=on_device * sum(p.numel() for p in trained.values()) // shards,
        moments=0 if config.offload == "parameters" else int(moments) // shards,
        gathered=_COMPUTE_BYTES * (whole - sum(blocks) + at_work),
        activations=kept,
        head=head,
        working=peak - kept - head,
        library=_LIBRARY_BYTES,
    )


def _check(config: FsdpConfig) -> None:
    reasons = {
        "compile_blocks": (
            config.compile_blocks,
            "the compiler chooses what they keep; plan with compile_blocks = False: it takes more",
        ),
        "compute_dtype": (
            config.compute_dtype != "bfloat16",
            "its attention depends on the lengths of the sequences; plan with bfloat16",
        ),
    }
    for name, (is_asked, reason) in reasons.items():
        if is_asked:
            message = f"plan: {name} = {getattr(config, name)!r}: {reason}"
            raise ValueError(message)


def _empty_model(config: FsdpConfig) -> PackedCausalLM:
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415  # heavy

    folder = Path(config.model_path)
    if not (folder / "config.json").is_file():
        message = f"{folder}: expected a folder with config.json"
        raise FileNotFoundError(message)
    register_attention()
    settings = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    model: Any = AutoModelForCausalLM.from_config(settings, trust_remote_code=False)
    model.eval().to(torch.bfloat16)
    model.set_attn_implementation(ATTENTION_NAME)
    packed = PackedCausalLM(model, temperature=config.temperature)
    if packed.has_experts:
        message = (
            f"plan: {folder} is a model with experts, whose memory depends on which tokens go where"
        )
        raise ValueError(message)
    return packed


def _run(
    model: PackedCausalLM, config: FsdpConfig, tokens: int, scored_tokens: int | None
) -> tuple[int, int, int]:
    """Bytes that the blocks keep, that the head keeps, and the most at any time."""
    shared = -(-tokens // config.parallel.ulysses_size)
    scored = min(shared, tokens if scored_tokens is None else scored_tokens)
    model.wrap_blocks(checkpointing=config.activation_checkpointing, compiled=False)
    if config.offload_activations:
        inputs = _InputsOfSizes()
        for block in model.blocks:
            block.forward = inputs.wrap(block.forward)
    meta = torch.device("meta")
    ids = torch.zeros(shared, dtype=torch.int64, device=meta)
    packed = lay_out(
        torch.tensor([0, shared], dtype=torch.int32), device=meta, dtype=torch.bfloat16
    )
    live = LiveBytes()
    live.leave_out([*model.parameters(), *model.buffers()])
    _reduce_like_fsdp(model)
    kept = 0

    def after_the_blocks(*_: object) -> None:
        nonlocal kept
        kept = live.now

    model.model.base_model.register_forward_hook(after_the_blocks)
    with live:
        output = model.model.base_model(
            input_ids=ids[None], position_ids=ids[None], use_cache=False, packed=packed
        )
        hidden = output.last_hidden_state[0].index_select(0, ids[:scored])
        weight = model.model.get_output_embeddings().weight
        kept_bytes = int(config.kept_logits_gib * 2**30)
        logprobs = _HeadOfSizes.apply(hidden, weight, kept_bytes)  # type: ignore[no-untyped-call]
        del output, hidden
        head = live.now - kept
        logprobs.sum().backward()
    return kept, head, live.peak


@final
class _InputsOfSizes:
    """What `InputsOnHost` has on the device, of inputs that have no data to be copied.

    That is the one which a block computes with, and the one which left last or comes next.
    """

    def __init__(self) -> None:
        self._num_kept = 0
        self._under_way: Tensor | None = None

    def wrap(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def with_input_on_host(*args: object, **kwargs: object) -> Tensor:
            with torch.autograd.graph.saved_tensors_hooks(self._keep, self._unpack):
                return forward(*args, **kwargs)

        return with_input_on_host

    def _keep(self, tensor: Tensor) -> int | Tensor:
        if not tensor.numel():  # torch 2.11 keeps an empty one beside the input
            return tensor
        self._num_kept += 1
        self._under_way = tensor.detach()
        return self._num_kept

    def _unpack(self, number: int | Tensor) -> Tensor:
        if isinstance(number, Tensor):
            return number
        tensor = self._under_way
        assert tensor is not None  # noqa: S101  # each backward pass begins with the last block
        self._under_way = torch.empty_like(tensor) if number > 1 else None
        return tensor


class _HeadOfSizes(torch.autograd.Function):
    """What `linear_logprobs` has in memory on a GPU, where its arithmetic is generated code."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, kept_bytes: int) -> Tensor:  # noqa: ANN401
        rows = _chunk_rows(weight, None)
        row_bytes = weight.shape[0] * weight.dtype.itemsize
        kept = kept_bytes // (rows * row_bytes) * rows
        if hidden.shape[0] * row_bytes <= kept_bytes:
            kept = hidden.shape[0]
        logits = [
            hidden[at : at + rows] @ weight.t() for at in range(0, min(kept, hidden.shape[0]), rows)
        ]
        if kept < hidden.shape[0]:
            hidden[:rows] @ weight.t()
        ctx.save_for_backward(hidden, weight, *logits)
        ctx.rows = rows
        return hidden.new_empty(hidden.shape[0], dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        del grads
        hidden, weight, *_ = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        logits = hidden[: ctx.rows] @ weight.t()
        grad_logits = torch.empty_like(logits)
        several = hidden.shape[0] > ctx.rows
        grad_weight = torch.empty_like(weight, dtype=torch.float32 if several else weight.dtype)
        del logits, grad_logits
        return grad_hidden, grad_weight.to(weight.dtype), None


def _reduce_like_fsdp(model: PackedCausalLM) -> None:
    """When a block's gradient is complete, copy it to float32 and free it, as FSDP2 does."""
    trained = [p for p in model.parameters() if p.requires_grad]
    inside = [[p for p in block.parameters() if p.requires_grad] for block in model.blocks]
    in_blocks = {id(parameter) for group in inside for parameter in group}
    for group in (*inside, [p for p in trained if id(p) not in in_blocks]):
        _reduce_together(group)


def _reduce_together(group: Sequence[Tensor]) -> None:
    waiting = {id(parameter) for parameter in group}

    def arrived(parameter: Tensor) -> None:
        waiting.discard(id(parameter))
        if not waiting:
            torch.empty(sum(p.numel() for p in group), dtype=torch.float32, device=parameter.device)
            for each in group:
                each.grad = None
            waiting.update(id(each) for each in group)

    for parameter in group:
        parameter.register_post_accumulate_grad_hook(arrived)
