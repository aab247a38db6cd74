"""Which experts the tokens of a pass went to: remembered, replayed, and summed up.

VeOmni's routers ask a process-wide manager, if there is one, for the experts of each token, and
compute the weights for whatever it says from their own scores (veomni 0.1.12,
`utils/moe_router_replay.py`). Recomputation for activation checkpointing asks again, layer by
layer, and is answered alike.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, final

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor

from rl_contracts.all_ranks import from_all_ranks
from rl_contracts.train import TokenBatch

_ROUTE_TYPE: Final = torch.int16
"""Of remembered expert numbers: fewer than 32768 experts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterStatistics:
    """How the tokens of one `forward_backward` were routed, over all ranks; by layer."""

    load_max_over_mean: tuple[float, ...]
    """Tokens of the busiest expert over the mean of all: 1 is an even load."""

    unused_experts: tuple[int, ...]
    """Experts without a token."""

    entropy: tuple[float, ...]
    """Mean over tokens of the entropy of the router's distribution, in nats."""


@final
class Router:
    """What VeOmni's routers ask about the experts of a token, for one engine."""

    def __init__(self, *, replays: bool, counts: bool) -> None:
        self._replays, self._counts = replays, counts
        self._layers: dict[int, int] = {}
        self._seen: dict[int, Tensor] = {}
        self._wanted: Int[Tensor, "tokens layers top_k"] | None = None
        self._remembered: dict[str, Int[Tensor, "tokens layers top_k"]] = {}
        self._counted: dict[int, tuple[Tensor, Tensor]] = {}
        self._sums: dict[int, tuple[Tensor, Tensor]] = {}
        self._num_tokens = 0

    def on_router_forward(
        self,
        module: torch.nn.Module,
        routing_scores: Float[Tensor, "tokens experts"],
        top_indices: Int[Tensor, "tokens top_k"],
    ) -> Int[Tensor, "tokens top_k"]:
        """VeOmni's question: the experts to use, here those of the router or remembered ones."""
        layer = self._layers.setdefault(id(module), len(self._layers))
        if self._wanted is not None:
            top_indices = self._wanted[:, layer].to(top_indices.dtype)
        self._seen[layer] = top_indices
        if self._counts:
            with torch.no_grad():
                chosen = top_indices.flatten().long()
                loads = torch.zeros_like(routing_scores[0], dtype=torch.int64)
                loads.scatter_add_(0, chosen, torch.ones_like(chosen))
                entropy = torch.special.entr(routing_scores.float()).sum(dtype=torch.float64)
            self._counted[layer] = (loads, entropy)
        return top_indices

    def forget(self) -> None:
        """Drop the remembered routes, before a pass that finds new ones."""
        self._remembered.clear()

    def start(self, batches: Sequence[TokenBatch]) -> None:
        """Begin a new sum of statistics; called on all ranks.

        Raises:
            ValueError: on every rank, if the routes of one micro-batch cannot be replayed.
        """
        self._sums, self._num_tokens = {}, 0
        if not self._replays:
            return
        for rank, problem in enumerate(from_all_ranks(self._problem_of(batches))):
            if problem:
                message = (
                    f"forward_backward: on rank {rank}, {problem}; call logprobs with all "
                    "micro-batches of the step first, or set router_replay to 'none'"
                )
                raise ValueError(message)

    @contextmanager
    def watching(self, batch: TokenBatch, *, trains: bool) -> Iterator[None]:
        """Answer VeOmni's routers while `batch` goes through the model, backward pass included."""
        from veomni.utils.moe_router_replay import set_active_replay  # noqa: PLC0415

        self._wanted = None
        if trains and self._replays:
            names = _names(batch)
            self._wanted = torch.cat([self._remembered[name] for name in names])
        self._seen, self._counted = {}, {}
        set_active_replay(self)
        try:
            yield
        finally:
            set_active_replay(None)
        if trains and self._counts:
            self._add_up(batch)
        if self._replays and not trains:
            self._remember(batch)

    def _problem_of(self, batches: Sequence[TokenBatch]) -> str:
        """Why the routes of these micro-batches cannot be replayed, or nothing."""
        for batch in batches:
            names = _names(batch)
            lengths: list[int] = batch.cu_seqlens.diff().tolist()
            if len(names) != len(lengths):
                return "router_replay needs the trajectory ids of every micro-batch"
            for name, length in zip(names, lengths, strict=True):
                routes = self._remembered.get(name)
                if routes is None:
                    return (
                        f"trajectory {name} was not in the last call of logprobs on this rank, so "
                        "there are no routes to replay"
                    )
                if routes.shape[0] != length:
                    return (
                        f"trajectory {name} has {length} tokens, and had {routes.shape[0]} in the "
                        "last call of logprobs"
                    )
        return ""

    def statistics(self) -> RouterStatistics:
        """Sum up what all ranks counted since `start`; called on all of them.

        Raises:
            RuntimeError: if nothing was counted.
        """
        if not self._sums:
            message = "router_statistics: nothing was counted yet; call forward_backward first"
            raise RuntimeError(message)
        counted = [self._sums[layer] for layer in sorted(self._sums)]
        loads = torch.stack([each for each, _ in counted])
        entropies = torch.stack([each for _, each in counted])
        num_tokens = torch.tensor(self._num_tokens, device=loads.device)
        for total in (loads, entropies, num_tokens):
            dist.all_reduce(total)
        shares = loads.double()
        return RouterStatistics(
            load_max_over_mean=tuple((shares.amax(dim=1) / shares.mean(dim=1)).tolist()),
            unused_experts=tuple((loads == 0).sum(dim=1).tolist()),
            entropy=tuple((entropies / num_tokens).tolist()),
        )

    def _add_up(self, batch: TokenBatch) -> None:
        for layer, (loads, entropy) in self._counted.items():
            if layer in self._sums:
                before, entropy_before = self._sums[layer]
                self._sums[layer] = (before + loads, entropy_before + entropy)
            else:
                self._sums[layer] = (loads, entropy)
        self._num_tokens += batch.token_ids.shape[0]

    def _remember(self, batch: TokenBatch) -> None:
        routes = torch.stack([self._seen[layer] for layer in sorted(self._seen)], dim=1)
        lengths: list[int] = batch.cu_seqlens.diff().tolist()
        pieces = routes.to(_ROUTE_TYPE).split(lengths)
        # copies: one trajectory that is kept does not keep the whole micro-batch
        self._remembered.update(
            {name: piece.clone() for name, piece in zip(_names(batch), pieces, strict=False)}
        )


def _names(batch: TokenBatch) -> tuple[str, ...]:
    names: tuple[str, ...] = getattr(batch, "trajectory_ids", ())
    return names
