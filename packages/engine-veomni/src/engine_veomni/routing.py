"""Which experts the tokens of a pass go to: remembered, replayed, balanced, and summed up.

VeOmni's routers ask a process-wide manager, if there is one, for the experts of each token, and
compute the weights for whatever it says from their own scores (veomni 0.1.12,
`utils/moe_router_replay.py`). Recomputation for activation checkpointing asks again, layer by
layer, and is answered alike.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal, final

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor

from engine_veomni.balancing import Balance
from engine_veomni.config import RouterReplay
from engine_veomni.sampler_routes import RouterShape, problem_of_routes, routes_of
from rl_contracts.all_ranks import from_all_ranks
from rl_contracts.batch_checks import name_of
from rl_contracts.packing import PADDING_ID
from rl_contracts.train import TokenBatch

_ROUTE_TYPE: Final = torch.int16
"""Of remembered expert numbers: fewer than 32768 experts."""

Purpose = Literal["score", "count", "train"]
"""Of a pass: `logprobs`, the first of two passes of `forward_backward`, or the one it trains by."""


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

    def __init__(
        self,
        shape: RouterShape,
        *,
        replay: RouterReplay,
        counts: bool,
        balances: bool,
        device: torch.device,
    ) -> None:
        self._shape, self._device = shape, device
        self._replay: RouterReplay = replay
        self._counts, self._balances = counts, balances
        self._layers: dict[int, int] = {}
        self._seen: dict[int, Tensor] = {}
        self._wanted: Int[Tensor, "tokens layers top_k"] | None = None
        self._remembered: dict[str, Int[Tensor, "tokens layers top_k"]] = {}
        self._counted: dict[int, tuple[Tensor, Tensor]] = {}
        self._sums: dict[int, tuple[Tensor, Tensor]] = {}
        self._num_tokens = 0
        self._balance: Balance | None = None
        self._included: Bool[Tensor, " tokens"] | None = None
        self._shares: dict[int, Float[Tensor, ""]] = {}

    @property
    def needs_counting(self) -> bool:
        """Whether `forward_backward` has to run its micro-batches once to know their experts."""
        return self._balances and self._replay == "none"

    @property
    def held(self) -> tuple[Tensor, ...]:
        """Remembered routes, on the device until the next call of `logprobs`."""
        return tuple(self._remembered.values())

    def on_router_forward(
        self,
        module: torch.nn.Module,
        routing_scores: Float[Tensor, "tokens experts"],
        top_indices: Int[Tensor, "tokens top_k"],
    ) -> Int[Tensor, "tokens top_k"]:
        """VeOmni's question: the experts to use, here those of the router or others."""
        layer = self._layers.setdefault(id(module), len(self._layers))
        if self._wanted is not None:
            wanted = self._wanted[:, layer].to(top_indices.dtype)
            top_indices = torch.where(wanted < 0, top_indices, wanted)
        self._seen[layer] = top_indices
        if self._included is not None and self._balance is not None:
            # the same operations when a layer is computed again, whose result nobody needs
            share = self._balance.share(routing_scores, self._included)
            self._shares.setdefault(layer, share)
        if self._counts:
            with torch.no_grad():
                chosen = top_indices.flatten().long()
                loads = torch.zeros_like(routing_scores[0], dtype=torch.int64)
                loads.scatter_add_(0, chosen, torch.ones_like(chosen))
                entropy = torch.special.entr(routing_scores.float()).sum(dtype=torch.float64)
            self._counted[layer] = (loads, entropy)
        return top_indices

    def begin_scoring(self, batches: Sequence[TokenBatch]) -> None:
        """Drop the remembered routes, before a pass that finds new ones; called on all ranks.

        Raises:
            ValueError: on every rank, if the sampler's routes of one micro-batch cannot be
                replayed.
        """
        self._remembered.clear()
        if self._replay == "rollout":
            self._agree("logprobs", batches)

    def start(self, batches: Sequence[TokenBatch]) -> None:
        """Begin a new sum of statistics and a new loss; called on all ranks.

        Raises:
            ValueError: on every rank, if the routes of one micro-batch cannot be replayed.
        """
        self._sums, self._num_tokens = {}, 0
        if self._replay != "none":
            self._agree("forward_backward", batches)
        if not self._balances:
            return
        self._balance = Balance(
            num_experts=self._shape.num_experts,
            num_layers=self._shape.num_layers,
            device=self._device,
        )
        if self._replay != "none":
            for batch in batches:
                wanted = self._wanted_of(batch)
                self._balance.count(wanted.unbind(dim=1), _balanced_tokens(batch, wanted))
            self._balance.agree()

    def end_counting(self) -> None:
        """The experts of all micro-batches are known; called on all ranks."""
        if self._balance is not None:
            self._balance.agree()

    @contextmanager
    def watching(self, batch: TokenBatch, *, purpose: Purpose) -> Iterator[None]:
        """Answer VeOmni's routers while `batch` goes through the model, backward pass included."""
        from veomni.utils.moe_router_replay import set_active_replay  # noqa: PLC0415

        is_replayed = self._replay == "rollout" or (self._replay != "none" and purpose == "train")
        self._wanted = self._wanted_of(batch) if is_replayed else None
        self._included = None
        if self._balances and purpose == "train":
            self._included = _balanced_tokens(batch, self._wanted).to(self._device)
        self._seen, self._counted, self._shares = {}, {}, {}
        set_active_replay(self)
        try:
            yield
        finally:
            set_active_replay(None)
            self._shares = {}
        if purpose == "train" and self._counts:
            self._add_up(batch)
        if purpose == "count" and self._balance is not None:
            seen = [self._seen[layer] for layer in sorted(self._seen)]
            self._balance.count(seen, _balanced_tokens(batch, None).to(self._device))
        if purpose == "score" and self._replay == "logprobs":
            self._remember(batch)

    def balancing_share(self) -> Float[Tensor, ""]:
        """What the micro-batch that is watched adds to the balancing loss; carries a gradient.

        Raises:
            RuntimeError: if a router of the model did not ask.
        """
        if self._balance is None or len(self._shares) != self._shape.num_layers:
            message = (
                f"router_aux_loss_coef: expected the scores of {self._shape.num_layers} layers, "
                f"got those of {len(self._shares)}"
            )
            raise RuntimeError(message)
        share = torch.stack(list(self._shares.values())).sum()
        self._balance.add(share)
        return share

    def balancing_loss(self) -> float:
        """The balancing loss of the `forward_backward` that began last; called on all ranks."""
        assert self._balance is not None  # noqa: S101 - the engine asks where it is on
        return self._balance.value()

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

    def _agree(self, method: str, batches: Sequence[TokenBatch]) -> None:
        """Refuse on all ranks what cannot be replayed on one."""
        for rank, problem in enumerate(from_all_ranks(self._problem_of(batches))):
            if problem:
                message = f"{method}: on rank {rank}, {problem}, or set router_replay to 'none'"
                raise ValueError(message)

    def _problem_of(self, batches: Sequence[TokenBatch]) -> str:
        """Why the routes of these micro-batches cannot be replayed, or nothing."""
        for index, batch in enumerate(batches):
            if self._replay == "rollout":
                problem = problem_of_routes(batch, self._shape, self._device)
                problem = f"{name_of(index, batch)}: {problem}" if problem else ""
            else:
                problem = self._problem_of_names(batch)
            if problem:
                return problem
        return ""

    def _problem_of_names(self, batch: TokenBatch) -> str:
        names = _names(batch)
        lengths: list[int] = batch.cu_seqlens.diff().tolist()
        if len(names) != len(lengths):
            return "router_replay needs the trajectory ids of every micro-batch"
        for name, length in zip(names, lengths, strict=True):
            routes = self._remembered.get(name)
            if routes is None:
                return (
                    f"trajectory {name} was not in the last call of logprobs on this rank, so "
                    "there are no routes to replay; call logprobs with all micro-batches of the "
                    "step first"
                )
            if routes.shape[0] != length:
                return (
                    f"trajectory {name} has {length} tokens, and had {routes.shape[0]} in the "
                    "last call of logprobs; call it with all micro-batches of the step first"
                )
        return ""

    def _wanted_of(self, batch: TokenBatch) -> Int[Tensor, "tokens layers top_k"]:
        """The routes to replay, on the device; -1 where the router chooses."""
        if self._replay == "rollout":
            routes = routes_of(batch)
            assert routes is not None  # noqa: S101 - `start` and `begin_scoring` looked
            return routes.to(self._device)
        return torch.cat([self._remembered[name] for name in _names(batch)])

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


def _balanced_tokens(
    batch: TokenBatch, wanted: Int[Tensor, "tokens layers top_k"] | None
) -> Bool[Tensor, " tokens"]:
    """Tokens of trajectories, not of padding, whose experts are known beforehand."""
    lengths = batch.cu_seqlens.diff()
    is_row = torch.ones(lengths.shape, dtype=torch.bool)
    for index, name in enumerate(_names(batch)):
        is_row[index] = name != PADDING_ID
    included = is_row.repeat_interleave(lengths.cpu().long())
    return included if wanted is None else included.to(wanted.device) & (wanted[:, 0, 0] >= 0)
