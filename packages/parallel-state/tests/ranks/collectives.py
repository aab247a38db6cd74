"""What each gloo rank gets from the collectives."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from parallel_state import ExtraParallelSizes, ParallelState
from parallel_state.collectives import (
    ShardedParameters,
    clip_grads_,
    global_grad_norm,
    global_sum,
    share_of_mean,
)
from parallel_state.mesh import Meshes, build_meshes
from parallel_state.sizes import AxisT

CPU = torch.device("cpu")


def _with_grad(grad: Tensor) -> Tensor:
    parameter = torch.nn.Parameter(torch.zeros_like(grad))
    parameter.grad = grad
    return parameter


def _placed(values: list[float], mesh: DeviceMesh, *, replicated: bool) -> Tensor:
    placements = [Replicate(), Shard(0)] if replicated else [Shard(0)]
    return _with_grad(distribute_tensor(torch.tensor(values), mesh, placements))


def sums() -> object:
    """Each rank brings its rank + 1 tokens, as int32, and half of it as float."""
    meshes = build_meshes(ParallelState(dp_size=2), "cpu")
    counts = torch.tensor([dist.get_rank() + 1, 10], dtype=torch.int32)
    total = global_sum(counts, group=meshes.group("data"))
    halves = global_sum(torch.tensor((dist.get_rank() + 1) / 2), group=meshes.group("data"))
    return [str(total.dtype), total.tolist(), counts.tolist(), halves.item()]


def _mean_loss_gradient(meshes: Meshes[AxisT], losses: Tensor) -> float:
    """Gradient of the global token mean of `weight * losses`, through real FSDP2."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    fully_shard(model, mesh=meshes.fsdp)
    count = global_sum(torch.tensor(losses.numel()), group=meshes.group("data"))
    local_sum = (model(torch.ones(1, 1)).squeeze() * losses).sum()
    share_of_mean(
        local_sum, global_count=int(count), averaged_over=meshes.state.data_size
    ).backward()
    assert isinstance(model.weight.grad, DTensor)
    return model.weight.grad.full_tensor().item()


def sequence_parallel_loss() -> object:
    """All ranks share one sequence, 100 tokens of loss 1 each (A08)."""
    state = ParallelState.for_world(dist.get_world_size(), ulysses_size=dist.get_world_size())
    return _mean_loss_gradient(build_meshes(state, "cpu"), torch.ones(100))


def uneven_loss() -> object:
    """Rank 0 has 2 tokens of loss 1, rank 1 has 6 tokens of loss 3 (A07)."""
    losses = torch.ones(2) if dist.get_rank() == 0 else torch.full((6,), 3.0)
    return _mean_loss_gradient(build_meshes(ParallelState(dp_size=2), "cpu"), losses)


def _gradient_of_split(state: ParallelState[AxisT], micro_batches: int) -> float:
    """Gradient of the mean over 24 tokens, dealt out to ranks and micro-batches by their sizes.

    The losses are 1 to 24, and the ranks get 1, 2, 3, ... parts of them.
    """
    meshes = build_meshes(state, "cpu")
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    fully_shard(model, mesh=meshes.fsdp)
    num_ranks, rank = state.data_size, meshes.axis("data").get_local_rank()
    ends = [
        24 * part * (part + 1) // (num_ranks * (num_ranks + 1)) for part in range(1 + num_ranks)
    ]
    losses = torch.arange(1.0, 25.0)[ends[rank] : ends[rank + 1]]
    count = global_sum(torch.tensor(losses.numel()), group=meshes.group("data"))
    for part in losses.tensor_split(micro_batches):
        local_sum = (model(torch.ones(1, 1)).squeeze() * part).sum()
        share_of_mean(local_sum, global_count=int(count), averaged_over=num_ranks).backward()
    assert isinstance(model.weight.grad, DTensor)
    return model.weight.grad.full_tensor().item()


def splits() -> object:
    """The same tokens over every way to cut four ranks, in one, two and three micro-batches."""
    states = [
        ParallelState(dp_size=4),
        ParallelState(dp_size=4, dp_replicate_size=2),
        ParallelState(dp_size=4, dp_replicate_size=4),
        ParallelState(dp_size=2, ulysses_size=2),
        ParallelState(dp_size=2, dp_replicate_size=2, ulysses_size=2),
        ParallelState(ulysses_size=4),
    ]
    return [_gradient_of_split(state, number) for state in states for number in (1, 2, 3)]


def nothing_to_learn() -> object:
    """No rank has a token (A11)."""
    return _mean_loss_gradient(build_meshes(ParallelState(dp_size=2), "cpu"), torch.ones(0))


def replicated_norm() -> object:
    """Four replicas of the gradient (3, 4) (A38)."""
    state = ParallelState(dp_size=4, dp_replicate_size=4)
    mesh = build_meshes(state, "cpu").fsdp
    parameter = _placed([3.0, 4.0], mesh, replicated=True)
    return global_grad_norm([ShardedParameters(parameters=[parameter])], device=CPU).item()


def hybrid_norm() -> object:
    """Two replicas of two shards of the gradient (1, 2, 2, 4), whose norm is 5."""
    mesh = build_meshes(ParallelState(dp_size=4, dp_replicate_size=2), "cpu").fsdp
    parameter = _placed([1.0, 2.0, 2.0, 4.0], mesh, replicated=True)
    return global_grad_norm([ShardedParameters(parameters=[parameter])], device=CPU).item()


def _expert_parts(expert: Tensor, dense: Tensor, ep: dist.ProcessGroup) -> list[ShardedParameters]:
    return [
        ShardedParameters(parameters=[dense]),
        ShardedParameters(parameters=[expert], groups=[ep]),
    ]


def expert_norms() -> object:
    """Experts of norm 3 and 4 on two ep ranks, with dense gradients of norm 0, 12, or missing."""
    state = ParallelState(dp_size=2, extra_parallel_sizes=ExtraParallelSizes.of(ep=2))
    meshes = build_meshes(state, "cpu")
    ep = meshes.group("ep")
    own = 3.0 if dist.get_rank() == 0 else 4.0

    def expert() -> Tensor:
        return _placed([own], meshes.extra["ep"].fsdp, replicated=False)

    def dense(*values: float) -> Tensor:
        return _placed(list(values), meshes.fsdp, replicated=False)

    idle = expert()
    if dist.get_rank() == 1:
        idle.grad = None
    clipped = _expert_parts(expert(), dense(0.0, 12.0, 0.0), ep)
    norm = global_grad_norm(clipped, device=CPU)
    clip_grads_(clipped, norm=norm, max_norm=6.5)
    after = global_grad_norm(clipped, device=CPU)
    clip_grads_(clipped, norm=after, max_norm=100.0)
    return {
        "dense 0": global_grad_norm(
            _expert_parts(expert(), dense(0.0, 0.0), ep), device=CPU
        ).item(),
        "dense 12": norm.item(),
        "clipped to 6.5": after.item(),
        "not clipped to 100": global_grad_norm(clipped, device=CPU).item(),
        "rank 1 without gradient": global_grad_norm(
            _expert_parts(idle, dense(0.0, 0.0), ep), device=CPU
        ).item(),
        "plain tensors": global_grad_norm(
            [ShardedParameters(parameters=[_with_grad(torch.tensor([own]))], groups=[ep])],
            device=CPU,
        ).item(),
        "infinite": global_grad_norm(
            _expert_parts(expert(), dense(float("inf"), 0.0), ep), device=CPU
        ).item(),
    }


def mixed_norm() -> object:
    """Two replicas, each of two expert slices of norm 3 and 4 and dense shards of norm 12."""
    state = ParallelState(
        dp_size=4, dp_replicate_size=2, extra_parallel_sizes=ExtraParallelSizes.of(ep=2)
    )
    meshes = build_meshes(state, "cpu")
    own = [3.0, 4.0][meshes.axis("ep").get_local_rank()]
    expert = _placed([own], meshes.extra["ep"].fsdp, replicated=True)
    dense = _placed([0.0, 12.0], meshes.fsdp, replicated=True)
    parts = _expert_parts(expert, dense, meshes.group("ep"))
    return global_grad_norm(parts, device=CPU).item()


def pending_sum() -> object:
    """A gradient that was not reduced yet."""
    mesh = build_meshes(ParallelState(dp_size=2), "cpu").fsdp
    parameter = torch.nn.Parameter(distribute_tensor(torch.zeros(2), mesh, [Replicate()]))
    parameter.grad = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    try:
        global_grad_norm([ShardedParameters(parameters=[parameter])], device=CPU)
    except ValueError as error:
        return str(error)
    return None


def sums_refused() -> object:
    """What does not add up, each of it brought to both ranks at once."""
    meshes, is_second = build_meshes(ParallelState(dp_size=2), "cpu"), dist.get_rank() == 1
    data = meshes.group("data")
    whole: Any = None  # all ranks, for torch
    sharded = distribute_tensor(torch.ones(2), meshes.fsdp, [Shard(0)])
    calls: dict[str, Callable[[], Tensor]] = {
        "shape": lambda: global_sum(torch.ones(2 + dist.get_rank()), group=data),
        "type": lambda: global_sum(torch.tensor(1.5 if is_second else 1), group=data),
        "no group": lambda: global_sum(torch.tensor(1), group=whole),
        "complex": lambda: global_sum(torch.tensor(1j), group=data),
        "sharded": lambda: global_sum(sharded, group=data),
    }
    return {name: _said(call) for name, call in calls.items()}


def sum_of_another_memory_order() -> object:
    """Rank 1 holds the columns of the same 2 x 3 numbers one after the other."""
    meshes = build_meshes(ParallelState(dp_size=2), "cpu")
    numbers = torch.arange(6.0).view(2, 3)
    if dist.get_rank() == 1:
        numbers = numbers.t().contiguous().t()
    return global_sum(numbers, group=meshes.group("data")).tolist()


def _said(call: Callable[[], object]) -> str | None:
    try:
        call()
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def norms_refused() -> object:
    """What would count a piece twice, or not at all."""
    meshes = build_meshes(ParallelState(dp_size=2), "cpu")
    shard = _placed([3.0, 4.0], meshes.fsdp, replicated=False)
    data = ShardedParameters(parameters=[shard], groups=[meshes.group("data")])
    sparse = torch.nn.Embedding(4, 2, sparse=True)
    sparse(torch.tensor([1])).sum().backward()
    return {
        "over one axis twice": _said(lambda: global_grad_norm([data], device=CPU)),
        "sparse": _said(
            lambda: global_grad_norm([ShardedParameters(parameters=[sparse.weight])], device=CPU)
        ),
    }


def wide_gradients() -> object:
    """Norm 5 in float64 and in complex64."""
    wide = _with_grad(torch.tensor([3.0, 4.0], dtype=torch.float64))
    pair = _with_grad(torch.tensor([3 + 4j], dtype=torch.complex64))
    return [
        global_grad_norm([ShardedParameters(parameters=[each])], device=CPU).item()
        for each in (wide, pair)
    ]
