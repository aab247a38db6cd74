"""Routes that came with a batch from the sampler (`PackedBatch.routed_experts`), checked."""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from rl_contracts.train import TokenBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterShape:
    """The routers of a model."""

    num_layers: int
    """Layers with experts."""

    num_experts: int
    """Experts of such a layer."""

    top_k: int
    """Experts that a token goes to."""


def routes_of(batch: TokenBatch) -> Int[Tensor, "tokens layers top_k"] | None:
    """The sampler's routes of a micro-batch, if it carries any."""
    routes: Tensor | None = getattr(batch, "routed_experts", None)
    return routes


def problem_of_routes(batch: TokenBatch, shape: RouterShape, device: torch.device) -> str:
    """Why the sampler's routes of a micro-batch cannot be replayed, or nothing.

    A sampler that reports none for some tokens, or fills in zeros, is found out here: a token
    has as many different experts as the model says.

    Args:
        batch: its routes have the shape and type that `PackedBatch` asks for.
        shape: of the model.
        device: where the values are looked at; sorting them on a CPU would take long.
    """
    routes = routes_of(batch)
    if routes is None:
        return (
            "it carries no routes (routed_experts); let the sampler return them (rollout-vllm: "
            "VllmConfig.return_routed_experts), keep them in every Trajectory"
        )
    expected = (batch.token_ids.shape[0], shape.num_layers, shape.top_k)
    if tuple(routes.shape) != expected:
        return (
            f"expected routed_experts of shape {expected}, tokens, layers and experts per token of "
            f"the model, got {tuple(routes.shape)}; do sampler and trainer run the same model?"
        )
    ordered = routes.to(device).sort(dim=2).values
    lowest, highest = ordered[:, :, 0], ordered[:, :, -1]
    # a token is left to the router in all layers and slots, or in none
    is_left = (ordered == -1).all(dim=2).all(dim=1)
    repeats = (ordered.diff(dim=2) == 0).any(dim=2)
    is_bad = (lowest < 0) | (highest >= shape.num_experts) | repeats
    is_last = torch.zeros_like(is_left)
    is_last[(batch.cu_seqlens[1:] - 1).to(device, torch.int64)] = True
    found = (is_bad.any(dim=1) & ~is_left) | (is_left & ~is_last)
    if not bool(found.any()):
        return ""
    token = int(found.nonzero()[0])
    layer = int(is_bad[token].nonzero()[0])
    return (
        f"token {token} names the experts {routes[token, layer].tolist()} in layer {layer}, "
        f"expected {shape.top_k} different ones from 0 to {shape.num_experts - 1}, and -1 on the "
        "last token of a sequence alone"
    )
