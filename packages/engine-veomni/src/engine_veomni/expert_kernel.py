"""Experts as grouped matrix products of torch, with expert parallelism; for every device.

VeOmni's own kernels compute each expert's product with a Triton kernel whose grid spans the rows of
all experts for each of them, and route tokens through one-hot tensors of `[experts, top_k, tokens]`
(veomni 0.1.12, `ops/kernels/moe/_kernels/kernel/group_gemm.py`, `distributed/moe/moe_layer.py`).
Here rows are sorted by expert once, `torch.nn.functional.grouped_mm` multiplies them, and the sums
over a token's experts run in a fixed order, so a pass can be repeated bit for bit.

    tokens [tokens, hidden]
      spread     a row for each expert of each token, sorted by expert   [rows, hidden]
      exchange   with expert parallelism: to the ranks that hold them
      experts    down(weight * silu(gate) * up)
      exchange   back
      collect    sum over the experts of a token                         [tokens, hidden]
"""

from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import embedding_bag, grouped_mm, silu


class ExpertStack(Protocol):
    """What the kernel reads of VeOmni's module of experts."""

    num_experts: int
    gate_up_proj: Tensor
    down_proj: Tensor


class Routes(NamedTuple):
    """Where the rows of all tokens go: one for each expert of each token."""

    order: Int[Tensor, " rows"]
    """`token * top_k + slot` of each row, sorted by expert."""

    places: Int[Tensor, "tokens top_k"]
    """The row of each token and slot: the inverse of `order`."""

    ends: Int[Tensor, " experts"]
    """Where the rows of each expert end."""


def expert_forward(
    experts: ExpertStack,
    hidden_states: Float[Tensor, "tokens hidden"],
    top_k_index: Int[Tensor, "tokens top_k"],
    top_k_weights: Float[Tensor, "tokens top_k"],
) -> Float[Tensor, "tokens hidden"]:
    """Send each token through its experts, wherever they are, and add up what comes back."""
    from veomni.distributed.parallel_state import get_parallel_state  # noqa: PLC0415

    state = get_parallel_state()
    routes = sort_by_expert(top_k_index, experts.num_experts)
    rows = spread(hidden_states, routes)
    weights = top_k_weights.to(hidden_states.dtype).flatten()[routes.order]
    stacks = (experts.gate_up_proj, experts.down_proj)
    if state.ep_enabled:
        outputs = _over_ranks(rows, weights, routes.ends, *stacks, group=state.ep_group)
    else:
        outputs = swiglu_experts(rows, weights, routes.ends, *stacks)
    return collect(outputs, routes)


def sort_by_expert(top_k_index: Int[Tensor, "tokens top_k"], num_experts: int) -> Routes:
    """Sort the rows of all tokens by expert; rows of one expert stay in the order of tokens."""
    chosen, order = top_k_index.flatten().sort(stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(order.shape[0], device=order.device)
    bounds = torch.arange(num_experts, device=chosen.device, dtype=chosen.dtype)
    ends = torch.searchsorted(chosen, bounds, right=True)
    return Routes(order=order, places=places.view(top_k_index.shape), ends=ends)


def spread(tokens: Float[Tensor, "tokens hidden"], routes: Routes) -> Float[Tensor, "rows hidden"]:
    """Repeat each token for each of its experts, in the order of the routes."""
    rows: Tensor = _Spread.apply(tokens, routes)  # type: ignore[no-untyped-call]
    return rows


def collect(rows: Float[Tensor, "rows hidden"], routes: Routes) -> Float[Tensor, "tokens hidden"]:
    """Add up the rows of each token, in the order of its experts."""
    tokens: Tensor = _Collect.apply(rows, routes)  # type: ignore[no-untyped-call]
    return tokens


def swiglu_experts(
    rows: Float[Tensor, "rows hidden"],
    weights: Float[Tensor, " rows"],
    ends: Int[Tensor, " experts"],
    gate_up: Float[Tensor, "experts 2*inner hidden"],
    down: Float[Tensor, "experts hidden inner"],
) -> Float[Tensor, "rows hidden"]:
    """Each row through its own expert, times its weight; rows are sorted by expert."""
    outputs: Tensor = _SwigluExperts.apply(  # type: ignore[no-untyped-call]
        rows, weights, ends.to(torch.int32), gate_up, down
    )
    return outputs


def _over_ranks(
    rows: Tensor,
    weights: Tensor,
    ends: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    group: dist.ProcessGroup,
) -> Tensor:
    """`swiglu_experts` where each rank of `group` holds as many experts, in their order."""
    num_ranks, num_local = group.size(), gate_up.shape[0]
    sent = ends.diff(prepend=ends.new_zeros(1)).view(num_ranks, num_local)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    # the one time that the host waits for the device: it has to know what to send
    splits = torch.stack((sent.sum(dim=1), received.sum(dim=1))).tolist()
    exchange = _Exchange(sent=splits[0], received=splits[1], group=group)
    # rows arrive by rank and then by expert, and are wanted by expert
    experts = torch.arange(num_local, device=rows.device).repeat(num_ranks)
    arrived = experts.repeat_interleave(received.flatten(), output_size=sum(splits[1]))
    order = arrived.argsort(stable=True)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.shape[0], device=order.device)
    outputs = swiglu_experts(
        _permute(_travel(rows, exchange), order, back),
        _permute(_travel(weights[:, None], exchange), order, back)[:, 0],
        received.sum(dim=0).cumsum(0),
        gate_up,
        down,
    )
    return _travel(_permute(outputs, back, order), exchange.reversed())


class _Exchange(NamedTuple):
    """How many rows go to each rank of a group, and how many come from each."""

    sent: list[int]
    received: list[int]
    group: dist.ProcessGroup

    def reversed(self) -> "_Exchange":
        return _Exchange(sent=self.received, received=self.sent, group=self.group)


def _travel(rows: Tensor, exchange: _Exchange) -> Tensor:
    arrived: Tensor = _Travel.apply(rows, exchange)  # type: ignore[no-untyped-call]
    return arrived


def _permute(rows: Tensor, order: Tensor, back: Tensor) -> Tensor:
    permuted: Tensor = _Permute.apply(rows, order, back)  # type: ignore[no-untyped-call]
    return permuted


def _summed(rows: Tensor, routes: Routes) -> Tensor:
    # one kernel that gathers and adds, in the order of the slots
    return embedding_bag(routes.places, rows, mode="sum")


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, routes: Routes) -> Tensor:  # noqa: ANN401
        ctx.routes = routes
        return tokens[routes.order // routes.places.shape[1]]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        return _summed(grads[0], ctx.routes), None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, routes: Routes) -> Tensor:  # noqa: ANN401
        ctx.routes = routes
        return _summed(rows, routes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        return grads[0][ctx.routes.order // ctx.routes.places.shape[1]], None


class _Permute(torch.autograd.Function):
    """A permutation; plain indexing would add up its gradient row by row."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, back: Tensor) -> Tensor:  # noqa: ANN401
        ctx.back = back
        return rows[order]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        return grads[0][ctx.back], None, None


class _Travel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: _Exchange) -> Tensor:  # noqa: ANN401
        ctx.exchange = exchange
        return _exchanged(rows, exchange)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        return _exchanged(grads[0], ctx.exchange.reversed()), None


def _exchanged(rows: Tensor, exchange: _Exchange) -> Tensor:
    arrived = rows.new_empty(sum(exchange.received), *rows.shape[1:])
    dist.all_to_all_single(
        arrived, rows.contiguous(), exchange.received, exchange.sent, group=exchange.group
    )
    return arrived


class _SwigluExperts(torch.autograd.Function):
    """Keeps the rows and the first product for the backward pass; the rest is computed again."""

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd functions take positional arguments
        ctx: Any,  # noqa: ANN401
        rows: Tensor,
        weights: Tensor,
        ends: Tensor,
        gate_up: Tensor,
        down: Tensor,
    ) -> Tensor:
        first = grouped_mm(rows, gate_up.transpose(1, 2), offs=ends)
        gate, up = first.chunk(2, dim=1)
        inner = silu(gate).mul_(up).mul_(weights[:, None])
        ctx.save_for_backward(rows, weights, ends, gate_up, down, first)
        return grouped_mm(inner, down.transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        rows, weights, ends, gate_up, down, first = ctx.saved_tensors
        grad = grads[0].contiguous()
        gate, up = first.chunk(2, dim=1)
        activated = silu(gate)
        product = activated * up
        grad_inner = grouped_mm(grad, down, offs=ends)
        grad_weights = torch.linalg.vecdot(grad_inner, product)
        grad_down = grouped_mm(grad.t(), product * weights[:, None], offs=ends)
        grad_inner.mul_(weights[:, None])
        grad_gate = torch.ops.aten.silu_backward(grad_inner * up, gate)
        grad_first = torch.cat((grad_gate, grad_inner.mul_(activated)), dim=1)
        grad_rows = grouped_mm(grad_first, gate_up, offs=ends)
        grad_gate_up = grouped_mm(grad_first.t(), rows, offs=ends)
        return grad_rows, grad_weights, None, grad_gate_up, grad_down
