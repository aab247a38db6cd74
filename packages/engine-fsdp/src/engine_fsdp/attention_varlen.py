"""Attention over packed sequences on GPUs: torch's own kernel for sequences of any length.

`torch.nn.attention.varlen` is a flash attention that torch brings along, for bfloat16 (torch 2.10
and later). Its arguments changed: early versions say ``is_causal=True`` and take no scale, 2.11
says ``window_size=(-1, 0)``, and 2.13 wants ``enable_gqa=True`` where key and value have fewer
heads than the query, which the kernel takes in every version. So they are read off the installed
function, once. 2.11 ran on an H200; of the others the signatures were read.
"""

import inspect
from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise
from typing import Protocol, cast, final

import torch
from jaxtyping import Float, Int
from torch import Tensor


class VarlenKernel(Protocol):
    """Causal attention within each sequence; `torch.compile` can look through it."""

    def __call__(
        self,
        query: Float[Tensor, "tokens heads dim"],
        key: Float[Tensor, "tokens kv_heads dim"],
        value: Float[Tensor, "tokens kv_heads dim"],
        *,
        cu_seqlens: Int[Tensor, " sequences_plus_1"],
        max_length: int,
        scaling: float | None,
    ) -> Float[Tensor, "tokens heads dim"]:
        """Attend; `cu_seqlens` is int32, and `max_length` at least the longest sequence's."""


@final
class PackedVarlen:
    """Where the sequences of one micro-batch begin.

    Not a dataclass: FSDP2 copies the dataclasses among its modules' arguments.
    """

    __slots__ = ("cu_seqlens", "kernel", "max_length", "num_calls")

    def __init__(
        self,
        *,
        cu_seqlens: Int[Tensor, " sequences_plus_1"],
        max_length: int,
        kernel: VarlenKernel,
    ) -> None:
        self.cu_seqlens = cu_seqlens
        """int32, on the device."""
        self.max_length = max_length
        """Tokens of the longest sequence, known without asking the device."""
        self.kernel = kernel
        """What attends."""
        self.num_calls = 0
        """Attention calls that used this layout; those of compiled blocks are not counted."""

    @classmethod
    def of(
        cls, cu_seqlens: Int[Tensor, " sequences_plus_1"], device: torch.device
    ) -> "PackedVarlen":
        """Lay out the sequences that begin at `cu_seqlens`, a tensor on the CPU."""
        longest = max(end - start for start, end in pairwise(cu_seqlens.tolist()))
        starts = cu_seqlens.to(device, torch.int32)
        return cls(cu_seqlens=starts, max_length=longest, kernel=flash_kernel())

    def attend(
        self,
        query: Float[Tensor, "tokens heads dim"],
        key: Float[Tensor, "tokens kv_heads dim"],
        value: Float[Tensor, "tokens kv_heads dim"],
        *,
        scaling: float | None,
    ) -> Float[Tensor, "tokens heads dim"]:
        """Causal attention within each sequence."""
        if not torch.compiler.is_compiling():
            self.num_calls += 1
        return self.kernel(
            query,
            key,
            value,
            cu_seqlens=self.cu_seqlens,
            max_length=self.max_length,
            scaling=scaling,
        )


@cache
def flash_kernel() -> VarlenKernel:
    """Torch's own, with what the installed version wants to hear."""
    from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415  # seconds to import

    known = inspect.signature(varlen_attn).parameters
    arguments: dict[str, object] = (
        {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    )
    if "enable_gqa" in known:
        arguments["enable_gqa"] = True
    takes_scale = "scale" in known
    causal = partial(cast("Callable[..., Tensor]", varlen_attn), **arguments)

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        cu_seqlens: Tensor,
        max_length: int,
        scaling: float | None,
    ) -> Tensor:
        if takes_scale:
            return causal(
                query, key, value, cu_seqlens, cu_seqlens, max_length, max_length, scale=scaling
            )
        if scaling not in (None, query.shape[-1] ** -0.5):
            message = (
                f"varlen_attn of torch {torch.__version__} takes no scale, and the model asks for "
                f"{scaling}; install torch 2.11 or later"
            )
            raise ValueError(message)
        return causal(query, key, value, cu_seqlens, cu_seqlens, max_length, max_length)

    return attend
