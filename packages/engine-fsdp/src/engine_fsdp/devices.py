"""Where an engine may compute, and with what."""

import torch
import torch.distributed as dist

from engine_fsdp.config import FsdpConfig

_MIN_CAPABILITY = (8, 0)
"""Compute capability that flash attention in bfloat16 needs (torch 2.11, sdp_utils.cpp)."""


def claim_device(device: torch.device, config: FsdpConfig) -> torch.device:
    """Refuse what cannot run as configured; make a GPU the current device of this process.

    FSDP2 computes on the current device, and NCCL gathers objects over it (torch 2.11).

    Returns:
        The device, with its index.

    Raises:
        ValueError: for a device that there is no attention for, that is not there, that the process
            group does not serve, or that a setting has no effect on; says what would work.
    """
    if device.type == "cpu":
        _refuse_on_cpu(config)
        return device
    if device.type != "cuda":
        message = (
            f"FsdpEngine: expected a CPU or a CUDA (NVIDIA, AMD) device, got {device}; packed "
            "attention is implemented for these only"
        )
        raise ValueError(message)
    if not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count():
        message = (
            f"FsdpEngine: got {device}, but torch {torch.__version__} sees "
            f"{torch.cuda.device_count() if torch.cuda.is_available() else 0} such devices in this "
            "process; `python -m device_env doctor` says why"
        )
        raise ValueError(message)
    device = torch.device(
        "cuda", torch.cuda.current_device() if device.index is None else device.index
    )
    capability = torch.cuda.get_device_capability(device)
    if torch.version.hip is None and capability < _MIN_CAPABILITY:
        message = (
            f"FsdpEngine: {device} has compute capability {capability}, packed attention in "
            f"bfloat16 needs {_MIN_CAPABILITY}"
        )
        raise ValueError(message)
    backends = dist.get_backend_config()
    if "nccl" not in backends:
        message = (
            f"FsdpEngine: {device} needs a process group over NCCL, got {backends}; call "
            "init_process_group(backend='cpu:gloo,cuda:nccl')"
        )
        raise ValueError(message)
    torch.cuda.set_device(device)
    return device


def _refuse_on_cpu(config: FsdpConfig) -> None:
    asked = {
        "compile_blocks": config.compile_blocks,
        "offload": config.offload != "none",
        "offload_activations": config.offload_activations,
    }
    reasons = {
        "compile_blocks": "compiled blocks are for GPUs: set compile_blocks = False",
        "offload": "weights and optimizer are in host memory already: set offload = 'none'",
        "offload_activations": "they are in host memory already: set offload_activations = False",
    }
    for name, is_asked in asked.items():
        if is_asked:
            message = f"FsdpEngine: {name} has no effect on a CPU device; {reasons[name]}"
            raise ValueError(message)
