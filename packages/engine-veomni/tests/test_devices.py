"""Devices and settings that are refused before anything is built."""

from collections.abc import Iterator
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist

from engine_veomni import OptimConfig, VeomniConfig
from engine_veomni.devices import check_device, check_expert_settings, check_offload
from parallel_state.process_group import init_process_group

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
CONFIG = VeomniConfig(model_path="model", optim=OptimConfig(learning_rate=1e-5))


@pytest.fixture
def one_rank() -> Iterator[None]:
    init_process_group()
    yield
    dist.destroy_process_group()


def test_no_process_group_is_an_error_that_says_what_to_call() -> None:
    """Also one process alone needs one."""
    with pytest.raises(RuntimeError, match=r"call parallel_state\.process_group\.init_process"):
        check_device(CPU, compute_dtype="float32")


@pytest.mark.usefixtures("one_rank")
def test_a_device_that_is_not_there_is_refused() -> None:
    """With the device that was asked for."""
    check_device(CPU, compute_dtype="bfloat16")
    with pytest.raises(ValueError, match="expected device cpu or cuda, got meta"):
        check_device(torch.device("meta"), compute_dtype="float32")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="got device cuda:0, but torch finds no CUDA device"):
            check_device(CUDA, compute_dtype="float32")


@pytest.mark.usefixtures("one_rank")
def test_cuda_over_gloo_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo would carry the tensors of GPUs through the host, where it carries them at all."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match=r"backend 'gloo'; expected nccl: init_process_group\("):
        check_device(CUDA, compute_dtype="bfloat16")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"router_replay": "logprobs"}, "router_replay = 'logprobs' has no effect"),
        ({"router_aux_loss_coef": 0.1}, "router_aux_loss_coef = 0.1 has no effect"),
        ({"router_statistics": True}, "router_statistics = True has no effect"),
        ({"expert_kernel": "veomni"}, "expert_kernel = 'veomni' has no effect"),
    ],
)
def test_settings_of_experts_are_refused_without_experts(
    changes: dict[str, Any], reason: str
) -> None:
    """No inert setting; the defaults pass."""
    config = attrs.evolve(CONFIG, **changes)
    check_expert_settings(CONFIG, hidden_size=3, inner_size=None, device=CPU)
    check_expert_settings(config, hidden_size=32, inner_size=16, device=CPU)
    with pytest.raises(ValueError, match=reason):
        check_expert_settings(config, hidden_size=32, inner_size=None, device=CPU)


def test_sizes_that_the_grouped_product_does_not_take_are_refused() -> None:
    """12 bfloat16 numbers are 24 bytes: whole 16 bytes it takes only."""
    with pytest.raises(
        ValueError, match=r"got moe_intermediate_size 12 in bfloat16; set expert_kernel to 'veomni'"
    ):
        check_expert_settings(CONFIG, hidden_size=32, inner_size=12, device=CPU)
    float32 = attrs.evolve(CONFIG, compute_dtype="float32")
    check_expert_settings(float32, hidden_size=32, inner_size=12, device=CPU)
    own = attrs.evolve(CONFIG, expert_kernel="veomni")
    check_expert_settings(own, hidden_size=32, inner_size=12, device=CPU)


def test_veomnis_kernels_on_cuda_take_bfloat16_only() -> None:
    """They would fail an assertion in the first pass."""
    config = attrs.evolve(CONFIG, expert_kernel="veomni", compute_dtype="float32")
    with pytest.raises(ValueError, match=r"bfloat16 only, got compute_dtype 'float32'; set expert"):
        check_expert_settings(config, hidden_size=32, inner_size=16, device=CUDA)


def test_offload_is_for_gpus() -> None:
    """On a CPU everything is in the host's memory: the setting would do nothing."""
    check_offload(CPU, offload="none")
    check_offload(CUDA, offload="parameters")
    with pytest.raises(
        ValueError, match=r"'parameters' has no effect on a CPU .* offload = 'none'"
    ):
        check_offload(CPU, offload="parameters")
