"""AdamW whose moments have 8 bits: torchao's, the extra `eight-bit`, which is imported on use.

Each moment is a code of 8 bits per element, and a float32 scale for every 256 of them (Dettmers et
al. 2021, arXiv:2110.02861). The 256 are neighbours in a row, so that they lie on one rank however
many there are: weights whose rows do not divide into them are left to others (see
`training_set.eight_bit_weights`). torchao would cut up what each rank holds, wherever it ends.

torchao is handed this rank's part of each weight, as a plain tensor (0.18: its step is compiled,
once for each shape; its DTensors would say nothing that the parts do not).
"""

import importlib
import math
from collections.abc import Iterator, Mapping
from typing import Any, Final, final

import torch
from torch import Tensor

from engine_fsdp.sharding import local
from rl_contracts import OptimConfig

SCALED_TOGETHER: Final = 256
"""Elements that share a scale: torchao's default, which is that of bitsandbytes."""

BYTES_PER_WEIGHT: Final = 2 * (1 + 4 / SCALED_TOGETHER)
"""Of both moments."""

_MOMENTS: Final = {"exp_avg": True, "exp_avg_sq": False}
"""Name, and whether it has a sign."""


@final
class EightBitAdamW:
    """AdamW over some of the parameters."""

    def __init__(self, parameters: Mapping[str, Tensor], config: OptimConfig) -> None:
        """Take the parameters over, and make room for their moments.

        Args:
            parameters: float32, by name; rows of whole blocks, contiguous.
            config: how.

        Raises:
            ImportError: without torchao.
        """
        library, states = _torchao()
        self._parameters = dict(parameters)
        self._parts = {name: local(parameter.detach()) for name, parameter in parameters.items()}
        self._state: dict[str, dict[str, Tensor]] = {}
        held = [part for part in self._parts.values() if part.numel()]
        self._optimizer: Any = None
        if held:  # a rank may be left without a row of any of them
            self._optimizer = library.AdamW8bit(
                held,
                lr=config.learning_rate,
                betas=config.betas,
                eps=config.eps,
                weight_decay=config.weight_decay,
                block_size=SCALED_TOGETHER,
            )
        for name, part in self._parts.items():
            self._state[name] = self._start(name, part, states)

    def _start(self, name: str, part: Tensor, states: Any) -> dict[str, Tensor]:  # noqa: ANN401
        """Moments of 0: tensors of the checkpoint, which torchao's state is made of."""
        own: dict[str, Any] = {"step": torch.zeros((), dtype=torch.float32)}
        whole = {"step": own["step"].view(1)}
        scale_shape = (*part.shape[:-1], part.shape[-1] // SCALED_TOGETHER)
        for moment, is_signed in _MOMENTS.items():
            if part.numel():
                own[moment] = states.OptimState8bit.zeros(
                    part.shape, is_signed, SCALED_TOGETHER, part.device, part.dtype
                )
                codes, scales = own[moment].codes, own[moment].scale.view(scale_shape)
            else:
                codes = part.new_zeros(part.shape, dtype=torch.uint8)
                scales = part.new_zeros(scale_shape)
            parameter = self._parameters[name]
            whole[f"{moment}_codes"] = _spread_like(parameter, codes)
            whole[f"{moment}_scales"] = _spread_like(parameter, scales)
        if part.numel():
            self._optimizer.state[part] = own
        return whole

    def step(self, *, rate: float) -> None:
        """One step along the gradients."""
        if self._optimizer is None:
            return
        for name, part in self._parts.items():
            gradient = self._parameters[name].grad
            part.grad = None if gradient is None else local(gradient)
        for group in self._optimizer.param_groups:
            group["lr"].fill_(rate)
        self._optimizer.step()
        # The lowest level of a second moment is 0, and an element whose gradient is 0 for once (an
        # expert without tokens) would move by its first moment over eps. The next level, 3e-7 of
        # the largest of its 256, holds it back instead.
        for name, part in self._parts.items():
            part.grad = None
            local(self._state[name]["exp_avg_sq_codes"]).clamp_(min=1)

    def drop_gradients(self) -> None:
        """Free them."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def held(self) -> Iterator[Tensor]:
        """Codes and scales."""
        for state in self._state.values():
            yield from (tensor for name, tensor in state.items() if name != "step")

    def state(self, name: str) -> Mapping[str, Tensor]:
        """Of one parameter: its steps, codes and scales, to be copied from or into."""
        return self._state[name]


def _spread_like(parameter: Tensor, part: Tensor) -> Tensor:
    """This rank's part of a tensor whose rows are spread as the parameter's are."""
    from torch.distributed.tensor import DTensor  # noqa: PLC0415

    if not isinstance(parameter, DTensor):
        return part
    shape = (*parameter.shape[:-1], part.shape[-1])
    strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    spread: Tensor = DTensor.from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=strides,
    )
    return spread


def _torchao() -> tuple[Any, Any]:
    """Its optimizers, and the tensor that their state is made of."""
    try:
        return (
            importlib.import_module("torchao.optim"),
            importlib.import_module("torchao.optim.subclass_8bit"),
        )
    except ImportError as error:
        message = (
            "eight_bit_moments: expected the package torchao; install the extra: "
            "pip install engine-fsdp[eight-bit]"
        )
        raise ImportError(message) from error
