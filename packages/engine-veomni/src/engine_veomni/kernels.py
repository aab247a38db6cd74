"""Which kernels VeOmni's model runs: bound to the slots of the model, and again before every use.

VeOmni's slots are globals of the module that it generated for an architecture (0.1.12,
`ops/dispatch.py`), so two engines of one process share them. Each engine binds its own before it
enters the model.
"""

import logging
import sys
from typing import Final, Protocol, final

import torch
from jaxtyping import Float
from torch import Tensor

from engine_veomni.config import VeomniConfig
from engine_veomni.expert_kernel import expert_forward
from engine_veomni.head import logprobs_as_loss
from engine_veomni.quiet import quiet

EXPERTS: Final = "moe_experts"
"""VeOmni's name of the operation that computes the experts of a layer."""

_GROUPED: Final = "engine_veomni_grouped_mm"
_LOGPROBS: Final = "engine_veomni_logprobs"
_NORM: Final = "engine_veomni_rms_norm"


class _Slot(Protocol):
    """What is used of VeOmni's `OpSlot`."""

    op_name: str
    variant: str

    def bind(self, impl_name: str) -> None: ...
    def bound_kernel(self) -> object: ...


@final
class ModelKernels:
    """The kernels of one engine, in the slots of its model's module."""

    def __init__(self, model: torch.nn.Module, names: dict[str, str]) -> None:
        """Find the slot of each operation in `names` and bind the kernel of that name.

        Raises:
            RuntimeError: if the module has no slot for one, or several.
        """
        from veomni.ops.dispatch import OpSlot  # noqa: PLC0415 - loaded only when used

        module = type(model).__module__
        slots = [each for each in vars(sys.modules[module]).values() if isinstance(each, OpSlot)]
        self._bound: list[tuple[_Slot, str, object]] = []
        for op_name, name in names.items():
            found = [
                slot
                for slot in slots
                if slot.op_name == op_name and slot.variant in ("standard", "causal")
            ]
            if len(found) != 1:
                message = (
                    f"engine-veomni: expected one slot for {op_name} in {module}, got {len(found)}"
                )
                raise RuntimeError(message)
            self._bound.append((found[0], name, None))
        self.bind()

    @property
    def names(self) -> dict[str, str]:
        """Kernel of each operation, by VeOmni's names."""
        return {slot.op_name: name for slot, name, _ in self._bound}

    def bind(self) -> None:
        """Put this engine's kernels into the slots, where another engine's are."""
        with quiet(logging.WARNING):  # VeOmni warns of what is done here on purpose
            for index, (slot, name, kernel) in enumerate(self._bound):
                if kernel is None or slot.bound_kernel() is not kernel:
                    slot.bind(name)
                    self._bound[index] = (slot, name, slot.bound_kernel())


def kernel_names(
    config: VeomniConfig, *, device: torch.device, has_experts: bool
) -> dict[str, str]:
    """Kernel of each operation, by VeOmni's names; all of them are registered afterwards.

    Loads the CPU backend where VeOmni's own expert kernel is asked for on a CPU, and only there.
    """
    _register("cross_entropy_loss", "causal", _LOGPROBS, logprobs_as_loss)
    _register("rms_norm", "standard", _NORM, rms_norm)
    names = {"cross_entropy_loss": _LOGPROBS, "rms_norm": _NORM}
    if not has_experts:
        return names
    if config.expert_kernel == "grouped_mm":
        _register(EXPERTS, "standard", _GROUPED, expert_forward)
        return {**names, EXPERTS: _GROUPED}
    if device.type != "cpu":
        return {**names, EXPERTS: "triton"}
    from engine_veomni import cpu_backend  # noqa: PLC0415 - for this choice alone

    cpu_backend.install()
    _register(EXPERTS, "standard", cpu_backend.EXPERT_KERNEL, cpu_backend.expert_forward)
    return {**names, EXPERTS: cpu_backend.EXPERT_KERNEL}


def _register(op_name: str, variant: str, name: str, kernel: object) -> None:
    from veomni.ops.kernel_registry import (  # noqa: PLC0415 - loaded only when used
        KERNEL_REGISTRY,
        HardwareRequirement,
        KernelSpec,
    )

    if name not in KERNEL_REGISTRY.list_available(op_name, variant):
        KERNEL_REGISTRY.register(
            KernelSpec(
                name=name,
                op_name=op_name,
                variant=variant,
                factory=lambda: kernel,
                hardware=HardwareRequirement("any"),
            )
        )


def rms_norm(
    hidden_states: Float[Tensor, "*rows hidden"], weight: Float[Tensor, " hidden"], eps: float
) -> Float[Tensor, "*rows hidden"]:
    """Divide each row by its root mean square and multiply by the weight: one kernel on CUDA.

    VeOmni's own fused norm, rotary embedding and SwiGLU need the package `liger-kernel`.
    """
    return torch.nn.functional.rms_norm(hidden_states, (weight.shape[0],), weight, eps)
