"""Which rank of the trainer sends weights to which engine process, and how; see docs/adr/0014.

devices of their own   rank 0 ── NCCL ──▶ every engine process; all ranks take part in the gathers
shared devices         rank i ── CUDA IPC ──▶ the engine process on its own device
CPUs                   rank 0 ── mapped memory ──▶ every engine process
"""

from collections.abc import Sequence

from placement import Placement

from rollout_vllm.weights_stream import Carriage

STREAM_TIMEOUT_S = 300.0
"""How long one half of a stream of weights waits for the other. Default: far above the seconds that
a sampler takes before its first update, and below the 600 s after which NCCL ends the other ranks,
who wait in a gather."""


def carriage_of(placement: Placement, rank: int) -> Carriage | None:
    """How this rank sends weights; None if it does not."""
    if placement.shared:
        return "shared"  # to whatever engine process computes on its own device
    if rank > 0:
        return None
    return "shared" if placement.device.kind == "cpu" else "broadcast"


def receivers_of(
    placement: Placement, samplers: Sequence[int], *, devices_per_sampler: int
) -> list[int]:
    """How many engine processes of these samplers each rank sends to."""
    if not placement.shared:
        return [len(samplers) * devices_per_sampler] + [0] * (len(placement.ranks) - 1)
    theirs = [device for number in samplers for device in placement.samplers[number]]
    return [sum(device in theirs for device in devices) for devices in placement.ranks]
