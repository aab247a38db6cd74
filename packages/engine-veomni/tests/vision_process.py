"""One rank of a slow test with images: runs a scenario and hard-exits after a barrier."""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_checks import (
    ATOL,
    DEVICE,
    assert_near,
    check_logprobs,
    exported,
    main,
    make_engine,
    raised,
)
from safetensors.torch import load_file, save_file
from scenario_data import read_folder
from torch import Tensor
from vision_data import (
    IMAGE,
    OTHER_BATCHES,
    ROWS,
    VOCAB_SIZE,
    batch,
    batches_of,
    loss_fn,
)

from engine_veomni import OptimConfig, VeomniEngine, VeomniScorer
from rl_contracts.testing.engine_contract import ENGINE_CHECKS, EngineUnderTest

TOWER = "model.visual."


def check_against_reference(engine: VeomniEngine, folder: Path, *, frozen: bool = False) -> None:
    """Logprobs, loss, gradient and one step, however the rows are split."""
    reference = load_file(folder / "reference.safetensors")
    first = read_folder(folder / "model")
    assert_near(exported(engine), first, atol=0.0)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    norm = reference["text_norm" if frozen else "norm"].item()
    batches = batches_of(rank, world_size)
    check_logprobs(engine, folder, batches)
    metrics = engine.forward_backward(batches, loss_fn)
    assert abs(metrics["loss"] - reference["loss"].item()) < ATOL, metrics
    step = engine.optim_step()
    assert abs(step.grad_norm - norm) < ATOL * max(1.0, norm), (step.grad_norm, norm)
    wanted = read_folder(folder / "stepped")
    if frozen:
        wanted |= {name: each for name, each in first.items() if name.startswith(TOWER)}
    assert_near(exported(engine), wanted, atol=ATOL / 10)


def check_other_split(folder: Path, *, ep: int) -> None:
    """Rows in other micro-batches, whose pictures stand elsewhere: the same gradient."""
    engine = make_engine(folder / "model", ep=ep, activation_checkpointing=True)
    batches = batches_of(dist.get_rank(), dist.get_world_size(), OTHER_BATCHES)
    check_logprobs(engine, folder, batches)
    engine.forward_backward(batches, loss_fn)
    norm = load_file(folder / "reference.safetensors")["norm"].item()
    grad_norm = engine.optim_step().grad_norm
    assert abs(grad_norm - norm) < ATOL * max(1.0, norm), (grad_norm, norm)
    assert_near(exported(engine), read_folder(folder / "stepped"), atol=ATOL / 10)


def check_refusals(engine: VeomniEngine) -> None:
    """Images that do not fit the model, on one rank: refused on all, by name."""
    rank = dist.get_rank()
    good = batches_of(0, 2)
    images = good[0].images
    assert images is not None
    other = torch.where(good[0].token_ids == IMAGE, 7, good[0].token_ids)
    masked = good[0].loss_mask.clone()
    masked[2:4] = True
    changes: tuple[tuple[dict[str, Any], str], ...] = (
        ({"images": replace(images, patches=images.patches[:, :-1])}, "with 96 values each"),
        ({"images": replace(images, grids=torch.tensor([[1, 1, 16]]))}, "height and width 2 div"),
        (
            {"images": replace(images, num_tokens=images.num_tokens - 1)},
            "expected [4, 4] placeholders at the places of its images, by their grids, got [3, 3]",
        ),
        ({"token_ids": other}, "expected the placeholder 4 at the places of its images, got the"),
        ({"loss_mask": masked}, "True on a placeholder of an image"),
        ({"images": replace(images, image_of_place=torch.tensor([0, 1]))}, "of its 1 images at"),
    )
    for change, reason in changes:
        given = [replace(good[0], **change), *good[1:]] if rank == 1 else good
        for call in (engine.logprobs, lambda each: engine.forward_backward(each, loss_fn)):
            text = raised(ValueError, functools.partial(call, given))
            assert "on rank 1, micro-batch 0 (trajectories row-0, row-1): " in text, text
            assert reason in text, text


def two_ranks(folder: Path) -> None:
    """Experts over both ranks: all of it, a frozen tower, other splits, refusals, an export."""
    engine = make_engine(folder / "model", ep=2)
    assert engine.expert_sharding.num_local_experts == 4
    check_refusals(engine)
    check_against_reference(engine, folder)
    check_other_split(folder, ep=2)
    frozen = make_engine(folder / "model", ep=2, freeze_vision=True)
    scorer = VeomniScorer(frozen.config, device=DEVICE)
    batches = batches_of(dist.get_rank(), dist.get_world_size())
    assert all(map(torch.equal, scorer.logprobs(batches), frozen.logprobs(batches)))
    check_against_reference(frozen, folder, frozen=True)

    engine.save_checkpoint(folder / "checkpoint")
    again = make_engine(folder / "model", ep=2)
    again.load_checkpoint(folder / "checkpoint")
    assert_near(exported(again), exported(engine), atol=0.0)
    engine.save_pretrained(folder / "trained")
    found: dict[str, Tensor] = {}
    for given, logprobs in zip(batches, engine.logprobs(batches), strict=True):
        pieces = logprobs.split(given.cu_seqlens.diff().tolist())
        found |= dict(zip(given.trajectory_ids, pieces, strict=True))
    found = {name: piece.clone() for name, piece in found.items()}
    save_file(found, folder / f"trained-{dist.get_rank()}.safetensors")


def two_ranks_unsplit(folder: Path) -> None:
    """All experts on both ranks, the plain model, and VeOmni's own expert kernel."""
    check_against_reference(make_engine(folder / "model", ep=1), folder)
    check_against_reference(make_engine(folder / "model", ep=2, expert_kernel="veomni"), folder)
    dense = make_engine(folder / "dense" / "model", ep=1)
    assert dense.expert_sharding.num_experts == 0
    check_against_reference(dense, folder / "dense")


def one_rank(folder: Path) -> None:
    """The contract with text alone, then images, and one pass per row: nothing is added up."""
    optim = OptimConfig(learning_rate=1e-2)
    under_test = EngineUnderTest(
        make=lambda: make_engine(folder / "model", ep=1, optim=optim), vocab_size=VOCAB_SIZE
    )
    for check in ENGINE_CHECKS:
        check(under_test)
    engine = make_engine(folder / "model", ep=1)
    check_logprobs(engine, folder, [batch((index,)) for index in range(len(ROWS))])
    check_against_reference(engine, folder)


def cuda(folder: Path) -> None:
    """One GPU in float32, and in bfloat16 near to it."""
    one_rank(folder)
    engine = make_engine(folder / "model", ep=1, compute_dtype="bfloat16")
    reference = load_file(folder / "reference.safetensors")
    batches = batches_of(0, 1)
    for given, logprobs in zip(batches, engine.logprobs(batches), strict=True):
        wanted = torch.cat([reference[name] for name in given.trajectory_ids])
        assert (logprobs.cpu() - wanted).abs().max().item() < 0.1


if __name__ == "__main__":
    main(globals(), timeout_s=240)
