"""The facade over torch, on the CPU here and on a GPU where there is one."""

from pathlib import Path

import pytest
import torch

from device_env import Device, detect_device
from device_env.accelerator import (
    autocast_dtype,
    empty_cache,
    memory,
    random_state,
    reset_peak_memory,
    set_random_state,
    side_stream,
    synchronize,
    torch_device,
)

MIB = 1 << 20
GPU_HERE = Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists()


@pytest.fixture(
    params=[
        "cpu",
        pytest.param(
            "accelerator",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not GPU_HERE, reason="no NVIDIA or AMD driver on this host"),
            ],
        ),
    ]
)
def device(request: pytest.FixtureRequest) -> Device:
    """The CPU, and the accelerator of this host."""
    if request.param == "cpu":
        return detect_device(force="cpu")
    return detect_device()


def test_memory_follows_what_is_allocated(device: Device) -> None:
    """64 MiB more are seen as allocated, in the peak also after they are gone, until a reset."""
    place = torch_device(device)
    reset_peak_memory(device)
    before = memory(device)
    held = torch.ones(64 * MIB, dtype=torch.uint8, device=place)
    synchronize(device)
    with_it = memory(device)
    assert with_it.allocated_bytes - before.allocated_bytes >= 60 * MIB
    del held
    empty_cache(device)
    after = memory(device)
    assert after.peak_allocated_bytes - before.allocated_bytes >= 60 * MIB
    assert after.allocated_bytes - before.allocated_bytes <= 16 * MIB
    reset_peak_memory(device)
    assert memory(device).peak_allocated_bytes - before.allocated_bytes <= 16 * MIB
    assert after.reserved_bytes < after.total_bytes
    assert 0 < after.free_bytes <= after.total_bytes


def test_the_same_random_numbers_come_again(device: Device) -> None:
    """A state that is set again gives the numbers that followed it, on host and device."""
    place = torch_device(device)
    state = random_state(device)
    first = torch.rand(4, device=place).cpu(), torch.rand(4)
    set_random_state(device, state)
    again = torch.rand(4, device=place).cpu(), torch.rand(4)
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


def test_work_on_a_side_stream_is_ordered(device: Device) -> None:
    """The body sees what came before it, and what follows sees the body."""
    place = torch_device(device)
    values = torch.zeros(1 << 20, device=place)
    values += 1
    with side_stream(device) as stream:
        values *= 2
        assert (stream is None) == (device.kind == "cpu")
    values += 1
    assert values.unique().tolist() == [3.0]


def test_autocast_dtype_computes(device: Device) -> None:
    """A matrix product under autocast comes out in the type that is named."""
    place = torch_device(device)
    ones = torch.ones(8, 8, device=place)
    with torch.autocast(place.type, dtype=autocast_dtype(device)):
        product = ones @ ones
    assert product.dtype == autocast_dtype(device)
    assert product.float().unique().tolist() == [8.0]


def test_an_index_beyond_the_devices_is_refused() -> None:
    """There is one CPU."""
    cpu = detect_device(force="cpu")
    with pytest.raises(ValueError, match=r"expected an index below 1, the number of devices, got"):
        synchronize(cpu, 1)


def test_a_state_of_another_kind_of_device_is_refused() -> None:
    """A GPU's state cannot be set on a CPU."""
    cpu = detect_device(force="cpu")
    state = random_state(cpu)
    gpu = Device(
        kind="cuda",
        count=1,
        names=("x",),
        memory_bytes=(1,),
        collective_backend="nccl",
        visible_devices_variable="CUDA_VISIBLE_DEVICES",
        torch_device_type="cuda",
    )
    with pytest.raises(ValueError, match=r"expected a state of a cuda, got one with no device"):
        set_random_state(gpu, state)
