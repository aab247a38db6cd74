"""How weights that have arrived get into vLLM's running model; lives in the engine's process.

=========  =====================================================  ==============================
loading    how                                                    where
=========  =====================================================  ==============================
in place   the copies of a `CopyPlan`, straight from the bucket   CUDA, unquantised layers whose
           into the parameters                                    weights stay as they are loaded
layerwise  vLLM's own reload: each layer is made anew, loaded,    everything else; on the CPU
           packed for its kernels and copied over the old one     with what that leaves undone
=========  =====================================================  ==============================

On the CPU vLLM packs weights for its kernels when it first loads them, and its own reload keeps
two of these copies without a word (`UnquantizedEmbeddingMethod` and `UnquantizedFusedMoEMethod`,
vLLM 0.23 to 0.32): a head that is tied to the embedding, and the experts. Both are packed anew
here.
"""

import logging
from collections.abc import Iterable, Mapping
from typing import Protocol, cast, final

import torch
from torch import Tensor, nn
from vllm.config import ModelConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_processing,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from rollout_vllm.copy_plan import (
    CopyPlan,
    Piece,
    PlanError,
    SupportsLoadWeights,
    record_plan,
)
from rollout_vllm.headers import TensorHeader
from rollout_vllm.whole_tensors import WholeTensors

TIED_HEAD = "lm_head.weight"

# methods that keep weights as they are loaded on a GPU: `process_weights_after_loading` of
# vllm/model_executor/layers/{linear,vocab_parallel_embedding}.py does something on the CPU only,
# vLLM 0.25.1 and 0.32
_UNCHANGED_METHODS = frozenset({"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"})
# and of fused_moe/oracle/unquantized.py, `convert_to_unquantized_kernel_format`: the other
# backends swap or shuffle
_UNCHANGED_EXPERT_BACKENDS = frozenset({"TRITON", "BATCHED_TRITON"})


class Loading(Protocol):
    """One update of the model's weights."""

    def load(self, pieces: Iterable[Piece]) -> None:
        """Take pieces; their memory is the caller's again when the device has done its work."""

    def finish(self) -> None:
        """All pieces have come: make the model whole."""


@final
class LoadingInPlace:
    """Copies into the parameters that the model computes with."""

    def __init__(self, plan: CopyPlan) -> None:
        self._plan = plan

    def load(self, pieces: Iterable[Piece]) -> None:
        """Enqueue the copies."""
        with torch.no_grad():
            self._plan.apply(pieces)

    def finish(self) -> None:
        """Nothing is left to do: parameters are where they were."""


@final
class LoadingLayerwise:
    """vLLM's own reload, and on the CPU what it leaves undone."""

    def __init__(
        self, model: nn.Module, model_config: ModelConfig, device: torch.device, *, tied: bool
    ) -> None:
        self._model = model
        self._model_config = model_config
        self._device = device
        self._tied = tied
        self._whole = WholeTensors()
        # it says "Failed to load weights" of layers that have none; names and shapes were checked
        logging.getLogger(initialize_layerwise_reload.__module__).setLevel(logging.ERROR)
        with torch.no_grad(), torch.device(device):
            if device.type == "cpu":
                for layer in model.modules():
                    method = getattr(layer, "quant_method", None)
                    if isinstance(method, FusedMoEMethodBase):
                        # makes vLLM build the kernel again instead of copying into the old one
                        method.moe_kernel = None
            initialize_layerwise_reload(model)

    def load(self, pieces: Iterable[Piece]) -> None:
        """Give the model's loader whole tensors of their own memory: it keeps them for a while."""
        whole: list[tuple[str, Tensor]] = []
        for piece in pieces:
            tensor = self._whole.add(piece)
            if tensor is not None:
                whole.append((piece.name, tensor))
        with torch.no_grad(), torch.device(self._device):
            cast("SupportsLoadWeights", self._model).load_weights(iter(whole))

    def finish(self) -> None:
        """Process what waits for the last weight, and pack a tied head again."""
        with torch.no_grad(), torch.device(self._device):
            finalize_layerwise_processing(self._model, self._model_config)
            if self._tied and self._device.type == "cpu":
                for layer in self._model.modules():
                    if isinstance(layer, ParallelLMHead):
                        layer.quant_method.process_weights_after_loading(layer)


@final
class WeightLoader:
    """Chooses the way for a model, and remembers the plan."""

    def __init__(self, model: nn.Module, model_config: ModelConfig, device: torch.device) -> None:
        self._model = model
        self._model_config = model_config
        self._device = device
        self._plan: CopyPlan | None = None
        self._planned_for: dict[str, TensorHeader] = {}
        self.in_place_allowed = True
        """False: vLLM's own reload, to compare with."""

        self.reason_for_layerwise: str | None = None

    def begin(self, tensors: Mapping[str, TensorHeader], *, tied: bool) -> Loading:
        """Begin an update.

        Args:
            tensors: all that will come.
            tied: whether the head shares the embedding's weight.
        """
        if self._planned_for != tensors:
            self._planned_for = dict(tensors)
            self._plan, self.reason_for_layerwise = _plan(self._model, tensors, self._device)
        if self._plan is not None and self.in_place_allowed:
            return LoadingInPlace(self._plan)
        return LoadingLayerwise(self._model, self._model_config, self._device, tied=tied)


def _plan(
    model: nn.Module, tensors: Mapping[str, TensorHeader], device: torch.device
) -> tuple[CopyPlan | None, str | None]:
    reason = _why_not_in_place(model, device)
    if reason is not None:
        return None, reason
    try:
        return record_plan(model, tensors), None
    except PlanError as error:
        return None, str(error)


def _why_not_in_place(model: nn.Module, device: torch.device) -> str | None:
    """Why parameters may not have the layout in which they were loaded; None: they have it."""
    if device.type != "cuda":
        return f"vLLM packs weights for the kernels of {device.type}"
    for name, layer in model.named_modules():
        method = getattr(layer, "quant_method", None)
        kind = type(method).__name__
        backend = getattr(getattr(method, "unquantized_backend", None), "name", None)
        known = (
            method is None
            or kind in _UNCHANGED_METHODS
            or (kind == "UnquantizedFusedMoEMethod" and backend in _UNCHANGED_EXPERT_BACKENDS)
        )
        if not known:
            return f"{name} has the method {kind}" + (f" on {backend}" if backend else "")
        parameters, _ = get_layerwise_info(layer).restore_metadata
        for parameter_name, loaded in parameters.items():
            used = getattr(layer, parameter_name, None)
            if not isinstance(used, Tensor) or _layout(used) != _layout(loaded):
                return f"{name}.{parameter_name} was loaded in another layout"
    return None


def _layout(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.stride()
