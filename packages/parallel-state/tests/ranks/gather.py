"""What each gloo rank gets from `gather_full`, and what it costs."""

import gc
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from parallel_state import ExtraParallelSizes, ParallelState
from parallel_state.gather import gather_full
from parallel_state.mesh import build_meshes

MIB = 2**20
BUDGET = 8 * MIB
WHOLE = 64 * MIB
"""Bytes of each of the two large tensors."""


def _numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The same on every rank: all bit patterns are possible, NaNs with a payload included."""
    generator = torch.Generator().manual_seed(sum(shape))
    size = (torch.Size(shape).numel() * dtype.itemsize,)
    octets = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
    return octets.view(dtype).view(shape)


def _is_equal(tensor: Tensor, expected: Tensor) -> bool:
    return (
        tensor.shape == expected.shape
        and tensor.dtype == expected.dtype
        and tensor.is_contiguous()
        and type(tensor) is Tensor
        and torch.equal(
            tensor.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8)
        )
    )


def _check(
    params: dict[str, Tensor],
    expected: dict[str, Tensor],
    group: dist.ProcessGroup | None,
    max_bytes: int,
) -> bool:
    """Whether all is bit-equal once everything has arrived, so that nothing was overwritten."""
    got = list(gather_full(params.items(), group, max_bytes))
    assert [name for name, _ in got] == list(expected)
    storages = {tensor.untyped_storage().data_ptr() for _, tensor in got if tensor.numel()}
    assert len(storages) == sum(tensor.numel() > 0 for _, tensor in got)
    return all(_is_equal(tensor, expected[name]) for name, tensor in got)


def _dense_tensors() -> dict[str, Tensor]:
    return {
        "uneven": _numbers(7, 3),
        "bfloat16": _numbers(5, 2, dtype=torch.bfloat16),
        "shorter than the ranks": _numbers(1, 5),
        "empty": _numbers(0, 4),
        "double": _numbers(9, dtype=torch.float64),
        "long": _numbers(3, 2, dtype=torch.int64),
        "scalars are replicated": _numbers(),
        "large": _numbers(50, 11),
    }


def shards() -> object:
    """DTensors over all ranks, in chunks of one element up to all at once."""
    mesh = build_meshes(ParallelState(dp_size=dist.get_world_size()), "cpu").fsdp
    expected = _dense_tensors()
    params = {
        name: distribute_tensor(tensor, mesh, [Shard(0) if tensor.ndim else Replicate()])
        for name, tensor in expected.items()
    }
    smallest = 16 * (1 + 2 * dist.get_world_size())
    return {
        str(max_bytes): _check(dict(params), expected, None, max_bytes)
        for max_bytes in (smallest, 1000, MIB)
    }


def other_axes() -> object:
    """Shards of axis 1 and 2, uneven, which are not contiguous in the whole tensor."""
    mesh = build_meshes(ParallelState(dp_size=dist.get_world_size()), "cpu").fsdp
    expected = {"axis 1": _numbers(3, 7, 5), "axis 2": _numbers(2, 3, 7)}
    params = {
        "axis 1": distribute_tensor(expected["axis 1"], mesh, [Shard(1)]),
        "axis 2": distribute_tensor(expected["axis 2"], mesh, [Shard(2)]),
    }
    return [_check(dict(params), expected, None, max_bytes) for max_bytes in (160, 1000)]


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.t().contiguous().t()


def not_contiguous() -> object:
    """Shards whose own memory is transposed."""
    mesh = build_meshes(ParallelState(dp_size=dist.get_world_size()), "cpu").fsdp
    expected = {"sharded": _numbers(8, 6), "plain": _numbers(4, 3)}
    own = expected["sharded"].chunk(dist.get_world_size())[dist.get_rank()]
    params = {
        "sharded": DTensor.from_local(_transposed(own), mesh, [Shard(0)]),
        "plain": _transposed(expected["plain"]),
    }
    return _check(dict(params), expected, None, 160)


def fsdp_model() -> object:
    """What FSDP2 makes of a layer whose rows do not divide, in float32 and cast on the way."""
    mesh = build_meshes(ParallelState(dp_size=dist.get_world_size()), "cpu").fsdp
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 5)
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    fully_shard(model, mesh=mesh)
    got = dict(gather_full(model.named_parameters(), None, 1000))
    cast = dict(gather_full(model.named_parameters(), None, 1000, dtype=torch.bfloat16))
    return [
        all(_is_equal(got[name], expected[name]) for name in expected),
        all(_is_equal(cast[name], expected[name].bfloat16()) for name in expected),
        any(tensor.requires_grad for tensor in got.values()),
    ]


def two_axes() -> object:
    """Four ranks: replicas of shards, and shards of shards along one axis and along two."""
    meshes = build_meshes(ParallelState(dp_size=4, dp_replicate_size=2), "cpu")
    placements: dict[str, list[Placement]] = {
        "replicas": [Replicate(), Shard(0)],
        "shards of replicas": [Shard(0), Replicate()],
        "one axis": [Shard(0), Shard(0)],
        "two axes": [Shard(1), Shard(0)],
        "whole": [Replicate(), Replicate()],
    }
    expected = {name: _numbers(7, 5) for name in placements}
    params = {
        name: distribute_tensor(expected[name], meshes.fsdp, placed)
        for name, placed in placements.items()
    }
    return [_check(dict(params), expected, None, max_bytes) for max_bytes in (160, 4000)]


def experts() -> object:
    """Slices over ep: plain and uneven ones, and slices that are sharded over ep_fsdp besides."""
    size = dist.get_world_size()
    state = ParallelState(dp_size=size, extra_parallel_sizes=ExtraParallelSizes.of(ep=2))
    meshes = build_meshes(state, "cpu")
    ep, rank = meshes.group("ep"), meshes.axis("ep").get_local_rank()
    expected = {"up": _numbers(5, 3, 2), "bias": _numbers(5, 3, dtype=torch.bfloat16)}
    own = {name: whole.split([2, 3])[rank] for name, whole in expected.items()}
    sharded = {
        name: distribute_tensor(part.clone(), meshes.extra["ep"].fsdp, [Shard(0)])
        for name, part in own.items()
    }
    none = {name: whole.split([0, 5])[rank] for name, whole in expected.items()}
    return [
        _check(dict(params), expected, ep, max_bytes)
        for params in (own, sharded, none)
        for max_bytes in (160, 4000)
    ]


def experts_of_replicas() -> object:
    """Two replicas of two slices; the mesh beside `ep` has an axis for the replicas."""
    state = ParallelState(
        dp_size=4, dp_replicate_size=2, extra_parallel_sizes=ExtraParallelSizes.of(ep=2)
    )
    meshes = build_meshes(state, "cpu")
    expected = {"up": _numbers(5, 3, 2)}
    own = expected["up"].split([2, 3])[meshes.axis("ep").get_local_rank()].clone()
    placed = distribute_tensor(own, meshes.extra["ep"].fsdp, [Replicate(), Shard(0)])
    return _check({"up": placed}, expected, meshes.group("ep"), 160)


def without_elements() -> object:
    """Nothing but tensors of no elements, so that no byte travels."""
    mesh = build_meshes(ParallelState(dp_size=dist.get_world_size()), "cpu").fsdp
    expected = {"no columns": torch.empty(3, 0), "no rows": torch.empty(0, 3)}
    params = {name: distribute_tensor(each, mesh, [Shard(0)]) for name, each in expected.items()}
    return [tuple(each.shape) for _, each in gather_full(params.items(), None, MIB)]


def _said(call: Callable[[], object]) -> str | None:
    """The error of a call that has to refuse."""
    try:
        call()
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def refused() -> object:
    """What each mistake that all ranks make says."""
    meshes = build_meshes(
        ParallelState(dp_size=2, extra_parallel_sizes=ExtraParallelSizes.of(ep=2)), "cpu"
    )
    ep, fsdp, ones = meshes.group("ep"), meshes.fsdp, torch.ones(2)
    shard = distribute_tensor(torch.ones(4), fsdp, [Shard(0)])
    # 5 rows over 2 ranks are 3 and 2, here they lie as 2 and 3
    lie = torch.ones(2 + dist.get_rank())
    lying = DTensor.from_local(lie, fsdp, [Shard(0)], shape=torch.Size((5,)), stride=(1,))
    meta = DTensor.from_local(torch.empty(2, device="meta"), fsdp, [Shard(0)])
    partial = DTensor.from_local(ones, fsdp, [Partial()])
    items: Any = {"w": ones}  # not its items()
    calls: dict[str, Callable[[], object]] = {
        "small": lambda: gather_full([("w", ones)], ep, 79),
        "negative": lambda: gather_full([("w", ones)], None, -5),
        "bool": lambda: gather_full([("w", ones)], ep, max_bytes=True),
        "scalar": lambda: gather_full([("w", torch.tensor(1.0))], ep, MIB),
        "partial": lambda: gather_full([("w", partial)], None, MIB),
        "lying": lambda: gather_full([("w", lying)], None, MIB),
        "meta": lambda: gather_full([("w", meta)], None, MIB),
        "sparse": lambda: gather_full([("w", torch.eye(2).to_sparse())], ep, MIB),
        "twice": lambda: gather_full([("w", shard)], meshes.group("data"), MIB),
        "dict": lambda: gather_full(items, None, MIB),
        "tensors": lambda: gather_full(torch.ones(2, 2), None, MIB),
    }
    return {name: _said(call) for name, call in calls.items()}


def disagreements() -> object:
    """What the ranks say, each of them, where they bring different things."""
    is_second = dist.get_rank() == 1
    meshes = build_meshes(
        ParallelState(dp_size=2, extra_parallel_sizes=ExtraParallelSizes.of(ep=2)), "cpu"
    )
    ep, fsdp, ones = meshes.group("ep"), meshes.fsdp, torch.ones(2)
    a, b = (("a", distribute_tensor(torch.ones(4), fsdp, [Shard(0)])), ("b", ones))
    c = ("c", distribute_tensor(torch.zeros(4), fsdp, [Shard(0)]))
    partial = ("a", DTensor.from_local(ones, fsdp, [Partial()]))
    calls: dict[str, Callable[[], object]] = {
        "names": lambda: gather_full([(f"expert {dist.get_rank()}", ones)], ep, MIB),
        "counts": lambda: gather_full([("w", ones)] * (1 + dist.get_rank()), ep, MIB),
        "order": lambda: gather_full([c, b, a] if is_second else [a, b, c], None, MIB),
        "missing": lambda: gather_full([a] if is_second else [a, c], None, MIB),
        "budget": lambda: gather_full([a], None, 160 if is_second else 1600),
        "too small for one": lambda: gather_full([a], None, 79 if is_second else 1600),
        "dtype": lambda: gather_full([a], None, MIB, dtype=torch.half if is_second else None),
        "one refuses": lambda: gather_full([partial if is_second else a], None, MIB),
    }
    said = {name: _said(call) for name, call in calls.items()}
    # and the groups still work
    return {**said, "after": [each.tolist() for _, each in gather_full([a], None, MIB)]}


def outside_of_the_group() -> object:
    """A group of rank 0 alone, used on both."""
    group = dist.new_group([0])
    return _said(lambda: list(gather_full([("w", torch.ones(2))], group, MIB)))


def _resident(key: str) -> int:
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def _peak(work: Callable[[], None]) -> int:
    """Most memory that this process had above what it has before `work`, in bytes.

    As the kernel counts it, so that what a backend allocates for itself is in it.
    """
    work()  # what is allocated once and stays, such as buffers of sockets
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak to the present
    before = _resident("VmRSS")
    work()
    return _resident("VmHWM") - before


def peaks() -> object:
    """Extra memory of the streamed gather, and of gathering each tensor at once.

    Two large tensors and many small ones; each is dropped before the next one.
    """
    state = ParallelState(
        dp_size=dist.get_world_size(), extra_parallel_sizes=ExtraParallelSizes.of(ep=2)
    )
    meshes = build_meshes(state, "cpu")
    rows = WHOLE // 4096
    shapes = [(rows, 1024), (rows - 1, 1024), *[(1001, 33)] * 20]
    dense = {
        str(index): distribute_tensor(torch.ones(shape), meshes.fsdp, [Shard(0)])
        for index, shape in enumerate(shapes)
    }
    experts = {"experts": torch.ones(rows // 2, 1024)}
    gc.collect()

    def stream(params: dict[str, Tensor], group: dist.ProcessGroup | None) -> None:
        for _, tensor in gather_full(params.items(), group, BUDGET):
            assert tensor.sum() == tensor.numel()
            del tensor

    def at_once() -> None:
        for parameter in dense.values():
            tensor = parameter.full_tensor()
            assert tensor.sum() == tensor.numel()
            del tensor

    def experts_at_once() -> None:
        shares = [torch.empty_like(experts["experts"]) for _ in range(2)]
        dist.all_gather(shares, experts["experts"], group=meshes.group("ep"))
        assert torch.cat(shares).sum() == WHOLE // 4

    return {
        "streamed": _peak(lambda: stream(dict(dense), None)),
        "streamed experts": _peak(lambda: stream(experts, meshes.group("ep"))),
        "at once": _peak(at_once),
        "experts at once": _peak(experts_at_once),
    }
