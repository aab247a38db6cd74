"""One rank of a slow test: runs a scenario and hard-exits after a barrier.

A gloo rank that leaves while another still talks to it aborts now and then, so nothing is torn
down: a barrier says that all are done, and the process ends.
"""

import functools
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from memory_checks import (
    check_device_memory,
    check_export_copies_no_expert,
    check_host_memory,
    check_offload,
)
from rank_checks import (
    DEVICE,
    assert_bit_equal,
    assert_near,
    check_against_reference,
    exported,
    main,
    make_engine,
    raised,
)
from router_checks import check_balancing, check_router, check_sampler_routes
from safetensors.torch import load_file
from scenario_data import (
    EPS,
    LEARNING_RATE,
    VOCAB_SIZE,
    batch,
    batches_of,
    loss_fn,
    num_loss_tokens,
    read_folder,
)
from torch import Tensor

from engine_veomni import OptimConfig, VeomniEngine, VeomniScorer
from engine_veomni.build import check_experts
from engine_veomni.veomni_state import VeomniState
from parallel_state import ExtraParallelSizes, ParallelState
from rl_contracts.testing.engine_contract import ENGINE_CHECKS, EngineUnderTest
from rl_contracts.train import LossOutput, PackedBatch


def check_errors(engine: VeomniEngine) -> None:
    """A mistake on one rank is an error on all, and leaves an engine that works."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batches = batches_of(rank, world_size)
    before = exported(engine)
    text = raised(ValueError, lambda: engine.logprobs(batches[: 2 - rank]))
    assert "same number of micro-batches on every rank, at least one, got 2, 1;" in text, text
    assert "no gradient" in raised(RuntimeError, engine.optim_step)

    def poisoned(policy_logprobs: Tensor, batch: PackedBatch) -> LossOutput:
        output = loss_fn(policy_logprobs, batch)
        bad = "row-4" in batch.trajectory_ids
        return replace(output, loss=output.loss * (float("nan") if bad else 1.0))

    text = raised(FloatingPointError, lambda: engine.forward_backward(batches, poisoned))
    assert "rank 1, in micro-batch 0 (trajectories row-3, row-4): nan;" in text, text

    def detached_on_rank_1(policy_logprobs: Tensor, batch: PackedBatch) -> LossOutput:
        return loss_fn(policy_logprobs.detach() if rank == 1 else policy_logprobs, batch)

    text = raised(ValueError, lambda: engine.forward_backward(batches, detached_on_rank_1))
    assert "on rank 1, the loss of micro-batch 0 (trajectories row-3, row-4) carries no" in text
    assert "no gradient" in raised(RuntimeError, engine.optim_step)

    def interrupted_on_rank_1(policy_logprobs: Tensor, batch: PackedBatch) -> LossOutput:
        if rank == 1:
            raise KeyError("no reward")
        return loss_fn(policy_logprobs, batch)

    kind = KeyError if rank == 1 else RuntimeError
    text = raised(kind, lambda: engine.forward_backward(batches, interrupted_on_rank_1))
    assert "no reward" in text, text
    assert rank == 1 or (
        "on rank 1 raised KeyError for micro-batch 0 (trajectories row-3, row-4): " in text
    ), text
    assert "no gradient" in raised(RuntimeError, engine.optim_step)

    def steep(policy_logprobs: Tensor, batch: PackedBatch) -> LossOutput:
        # finite, and without a derivative
        cliff = (0.0 * policy_logprobs.sum()).sqrt() if rank == 1 else 0.0
        return LossOutput(loss=loss_fn(policy_logprobs, batch).loss + cliff, metrics={})

    engine.forward_backward(batches, steep)
    text = raised(FloatingPointError, engine.optim_step)
    assert "norm is nan at policy version 0; the gradient was dropped" in text, text
    assert "no gradient" in raised(RuntimeError, engine.optim_step)
    assert engine.policy_version == 0
    assert_bit_equal(exported(engine), before)


def check_malformed(engine: VeomniEngine) -> None:
    """A malformed micro-batch on rank 1 is refused on both ranks, with the rank and the reason."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batches = batches_of(rank, world_size)
    good = batches[0]
    changes: tuple[tuple[dict[str, Any], str], ...] = (
        ({"loss_mask": torch.ones_like(good.loss_mask)}, "True on the first token of a sequence"),
        ({"positions": torch.zeros_like(good.positions)}, "positions that count from 0 in each"),
        ({"token_ids": good.token_ids + VOCAB_SIZE}, f"token ids from 0 to {VOCAB_SIZE - 1}, got "),
        ({"cu_seqlens": good.cu_seqlens + 1}, "expected cu_seqlens to rise from 0 to its"),
    )
    for change, reason in changes:
        bad = [replace(good, **change), *batches[1:]] if rank == 1 else batches
        for method, call in (
            ("logprobs", functools.partial(engine.logprobs, bad)),
            ("forward_backward", functools.partial(engine.forward_backward, bad, loss_fn)),
        ):
            text = raised(ValueError, call)
            assert f"{method}: on rank 1, micro-batch 0 (trajectories row-3, row-4): " in text, text
            assert reason in text, text


def check_guards(spread: VeomniEngine) -> None:
    """What should never happen is told apart from what was asked for, with both numbers."""
    # loaded here and not above: the CPU backend must be there before VeOmni is
    from veomni.distributed import parallel_state as veomni_parallel_state  # noqa: PLC0415

    parallel = ParallelState(dp_size=2, extra_parallel_sizes=ExtraParallelSizes.of(ep=1))
    text = raised(
        RuntimeError, lambda: check_experts(spread._policy.model, parallel, spread._policy.state)
    )
    assert "asks for 8 / 1 experts" in text, text
    assert "in groups of 1, got 4 in groups of 2" in text, text

    original = veomni_parallel_state.init_parallel_state

    @functools.wraps(original)
    def first_state_to_all(**_: object) -> object:
        return spread._policy.state._raw

    veomni_parallel_state.init_parallel_state = first_state_to_all
    text = raised(RuntimeError, lambda: VeomniState(parallel, device_type="cpu"))
    veomni_parallel_state.init_parallel_state = original
    assert "the state of another engine" in text, text
    small = ParallelState(dp_size=1)
    text = raised(ValueError, lambda: VeomniState(small, device_type="cpu"))
    assert "needs 1 ranks" in text, text


def check_clipping(folder: Path) -> None:
    """A step that is clipped to half the norm is that of the halved loss, on experts too."""
    norm = load_file(folder / "reference.safetensors")["norm"].item()
    batches = batches_of(dist.get_rank(), dist.get_world_size())

    def halved(policy_logprobs: Tensor, batch: PackedBatch) -> LossOutput:
        output = loss_fn(policy_logprobs, batch)
        return replace(output, loss=output.loss / 2)

    results = []
    for max_grad_norm, loss in ((norm / 2, loss_fn), (None, halved)):
        optim = OptimConfig(
            learning_rate=LEARNING_RATE, eps=EPS, max_grad_norm=max_grad_norm, warmup_steps=2
        )
        engine = make_engine(folder / "model", ep=2, optim=optim)
        assert engine.learning_rate == LEARNING_RATE / 2
        engine.forward_backward(batches, loss)
        engine.optim_step()
        assert engine.learning_rate == LEARNING_RATE
        results.append(exported(engine))
    assert_near(results[0], results[1], atol=1e-6)
    moved = {name: results[0][name] - old for name, old in read_folder(folder / "model").items()}
    assert max(difference.abs().max().item() for difference in moved.values()) > 1e-4


def check_resume(engine: VeomniEngine, folder: Path, *, ep: int) -> None:
    """Saving and loading is not to be seen in the steps that follow."""
    batches = batches_of(dist.get_rank(), dist.get_world_size())
    engine.save_checkpoint(folder / f"checkpoint-{ep}")
    engine.forward_backward(batches, loss_fn)
    engine.optim_step()
    again = make_engine(folder / "model", ep=ep)
    again.load_checkpoint(folder / f"checkpoint-{ep}")
    assert again.policy_version == 1
    again.forward_backward(batches, loss_fn)
    again.optim_step()
    assert_bit_equal(exported(again), exported(engine))
    raised(FileExistsError, lambda: engine.save_checkpoint(folder / f"checkpoint-{ep}"))


def two_ranks(folder: Path) -> None:
    spread = make_engine(folder / "model", ep=2)
    sharding = spread.expert_sharding
    assert (sharding.num_experts, sharding.num_local_experts, sharding.ep_size) == (8, 4, 2)
    # another topology in the same process: not the state of the first
    whole = make_engine(folder / "model", ep=1, expert_kernel="veomni")
    sharding = whole.expert_sharding
    assert (sharding.num_experts, sharding.num_local_experts, sharding.ep_size) == (8, 8, 1)

    reference = VeomniScorer(spread.config, device=DEVICE)
    scored = reference.logprobs(batches_of(dist.get_rank(), 2))
    first = spread.logprobs(batches_of(dist.get_rank(), 2))
    assert all(torch.equal(*pair) for pair in zip(scored, first, strict=True))

    check_export_copies_no_expert(spread)
    check_export_copies_no_expert(whole)
    check_guards(spread)
    check_malformed(spread)
    check_errors(spread)
    check_against_reference(spread, folder)
    check_against_reference(whole, folder)
    assert_near(exported(spread), exported(whole), atol=1e-6)
    # both engines have taken a step by now, and the reference has not
    again = reference.logprobs(batches_of(dist.get_rank(), 2))
    assert all(torch.equal(*pair) for pair in zip(scored, again, strict=True))
    moved = spread.logprobs(batches_of(dist.get_rank(), 2))
    assert not all(torch.equal(*pair) for pair in zip(scored, moved, strict=True))
    check_resume(spread, folder, ep=2)
    text = raised(ValueError, lambda: whole.load_checkpoint(folder / "checkpoint-2"))
    assert "'ep': 2" in text, text
    assert "'ep': 1}}; resume with the same degrees" in text, text
    spread.save_pretrained(folder / "trained")
    assert_bit_equal(read_folder(folder / "trained"), exported(spread))
    (logprobs,) = spread.logprobs([batch((3, 4))])
    (folder / f"trained-{dist.get_rank()}.txt").write_text(" ".join(map(repr, logprobs.tolist())))

    check_clipping(folder)
    check_router(folder)
    square = make_engine(folder / "square", ep=2, expert_kernel="veomni")
    weights = exported(square)
    assert_bit_equal(weights, read_folder(folder / "square"))
    prefix = "model.layers.0.mlp.experts"
    assert all(
        torch.equal(weights[f"{prefix}.{n}.gate_proj.weight"], torch.ones(3, 3)) for n in (0, 1)
    )
    assert all(
        torch.equal(weights[f"{prefix}.{n}.up_proj.weight"], torch.full((3, 3), 2.0))
        for n in (0, 1)
    )
    assert torch.equal(weights[f"{prefix}.1.down_proj.weight"], torch.arange(9.0, 18.0).view(3, 3))


def two_ranks_routers(folder: Path) -> None:
    """The balancing loss, and routes of a sampler."""
    check_balancing(folder)
    check_sampler_routes(folder)


def two_ranks_memory(folder: Path) -> None:
    """Experts spread over two ranks, and weights sharded over them, away and back."""
    for ep in (2, 1):
        check_host_memory(folder, ep=ep)
    check_offload(folder)


def two_ranks_bfloat16(folder: Path) -> None:
    """Checkpointed activations in bfloat16, with both expert kernels."""
    for kernel in ("grouped_mm", "veomni"):
        check_bfloat16(folder, ep=2, expert_kernel=kernel, activation_checkpointing=True)


def four_ranks(folder: Path) -> None:
    """Experts sharded within their ep rank (dp 4, ep 2), and two copies of the model (HSDP)."""
    for dp_replicate_size, ep, kernel in ((1, 2, "veomni"), (2, 2, "grouped_mm"), (1, 4, "veomni")):
        engine = make_engine(
            folder / "model", ep=ep, dp_replicate_size=dp_replicate_size, expert_kernel=kernel
        )
        assert engine.expert_sharding.num_local_experts == 8 // ep
        check_against_reference(engine, folder)


def ulysses(folder: Path) -> None:
    """Ranks that share sequences: with the experts spread over them, and beside data parallelism.

    Two key-value heads for four ranks, too: two ranks get a copy each.
    """
    for size, ep in ((2, 4), (4, 2), (4, 1)):
        engine = make_engine(folder / "model", ep=ep, ulysses_size=size)
        check_against_reference(engine, folder)
    given = batches_of(0 if dist.get_rank() < 3 else 1, 2)
    text = raised(ValueError, lambda: engine.logprobs(given))
    assert "ranks 0 to 3 share their sequences (ulysses_size = 4), but rank 3 was given" in text


def check_bfloat16(folder: Path, *, ep: int, **changes: Any) -> float:  # noqa: ANN401
    """Near the float32 logprobs and norm, and exported in bfloat16; the norm."""
    engine = make_engine(folder / "model", ep=ep, compute_dtype="bfloat16", **changes)
    expected = {name: t.bfloat16() for name, t in read_folder(folder / "model").items()}
    assert_bit_equal(exported(engine), expected)
    reference = load_file(folder / "reference.safetensors")
    batches = batches_of(dist.get_rank(), dist.get_world_size())
    for given, values in zip(batches, engine.logprobs(batches), strict=True):
        assert values.dtype == torch.float32
        wanted = torch.cat([reference[name] for name in given.trajectory_ids])
        assert (values.cpu() - wanted).abs().max().item() < 0.1
    engine.forward_backward(batches, loss_fn)
    norm = engine.optim_step().grad_norm
    wanted_norm = reference["norm"].item()
    assert abs(norm - wanted_norm) < 0.1 * wanted_norm, (norm, wanted_norm)
    return norm


def check_empty_experts() -> None:
    """Experts without rows get a gradient of 0 from the device's grouped product."""
    from engine_veomni.expert_kernel import swiglu_experts  # noqa: PLC0415

    generator = torch.Generator().manual_seed(3)
    ends = torch.tensor([0, 5, 5, 9, 9])
    results = []
    for device in (torch.device("cpu"), DEVICE):
        generator.manual_seed(3)
        tensors = [
            torch.randn(*shape, generator=generator).bfloat16().to(device).requires_grad_()
            for shape in ((9, 32), (9,), (5, 48, 32), (5, 32, 24))
        ]
        rows, weights, gate_up, down = tensors
        swiglu_experts(rows, weights, ends.to(device), gate_up, down).square().sum().backward()
        gradients = [tensor.grad for tensor in tensors if tensor.grad is not None]
        for gradient in gradients[2:]:
            assert not gradient[[0, 2, 4]].any()
        results.append([gradient.float().cpu() for gradient in gradients])
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.05 * wanted.abs().max().item())


def cuda(folder: Path) -> None:
    """One GPU: the contract, plain transformers in float32, and both expert kernels in bfloat16."""
    contract(folder)
    check_device_memory(folder)
    check_empty_experts()
    norms = [
        check_bfloat16(folder, ep=1, expert_kernel="grouped_mm"),
        check_bfloat16(folder, ep=1, expert_kernel="grouped_mm"),
        check_bfloat16(folder, ep=1, expert_kernel="veomni"),
        check_bfloat16(folder, ep=1, activation_checkpointing=True),
    ]
    assert norms[0] == norms[1], norms
    assert "engine_veomni.cpu_backend" not in sys.modules


def cuda_two_ranks(folder: Path) -> None:
    """Two GPUs over NCCL: experts spread, weights sharded, the model replicated."""
    for dp_replicate_size, ep in ((1, 2), (1, 1), (2, 1)):
        engine = make_engine(folder / "model", ep=ep, dp_replicate_size=dp_replicate_size)
        assert engine.expert_sharding.num_local_experts == 8 // ep
        check_against_reference(engine, folder)
    for kernel in ("grouped_mm", "veomni"):
        check_bfloat16(folder, ep=2, expert_kernel=kernel)


def contract(folder: Path) -> None:
    """One rank meets every check of the contract."""
    optim = OptimConfig(learning_rate=1e-2)
    under_test = EngineUnderTest(
        make=lambda: make_engine(folder / "model", ep=1, optim=optim), vocab_size=VOCAB_SIZE
    )
    for check in ENGINE_CHECKS:
        check(under_test)
    check_against_reference(make_engine(folder / "model", ep=1), folder)
    dense = make_engine(folder / "dense" / "model", ep=1)
    assert dense.expert_sharding.num_experts == 0
    check_against_reference(dense, folder / "dense")
    assert num_loss_tokens() > 0


if __name__ == "__main__":
    main(globals(), timeout_s=120)
