"""Devices of a machine, dealt out to trainer ranks and samplers."""

import sys
from pathlib import Path

import pytest
import torch

from device_env import Device
from rollout_vllm import VllmConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from placement import place


def gpus(count: int) -> Device:
    return Device(
        kind="cuda",
        count=count,
        names=("NVIDIA H200",) * count,
        memory_bytes=(141 * 2**30,) * count,
        collective_backend="nccl",
        visible_devices_variable="CUDA_VISIBLE_DEVICES",
        torch_device_type="cuda",
    )


CPU = Device(
    kind="cpu",
    count=1,
    names=("AMD EPYC",),
    memory_bytes=(2**34,),
    collective_backend="gloo",
    visible_devices_variable=None,
    torch_device_type="cpu",
)


def sampler(*, shares: bool = False, size: int = 1) -> VllmConfig:
    return VllmConfig(
        model="m",
        device="cuda",
        max_model_len=16,
        tensor_parallel_size=size,
        gpu_memory_utilization=0.5,
        enable_sleep=shares,
    )


def test_devices_of_their_own() -> None:
    """Ranks first, then each sampler's, by the ids that this process may use."""
    placed = place(
        sampler(size=2),
        num_ranks=2,
        num_samplers=2,
        device=gpus(6),
        environ={"CUDA_VISIBLE_DEVICES": "7,6,5,GPU-a,1,0"},
    )
    assert placed.ranks == (("7",), ("6",))
    assert placed.samplers == (("5", "GPU-a"), ("1", "0"))
    assert not placed.shared
    assert placed.profile == "disaggregated-rl"
    assert placed.environment(placed.samplers[0]) == {"CUDA_VISIBLE_DEVICES": "5,GPU-a"}
    assert placed.torch_device == torch.device("cuda", 0)
    assert placed.backend == "cpu:gloo,cuda:nccl"
    assert placed.lines()[-1] == "sampler 1: 1,0"


def test_shared_devices() -> None:
    """Two samplers of two devices each sleep while four ranks train on the same four."""
    placed = place(
        sampler(shares=True, size=2), num_ranks=4, num_samplers=2, device=gpus(4), environ={}
    )
    assert placed.ranks == (("0",), ("1",), ("2",), ("3",))
    assert placed.samplers == (("0", "1"), ("2", "3"))
    assert placed.shared
    assert placed.profile == "colocated-rl"
    assert "take turns on the same devices" in placed.lines()[0]


def test_cores_are_not_dealt_out() -> None:
    config = VllmConfig(model="m", max_model_len=16, kv_cache_gib=1.0)
    placed = place(config, num_ranks=2, num_samplers=1, device=CPU, environ={})
    assert placed.environment(placed.ranks[1]) == {}
    assert placed.torch_device == torch.device("cpu")
    assert placed.backend == "gloo"


@pytest.mark.parametrize(
    ("shares", "needed"),
    [
        (False, "expected 6 devices, the sum of 2 trainer ranks (engine.parallel) and 2 samplers"),
        (True, "expected 4 devices, the more of 2 trainer ranks (engine.parallel) and 2 samplers"),
    ],
)
def test_too_few(shares: bool, needed: str) -> None:  # noqa: FBT001
    with pytest.raises(ValueError, match="this machine shows 2: 4, 5") as refused:
        place(
            sampler(shares=shares, size=2),
            num_ranks=2,
            num_samplers=2,
            device=gpus(2),
            environ={"CUDA_VISIBLE_DEVICES": "4,5"},
        )
    assert needed in str(refused.value)


def test_a_sampler_beside_no_rank() -> None:
    """On a device that it shares with nobody, no rank could hand it weights."""
    with pytest.raises(
        ValueError, match=r"rank on every device .* got 1 ranks .* 2 samplers of 1 d"
    ):
        place(sampler(shares=True), num_ranks=1, num_samplers=2, device=gpus(2), environ={})
    spare = place(sampler(shares=True), num_ranks=2, num_samplers=1, device=gpus(2), environ={})
    assert spare.samplers == (("0",),)


def test_another_kind_of_device() -> None:
    with pytest.raises(
        ValueError, match=r"sampler.device = 'cuda', and this machine has cpu \(AMD EPYC\)"
    ):
        place(sampler(), num_ranks=1, num_samplers=1, device=CPU, environ={})
