"""What VeOmni needs to train on a CPU over gloo, all of it through its extension points.

VeOmni 0.1.12 ships expert kernels for accelerators only, and its module of grouped products asks
CUDA for its properties when it is imported. Here the two grouped products are written in plain
torch and put in that module's place; VeOmni's own dispatch of tokens to experts
(`token_pre_all2all`, `tokens_post_all2all`) and its own autograd function then run unchanged. One
step between them, the exchange of token counts, is written anew: gloo rejects the shapes that
VeOmni gathers them with. Call `install` before anything else imports `veomni.distributed.moe`.
"""

import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Final, cast

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor

from engine_veomni.expert_kernel import ExpertStack

GROUPED_PRODUCTS: Final = "veomni.ops.kernels.moe._kernels.kernel.group_gemm"
"""The module that is replaced (upstream: `ops/kernels/moe/_kernels/kernel/group_gemm.py`)."""

EXPERT_KERNEL: Final = "engine_veomni_cpu"
"""Name of the expert kernel in VeOmni's registry."""


def group_gemm_same_nk(  # noqa: PLR0917 - VeOmni's signature
    a: Float[Tensor, "tokens inner"],
    b: Float[Tensor, "groups _ _"],
    cumsum_M: Int[Tensor, " groups"],  # noqa: N803
    max_M: int,  # noqa: ARG001, N803
    transpose_a: bool = False,  # noqa: ARG001, FBT001, FBT002
    transpose_b: bool = False,  # noqa: FBT001, FBT002
) -> Float[Tensor, "tokens outer"]:
    """Multiply each group of rows of `a` by its own matrix of `b`."""
    weights = b.transpose(1, 2) if transpose_b else b
    output = a.new_empty(a.shape[0], weights.shape[2])
    start = 0
    for group, end in enumerate(cumsum_M.tolist()):
        torch.mm(a[start:end], weights[group], out=output[start:end])
        start = end
    return output


def group_gemm_same_mn(  # noqa: PLR0917 - VeOmni's signature
    a: Float[Tensor, "tokens rows"],
    b: Float[Tensor, "tokens columns"],
    c: Float[Tensor, "groups rows columns"],
    cumsum_K: Int[Tensor, " groups"],  # noqa: N803
    max_K: int,  # noqa: ARG001, N803
    transpose_a: bool = False,  # noqa: ARG001, FBT001, FBT002
    transpose_b: bool = False,  # noqa: ARG001, FBT001, FBT002
) -> None:
    """Write the product of each group's rows of `a` and of `b` into `c`: 0 for an empty group."""
    start = 0
    for group, end in enumerate(cumsum_K.tolist()):
        torch.mm(a[start:end].T, b[start:end], out=c[group])
        start = end


def install() -> None:
    """Put the grouped products in place; doing it twice changes nothing.

    Raises:
        RuntimeError: if VeOmni's own grouped products were imported before.
    """
    present = sys.modules.get(GROUPED_PRODUCTS)
    if present is not None and getattr(present, "group_gemm_same_nk", None) is not (
        group_gemm_same_nk
    ):
        message = (
            f"engine-veomni: {GROUPED_PRODUCTS} was imported before the CPU backend was "
            "installed; build the engine before anything else imports veomni.distributed.moe"
        )
        raise RuntimeError(message)
    if present is None:
        replacement = ModuleType(GROUPED_PRODUCTS, "Grouped products in plain torch.")
        vars(replacement).update(
            group_gemm_same_nk=group_gemm_same_nk, group_gemm_same_mn=group_gemm_same_mn
        )
        sys.modules[GROUPED_PRODUCTS] = replacement


def expert_forward(
    experts: ExpertStack,
    hidden_states: Float[Tensor, "tokens hidden"],
    top_k_index: Int[Tensor, "tokens top_k"],
    top_k_weights: Float[Tensor, "tokens top_k"],
) -> Float[Tensor, "tokens hidden"]:
    """Send each token through its experts, wherever they are, and weigh what comes back."""
    from veomni.distributed.moe import EPMergedFc1GroupGemm  # noqa: PLC0415
    from veomni.distributed.parallel_state import get_parallel_state  # noqa: PLC0415

    weights = top_k_weights.to(hidden_states.dtype)
    expert_mask = torch.nn.functional.one_hot(top_k_index, experts.num_experts).permute(2, 1, 0)

    def apply_experts(
        permuted: Float[Tensor, "rows hidden"], rows_per_expert: Int[Tensor, " local_experts"]
    ) -> Float[Tensor, "rows hidden"]:
        return cast(
            "Tensor",
            EPMergedFc1GroupGemm.apply(
                permuted,
                rows_per_expert.cumsum(0),
                experts.gate_up_proj,
                experts.down_proj,
                None,
            ),
        )

    state = get_parallel_state()
    dispatch = partial(_dispatch_over_ranks, state.ep_group) if state.ep_enabled else _dispatch_here
    return dispatch(hidden_states, top_k_index, weights, expert_mask, apply_experts)


def _dispatch_here(
    hidden_states: Tensor,
    top_k_index: Tensor,
    weights: Tensor,
    expert_mask: Tensor,
    apply_experts: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """All experts are on this rank: sort the tokens by expert, and back."""
    from veomni.distributed.moe.moe_utils import (  # noqa: PLC0415
        generate_weights_idx,
        permute,
        unpermute,
    )

    routing_map = expert_mask.sum(dim=1)
    permuted, order = permute(hidden_states, routing_map)
    outputs = apply_experts(permuted, expert_mask.sum(dim=(1, 2)))
    dense_weights = generate_weights_idx(weights, top_k_index, expert_mask.shape[0])
    return cast(
        "Tensor", unpermute(outputs, dense_weights, hidden_states.shape, order, routing_map)
    )


def _dispatch_over_ranks(  # noqa: PLR0917 - the group, and the signature of the other
    group: dist.ProcessGroup,
    hidden_states: Tensor,
    top_k_index: Tensor,
    weights: Tensor,
    expert_mask: Tensor,
    apply_experts: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Experts are spread over `group`: send every token to its experts' ranks, and back."""
    from veomni.distributed.moe import token_pre_all2all, tokens_post_all2all  # noqa: PLC0415

    num_experts = expert_mask.shape[0]
    send_counts, receive_counts, rows_per_expert = exchange_counts(
        expert_mask.sum(dim=(1, 2)), group
    )
    permuted, routing_map, order, shape = token_pre_all2all(
        hidden_states=hidden_states,
        expert_mask=expert_mask,
        num_experts=num_experts,
        input_splits=send_counts,
        output_splits=receive_counts,
        num_global_tokens_per_local_expert=rows_per_expert,
        ep_group=group,
    )
    outputs = apply_experts(permuted, rows_per_expert.sum(dim=0))
    return cast(
        "Tensor",
        tokens_post_all2all(
            expert_outputs=outputs,
            routing_weights=weights,
            selected_experts=top_k_index,
            num_experts=num_experts,
            input_splits=send_counts,
            output_splits=receive_counts,
            num_global_tokens_per_local_expert=rows_per_expert,
            routing_map=routing_map,
            local_input_permutation_mapping=order,
            org_hidden_states_shape=shape,
            ep_group=group,
        ),
    )


def exchange_counts(
    rows_per_expert: Int[Tensor, " experts"], group: dist.ProcessGroup
) -> tuple[list[int], list[int], Int[Tensor, "ranks local_experts"]]:
    """Tell the ranks of `group` how many rows each has for each expert.

    Stands for `preprocess` (upstream: `distributed/moe/moe_layer.py`), which gathers a `[experts]`
    tensor into a `[ranks, experts]` one: NCCL takes that, gloo rejects it.

    Returns:
        Rows that this rank sends to each rank, rows that it gets from each rank, and what each
        rank sends to each of the experts here.
    """
    num_ranks = group.size()
    num_local = rows_per_expert.shape[0] // num_ranks
    counts = rows_per_expert.contiguous()
    gathered = [torch.empty_like(counts) for _ in range(num_ranks)]
    dist.all_gather(gathered, counts, group=group)
    first = dist.get_rank(group) * num_local
    to_here = torch.stack(gathered)[:, first : first + num_local].contiguous()
    return (
        rows_per_expert.view(num_ranks, num_local).sum(dim=1).tolist(),
        to_here.sum(dim=1).tolist(),
        to_here,
    )
