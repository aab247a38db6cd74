"""Which process computes on which device of this machine, said before anything starts.

devices of their own      ranks 0 1 │ sampler 0: 2 3 │ sampler 1: 4 5
shared (enable_sleep)     ranks 0 1 2 3, and on the same four sampler 0: 0 1 │ sampler 1: 2 3
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from device_env import Device, RecipeName, visible_devices
from rollout_vllm import VllmConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """The devices of each process, by the ids that the vendor's variable takes."""

    device: Device
    """What kind of device there is, and how many this process sees."""

    ranks: tuple[tuple[str, ...], ...]
    """Of each trainer rank; nothing on CPUs."""

    samplers: tuple[tuple[str, ...], ...]
    """Of each sampler; nothing on CPUs."""

    shared: bool
    """Whether trainer and samplers take turns on the same devices."""

    @property
    def torch_device(self) -> torch.device:
        """What a trainer rank computes on, which sees no other device."""
        kind = self.device.torch_device_type
        return torch.device(kind) if kind == "cpu" else torch.device(kind, 0)

    @property
    def backend(self) -> str:
        """The process group of the trainer's ranks."""
        kind, backend = self.device.torch_device_type, self.device.collective_backend
        return backend if kind == "cpu" else f"cpu:gloo,{kind}:{backend}"

    @property
    def profile(self) -> RecipeName:
        """What the run does with its devices, in the words of device-env."""
        return "colocated-rl" if self.shared else "disaggregated-rl"

    def environment(self, ids: Sequence[str]) -> dict[str, str]:
        """Makes a process see these devices and no others."""
        variable = self.device.visible_devices_variable
        return {} if variable is None else {variable: ",".join(ids)}

    def lines(self) -> list[str]:
        """For people."""
        if self.device.kind == "cpu":
            return ["trainer and samplers compute on this machine's cores"]
        turns = "take turns on the same devices" if self.shared else "have devices of their own"
        return [
            f"trainer and samplers {turns}; {self.device.visible_devices_variable} of each:",
            *(f"trainer rank {rank}: {','.join(ids)}" for rank, ids in enumerate(self.ranks)),
            *(f"sampler {number}: {','.join(ids)}" for number, ids in enumerate(self.samplers)),
        ]


def place(
    sampler: VllmConfig,
    *,
    num_ranks: int,
    num_samplers: int,
    device: Device,
    environ: Mapping[str, str],
) -> Placement:
    """Deal the devices of this machine out.

    Args:
        sampler: of each sampler; with `enable_sleep` it shares its devices with the trainer.
        num_ranks: ranks of the trainer, one device each.
        num_samplers: samplers.
        device: what this process sees.
        environ: where `device` was looked for.

    Raises:
        ValueError: if the sampler is for another kind of device, there are too few, or a sampler
            shares a device with no rank.
    """
    if sampler.device != device.torch_device_type or device.kind not in ("cpu", "cuda"):
        raise ValueError(
            f"sampler.device = {sampler.device!r}, and this machine has {device.kind} "
            f"({', '.join(device.names)}); `python -m device_env doctor` says what was looked for "
            "and why it does not count"
        )
    if device.kind == "cpu":
        return Placement(
            device=device, ranks=((),) * num_ranks, samplers=((),) * num_samplers, shared=False
        )
    ids = visible_devices(device.kind, environ).ids or tuple(map(str, range(device.count)))
    shared = sampler.enable_sleep
    of_samplers = sampler.num_devices * num_samplers
    needed = max(num_ranks, of_samplers) if shared else num_ranks + of_samplers
    if needed > len(ids):
        how = "the more of" if shared else "the sum of"
        raise ValueError(
            f"expected {needed} devices, {how} {num_ranks} trainer ranks (engine.parallel) and "
            f"{num_samplers} samplers of {sampler.num_devices} devices; this machine shows "
            f"{len(ids)}: {', '.join(ids)}. Give the engine or the samplers fewer, or run on a "
            "larger machine; this loop uses the devices of one"
        )
    if shared and of_samplers > num_ranks:
        raise ValueError(
            f"expected a trainer rank on every device of a sampler that shares devices, since each "
            f"engine process takes its weights from the rank beside it; got {num_ranks} ranks "
            f"(engine.parallel) and {num_samplers} samplers of {sampler.num_devices} devices. Give "
            "the engine more devices, or the samplers fewer"
        )
    first = 0 if shared else num_ranks
    size = sampler.num_devices
    return Placement(
        device=device,
        ranks=tuple((name,) for name in ids[:num_ranks]),
        samplers=tuple(
            ids[first + number * size : first + (number + 1) * size]
            for number in range(num_samplers)
        ),
        shared=shared,
    )
