"""Scenarios of routers: replayed, and balanced; see `engine_process.py`."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_checks import ATOL, assert_near, exported, make_engine, raised
from safetensors.torch import load_file
from scenario_data import BALANCE, batch, batches_of, loss_fn, read_folder
from torch import Tensor

from engine_veomni.export import local_shard
from rl_contracts.train import LossOutput, PackedBatch


def check_router(folder: Path) -> None:
    """Tokens are trained with the experts of their logprobs, though the routers moved since."""
    batches = batches_of(dist.get_rank(), dist.get_world_size())
    mismatches, moved = [], []
    for replay in ("logprobs", "none"):
        engine = make_engine(
            folder / "model",
            ep=2,
            router_replay=replay,
            router_statistics=True,
            activation_checkpointing=True,
        )
        if replay == "logprobs":
            text = raised(ValueError, lambda: engine.forward_backward(batches, loss_fn))  # noqa: B023
            assert "on rank 0, trajectory row-0 was not in the last call of logprobs" in text, text
        proximal = dict(zip(map(id, batches), engine.logprobs(batches), strict=True))
        router = engine._router
        assert router is not None
        mismatch: list[float] = []
        differing: list[float] = []

        def compared(policy_logprobs: Tensor, batch: PackedBatch) -> LossOutput:
            (before,) = (
                proximal[id(given)]  # noqa: B023
                for given in batches
                if given.trajectory_ids == batch.trajectory_ids
            )
            mismatch.append((policy_logprobs - before).abs().sum().item())  # noqa: B023
            return loss_fn(policy_logprobs, batch)

        engine.forward_backward(batches, compared)
        assert max(mismatch) < ATOL, mismatch
        mismatch.clear()
        generator = torch.Generator().manual_seed(dist.get_rank())
        for name, parameter in engine._policy.model.named_parameters():
            if name.endswith(".gate.weight"):
                shard = local_shard(parameter.detach())
                shard += 0.1 * torch.randn(shard.shape, generator=generator)
        engine.forward_backward(batches, compared)
        statistics = engine.router_statistics()
        assert all(1.0 <= load <= 8.0 for load in statistics.load_max_over_mean), statistics
        assert all(0.0 < entropy < math.log(8) for entropy in statistics.entropy), statistics
        last = batches[-1]
        for layer, routes in sorted(router._seen.items()):
            before = reference_routes(folder, last)[:, layer]
            differing.append((routes.sort(dim=1).values != before).float().mean().item())
        moved.append(sum(differing))
        mismatches.append(sum(mismatch))
    assert moved[0] == 0.0, moved
    assert moved[1] > 0.0, moved
    assert mismatches[0] < mismatches[1], mismatches


def check_balancing(folder: Path) -> None:
    """Loss, gradient and step with the balancing loss are those of plain transformers.

    However the rows are split, and also where routes are remembered and layers computed again.
    """
    reference = load_file(folder / "balanced.safetensors")
    rank = dist.get_rank()
    batches = batches_of(rank, dist.get_world_size())
    other_split = [batch((0,)), batch((1, 2))] if rank == 0 else [batch((3,)), batch((4, 5))]
    norm = reference["norm"].item()
    for given, ep, changes in (
        (batches, 2, {}),
        (other_split, 2, {"router_replay": "logprobs", "activation_checkpointing": True}),
        (other_split, 1, {"router_statistics": True}),
    ):
        settings: dict[str, Any] = {"router_aux_loss_coef": BALANCE, **changes}
        engine = make_engine(folder / "model", ep=ep, **settings)
        engine.logprobs(given)
        metrics = engine.forward_backward(given, loss_fn)
        assert abs(metrics["loss/router_aux/mean"] - reference["balancing"].item()) < ATOL, metrics
        assert abs(metrics["loss"] - reference["loss"].item()) < ATOL, metrics
        grad_norm = engine.optim_step().grad_norm
        assert abs(grad_norm - norm) < ATOL * max(1.0, norm), (grad_norm, norm)
        stepped = exported(engine)
        assert_near(stepped, read_folder(folder / "balanced"), atol=ATOL / 10)
    # the step shows it: without the balancing loss the routers go elsewhere
    plain = read_folder(folder / "stepped")
    for layer in (0, 1):
        name = f"model.layers.{layer}.mlp.gate.weight"
        assert (stepped[name] - plain[name]).abs().max().item() > 100 * ATOL


def check_sampler_routes(folder: Path) -> None:
    """A sampler with other routers: replay brings the two policies together.

    Routes that no router would choose show that it is they that are followed.
    """
    batches = batches_of(dist.get_rank(), dist.get_world_size())
    sampler = make_engine(folder / "model", ep=2, router_replay="logprobs")
    generator = torch.Generator().manual_seed(dist.get_rank())
    for name, parameter in sampler._policy.model.named_parameters():
        if name.endswith(".gate.weight"):
            shard = local_shard(parameter.detach())
            shard += 0.1 * torch.randn(shard.shape, generator=generator)
    sampled = sampler.logprobs(batches)
    plain = make_engine(folder / "model", ep=2)
    replaying = make_engine(folder / "model", ep=2, router_replay="rollout")
    assert sampler._router is not None
    routed = [with_routes(given, sampler._router._remembered) for given in batches]
    without = mismatch_kl(sampled, plain.logprobs(batches), batches)
    with_replay = mismatch_kl(sampled, replaying.logprobs(routed), batches)
    assert without > 1e-4, without
    assert with_replay < 0.5 * without, (with_replay, without)

    # the trainer's own weights with routes at random: the same logprobs
    generator = torch.Generator().manual_seed(17 + dist.get_rank())
    scored = make_engine(folder / "model", ep=2, router_replay="logprobs")
    scored.logprobs(batches)
    assert scored._router is not None
    remembered = scored._router._remembered
    for name, routes in remembered.items():
        drawn = torch.rand(*routes.shape[:2], 8, generator=generator).argsort(dim=2)
        remembered[name] = drawn[:, :, : routes.shape[2]].to(torch.int16)
    wanted: list[Tensor] = []
    found: list[Tensor] = []
    drawn_batches = [with_routes(given, remembered) for given in batches]
    for engine, given, seen in ((scored, batches, wanted), (replaying, drawn_batches, found)):

        def watched(policy_logprobs: Tensor, batch: PackedBatch) -> LossOutput:
            seen.append(policy_logprobs.detach().clone())  # noqa: B023
            return loss_fn(policy_logprobs, batch)

        engine.forward_backward(given, watched)
    # the last tokens go elsewhere, so rows are grouped otherwise, and sums end in other bits
    for either in (found, replaying.logprobs(drawn_batches)):
        for left, right in zip(either, wanted, strict=True):
            assert (left - right).abs().max().item() < ATOL
    elsewhere = mismatch_kl(wanted, plain.logprobs(batches), batches)
    assert elsewhere > without, (elsewhere, without)

    spoilt = routed if dist.get_rank() == 0 else [*routed[:1], *batches[1:]]
    for method, call in (
        ("logprobs", lambda: replaying.logprobs(spoilt)),
        ("forward_backward", lambda: replaying.forward_backward(spoilt, loss_fn)),
    ):
        text = raised(ValueError, call)
        assert f"{method}: on rank 1, micro-batch 1 (trajectories row-5): it carries no" in text


def with_routes(given: PackedBatch, routes: dict[str, Tensor]) -> PackedBatch:
    """A batch with the routes that a sampler reports: none for the last token of a row."""
    pieces = [routes[name].cpu().clone() for name in given.trajectory_ids]
    for piece in pieces:
        piece[-1] = -1
    return replace(given, routed_experts=torch.cat(pieces))


def mismatch_kl(rollout: list[Tensor], policy: list[Tensor], batches: list[PackedBatch]) -> float:
    """Mean over the tokens of all ranks of ``exp(d) - 1 - d``, in nats."""
    sums = torch.zeros(2, dtype=torch.float64)
    for drawn, scored, given in zip(rollout, policy, batches, strict=True):
        difference = (scored - drawn).cpu().double()[given.loss_mask]
        sums += torch.tensor([(difference.expm1() - difference).sum(), difference.numel()])
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def reference_routes(folder: Path, given: PackedBatch) -> Tensor:
    """Sorted experts of each token and layer under the first weights, as plain transformers say."""
    routes = load_file(folder / "reference.safetensors")
    return torch.cat([routes[f"routes-{name}"] for name in given.trajectory_ids]).long()
