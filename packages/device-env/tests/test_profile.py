"""Profiles for worker processes."""

import pytest

from device_env import (
    Device,
    Profile,
    ProfileConflictError,
    Setting,
    apply,
    detect_device,
    worker_environment,
    worker_profile,
)

CPU = detect_device({}, force="cpu")
GPU = Device(
    kind="cuda",
    count=1,
    names=("H200",),
    memory_bytes=(1,),
    collective_backend="nccl",
    visible_devices_variable="CUDA_VISIBLE_DEVICES",
    torch_device_type="cuda",
)


def test_cpu_workers_do_not_spin() -> None:
    """A CPU worker gets its threads, sleeps while it waits, and is not pinned by vLLM."""
    assert worker_environment(CPU, num_threads=2) == {
        "OMP_NUM_THREADS": "2",
        "OMP_WAIT_POLICY": "passive",
        "GOMP_SPINCOUNT": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }


def test_gpu_workers_get_threads_only() -> None:
    """The measurements behind the other settings were made on a CPU."""
    assert worker_environment(GPU, num_threads=4) == {"OMP_NUM_THREADS": "4"}


def test_apply_sets_what_is_unset_and_returns_it() -> None:
    """What agrees already is kept and is no change."""
    environ = {"GOMP_SPINCOUNT": "0"}
    changes = apply(worker_profile(CPU, num_threads=1), environ)
    assert [change.name for change in changes] == [
        "OMP_NUM_THREADS",
        "OMP_WAIT_POLICY",
        "VLLM_CPU_OMP_THREADS_BIND",
    ]
    assert environ == worker_environment(CPU, num_threads=1)
    assert apply(worker_profile(CPU, num_threads=1), environ) == ()


def test_apply_refuses_to_overwrite_and_changes_nothing() -> None:
    """The user's value stands, both values and the reason are named, nothing is half done."""
    environ = {"OMP_WAIT_POLICY": "active"}
    with pytest.raises(
        ProfileConflictError,
        match=r"OMP_WAIT_POLICY is 'active', the profile wants 'passive' \(spinning threads",
    ):
        apply(worker_profile(CPU, num_threads=1), environ)
    assert environ == {"OMP_WAIT_POLICY": "active"}


def test_zero_threads_are_refused() -> None:
    """A worker needs a thread."""
    with pytest.raises(ValueError, match=r"expected num_threads of at least 1, got 0"):
        worker_profile(CPU, num_threads=0)


def test_a_variable_is_set_once() -> None:
    """A profile that contradicts itself is refused at construction."""
    twice = Setting(name="A", value="1", reason="r")
    with pytest.raises(ValueError, match=r"profile 'p' sets A more than once"):
        Profile(name="p", settings=(twice, twice))
