"""Which devices and sizes the kernels of this engine take; asked before anything is built."""

from typing import Final

import attrs
import torch
import torch.distributed as dist

from engine_veomni.config import Offload, VeomniConfig
from rl_contracts import DType

_ALIGNMENT_BYTES: Final = 16
"""torch.nn.functional.grouped_mm wants rows that are a multiple of it (torch 2.11 to 2.13)."""


def check_device(device: torch.device, *, compute_dtype: DType) -> None:
    """Refuse a device that VeOmni or the process group would not use, and make CUDA's current.

    Raises:
        ValueError: with what was found, and what to do.
        RuntimeError: if torch.distributed is not initialised.
    """
    if device.type not in ("cpu", "cuda"):
        message = f"engine-veomni: expected device cpu or cuda, got {device}"
        raise ValueError(message)
    if not dist.is_initialized():
        message = (
            "engine-veomni: torch.distributed is not initialised; call "
            "parallel_state.process_group.init_process_group() first, also for one process"
        )
        raise RuntimeError(message)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            message = f"engine-veomni: got device {device}, but torch finds no CUDA device"
            raise ValueError(message)
        if "cuda:nccl" not in dist.get_backend_config().split(","):
            message = (
                f"engine-veomni: got device {device} with the process group's backend "
                f"{dist.get_backend()!r}; expected nccl: init_process_group(backend='nccl')"
            )
            raise ValueError(message)
        torch.cuda.set_device(device)
    from veomni.utils.device import get_device_type  # noqa: PLC0415 - loaded only when used

    if (found := get_device_type()) != device.type:
        message = (
            f"engine-veomni: got device {device}, but VeOmni builds its models on {found!r}, the "
            "device that it found; hide it to train on the CPU: CUDA_VISIBLE_DEVICES=''"
        )
        raise ValueError(message)
    if device.type == "cpu" or compute_dtype == "float32":
        return
    if torch.cuda.get_device_capability(device) < (8, 0):
        message = (
            "engine-veomni: bfloat16 needs a GPU of compute capability 8.0 or more, got "
            f"{torch.cuda.get_device_name(device)}; set compute_dtype to 'float32'"
        )
        raise ValueError(message)


def check_offload(device: torch.device, *, offload: Offload) -> None:
    """Refuse to keep in the host's memory what is there in any case.

    Raises:
        ValueError: on a CPU.
    """
    if device.type == "cpu" and offload != "none":
        message = (
            f"engine-veomni: offload = {offload!r} has no effect on a CPU device; weights and "
            "optimizer are in host memory already: set offload = 'none'"
        )
        raise ValueError(message)


def check_vision_settings(config: VeomniConfig, *, sees: bool) -> None:
    """Refuse settings that would not do what they say for this model's sight.

    Args:
        config: of the engine.
        sees: whether the model has a vision tower.

    Raises:
        ValueError: with the setting that would work.
    """
    if config.freeze_vision and not sees:
        message = "freeze_vision = True has no effect: the model has no vision tower; leave it out"
        raise ValueError(message)
    for name in ("router_replay", "router_aux_loss_coef", "router_statistics"):
        default = getattr(attrs.fields(VeomniConfig), name).default
        if sees and (value := getattr(config, name)) != default:
            message = (
                f"{name} = {value!r} with a model that sees: VeOmni's routers of these models ask "
                f"nobody (0.1.12); set {name} to {default!r}"
            )
            raise ValueError(message)


def check_expert_settings(
    config: VeomniConfig, *, hidden_size: int, inner_size: int | None, device: torch.device
) -> None:
    """Refuse settings of experts that cannot take effect on this model or device.

    Args:
        config: the settings.
        hidden_size: entries of a token's vector between the layers.
        inner_size: entries of it inside an expert; None for a model without experts.
        device: where the experts are computed.

    Raises:
        ValueError: with the setting that would work.
    """
    if inner_size is None:
        for name in (
            "router_replay",
            "router_aux_loss_coef",
            "router_statistics",
            "expert_kernel",
        ):
            default = getattr(attrs.fields(VeomniConfig), name).default
            if (value := getattr(config, name)) != default:
                message = (
                    f"engine-veomni: {name} = {value!r} has no effect on a model without experts; "
                    "leave it out"
                )
                raise ValueError(message)
        return
    if config.expert_kernel == "veomni":
        if device.type != "cpu" and config.compute_dtype != "bfloat16":
            message = (
                "engine-veomni: VeOmni's expert kernels on CUDA take bfloat16 only, got "
                f"compute_dtype {config.compute_dtype!r}; set expert_kernel to 'grouped_mm'"
            )
            raise ValueError(message)
        return
    item_bytes = getattr(torch, config.compute_dtype).itemsize
    for name, size in (("hidden_size", hidden_size), ("moe_intermediate_size", inner_size)):
        if size * item_bytes % _ALIGNMENT_BYTES:
            message = (
                f"engine-veomni: expert_kernel 'grouped_mm' takes rows of a multiple of "
                f"{_ALIGNMENT_BYTES} bytes, got {name} {size} in {config.compute_dtype}; set "
                "expert_kernel to 'veomni'"
            )
            raise ValueError(message)
