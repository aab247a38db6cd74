"""Exports of engine-veomni: what they cost beside the gather that they cannot do without.

A part of veomni_step.py, which runs it.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine_veomni import VeomniEngine
from parallel_state.gather import gather_full

MIB = 2**20
Seconds = Callable[[Callable[[], object]], float]
"""Median wall time of some work, on all ranks at once."""
PeakBytes = Callable[[Callable[[], object]], int]
"""Most memory that some work had beside what was there before."""

_COPIES = ("copy_", "clone", "_to_copy", "cat", "contiguous")


@final
class Copies(TorchDispatchMode):
    """Counts what is copied, and the collectives, in this block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0
        """Operations that write a copy."""
        self.num_bytes = 0
        """Bytes that they wrote."""
        self.collectives = 0
        """Operations of a process group."""

    def __torch_dispatch__(
        self,
        function: Callable[..., object],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        """Run the operation and look at its name."""
        del types
        result = function(*args, **(kwargs or {}))
        namespace, _, name = str(function).partition(".")
        if namespace == "c10d":
            self.collectives += 1
        elif name.partition(".")[0] in _COPIES:
            self.count += 1
            self.num_bytes += sum(
                leaf.nbytes
                for leaf in tree_leaves(result)
                if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor)
            )
        return result


def unstreamed(engine: VeomniEngine) -> None:
    """Gather each stack of experts at once, as other engines do, and take it apart."""
    group = engine._policy.state.ep_group  # noqa: SLF001
    for parameter in engine._policy.model.parameters():  # noqa: SLF001
        whole = cast("DTensor", parameter.detach().to(torch.bfloat16)).full_tensor()
        if group is not None and whole.ndim == 3:  # noqa: PLR2004 - a stack
            shares = [torch.empty_like(whole) for _ in range(group.size())]
            dist.all_gather(shares, whole, group=group)
            whole = torch.cat(shares)


def gathered(engine: VeomniEngine) -> None:
    """The gather of an export alone: whole stacks, not yet one tensor per expert."""
    stacks = [
        (name, parameter)
        for name, parameter in engine._policy.model.named_parameters()  # noqa: SLF001
        if parameter.ndim == 3  # noqa: PLR2004 - a stack
    ]
    group, max_bytes = engine._policy.state.ep_group, engine.config.export_max_bytes  # noqa: SLF001
    for _, whole in gather_full(stacks, group, max_bytes, dtype=torch.bfloat16):
        del whole


def streamed(engine: VeomniEngine, *, clones: bool = False) -> int:
    """Run an export to its end, and count its bytes; or copy every expert out of its stack too."""
    num_bytes = 0
    for weight in engine.export_weights():
        kept = weight.tensor.clone() if clones and ".experts." in weight.name else weight.tensor
        num_bytes += kept.nbytes
        del weight, kept
    return num_bytes


def measure_export(
    engine: VeomniEngine, *, stack_bytes: int, seconds: Seconds, peak_bytes: PeakBytes
) -> dict[str, float]:
    """Time, traffic, copies and memory of exports of one engine.

    Args:
        engine: whose weights are exported.
        stack_bytes: of all experts, in the type of the export.
        seconds: measures time.
        peak_bytes: measures memory.
    """
    with Copies() as copies:
        num_bytes = streamed(engine)
    with Copies() as cloned:
        streamed(engine, clones=True)
    # every rank receives all but its own share
    received = 1 - 1 / dist.get_world_size()
    export_s = seconds(partial(streamed, engine))
    cloned_s = seconds(partial(streamed, engine, clones=True))
    return {
        "export_s": export_s,
        "export_gib": num_bytes / 2**30,
        "export_received_gbs": num_bytes * received / export_s / 1e9,
        "export_copies": copies.count,
        "export_copied_per_byte": copies.num_bytes / num_bytes,
        "export_collectives": copies.collectives,
        "cloned_s": cloned_s,
        "cloned_copies": cloned.count,
        "cloned_copied_per_byte": cloned.num_bytes / num_bytes,
        "cloned_over_export": cloned_s / export_s,
        "gather_gbs": stack_bytes * received / seconds(partial(gathered, engine)) / 1e9,
        "export_peak_mib": peak_bytes(partial(streamed, engine)) / MIB,
        "unstreamed_peak_mib": peak_bytes(partial(unstreamed, engine)) / MIB,
        "unstreamed_s": seconds(partial(unstreamed, engine)),
    }
