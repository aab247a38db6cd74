"""Who sends weights to whom, and a rank that goes on exporting for the others."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor

from device_env import Device
from rl_contracts.rollout import PolicyVersion

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import trainer as trainer_module
from placement import Placement
from trainer import Engine, TrainerRank
from weight_routes import carriage_of, receivers_of


def placement_of(
    kind: str, ranks: tuple[str, ...], samplers: tuple[str, ...], *, shared: bool
) -> Placement:
    """A placement; samplers' devices as digits, such as "01"."""

    @dataclass
    class Kind:
        kind: str

    return Placement(
        device=cast("Device", Kind(kind)),
        ranks=tuple(tuple(device) for device in ranks),
        samplers=tuple(tuple(devices) for devices in samplers),
        shared=shared,
    )


def test_each_rank_sends_to_the_engine_process_on_its_device() -> None:
    """Four ranks, two samplers of two of their devices each; the second one alone."""
    shared = placement_of("cuda", ("0", "1", "2", "3"), ("01", "23"), shared=True)
    assert [carriage_of(shared, rank) for rank in range(4)] == ["shared"] * 4
    assert receivers_of(shared, [0, 1], devices_per_sampler=2) == [1, 1, 1, 1]
    assert receivers_of(shared, [1], devices_per_sampler=2) == [0, 0, 1, 1]


def test_the_first_rank_sends_to_all_engine_processes_elsewhere() -> None:
    """Two ranks, three samplers of two devices, or on the CPU without any."""
    apart = placement_of("cuda", ("0", "1"), ("23", "45", "67"), shared=False)
    assert [carriage_of(apart, rank) for rank in range(2)] == ["broadcast", None]
    assert receivers_of(apart, [0, 1, 2], devices_per_sampler=2) == [6, 0]
    cpu = placement_of("cpu", ("", ""), ("", "", ""), shared=False)
    assert [carriage_of(cpu, rank) for rank in range(2)] == ["shared", None]
    assert receivers_of(cpu, [2], devices_per_sampler=1) == [1, 0]


@dataclass
class CountingEngine:
    """Two weights, and how many were asked for."""

    policy_version: PolicyVersion = field(default=PolicyVersion(3))
    exported: list[str] = field(default_factory=list)

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name in ("a", "b"):
            self.exported.append(name)
            yield name, torch.ones(2)


def test_a_rank_whose_receiver_fails_goes_on_exporting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks wait for it in the gathers; the reason comes after the last one."""
    monkeypatch.setattr(trainer_module, "init_process_group", lambda **_: None)
    engine = CountingEngine()

    def rank(number: int) -> TrainerRank:
        return TrainerRank(
            lambda _: cast("Engine", engine),
            None,
            rank=number,
            num_ranks=2,
            meeting_point="",
            backend="gloo",
            device=torch.device("cpu"),
            offloaded=False,
            carriage="shared" if number == 0 else None,
            folder=tmp_path,
        )

    sender, helper = rank(0), rank(1)
    offered = sender.offer("float32")
    assert offered is not None
    assert offered.version == 3
    assert next(iter(offered.sockets.values())).is_relative_to(tmp_path)
    engine.exported.clear()
    offered.refuse("a sampler died")
    with pytest.raises(ValueError, match="the sampler refused the weights: a sampler died"):
        sender.send(1)
    assert engine.exported == ["a", "b"]
    assert helper.offer("float32") is None
    engine.exported.clear()
    helper.send(0)
    assert engine.exported == ["a", "b"]
