"""How adapters get into vLLM's running model; lives in the engine's process.

vLLM keeps adapters by number and does not look at one again whose number it knows, so that a
second one under the same number would be the first, without a word (`add_adapter` in
vllm/lora/model_manager.py, 0.23 to 0.32). Requests name that number, and those that run shall go on
with the next adapter: so the old one is taken out, the new one put in under the same number, and
both are seen to have happened.

Nor may the number ever be unknown: vLLM would look for files. From the start it stands for an
adapter of zeros, which is the model itself. vLLM's own end of an update of weights forgets all
adapters (`reset_lora_state`, from 0.28 on), so adapters do not go that way.

On the CPU vLLM's kernels copy the matrices once for each token: with 2,048 tokens of a layer
[3072, 576] an adapter of rank 16 takes 18 times as long as the layer (0.32). Here every token has
the one adapter, and two products do, in a fifth of the layer's time.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, cast, final

import torch
from torch import Tensor, nn
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights

from rollout_vllm.copy_plan import Piece
from rollout_vllm.lora import ADAPTER_ID, split_name
from rollout_vllm.whole_tensors import WholeTensors

_SHOWN = 3


class _Kernels(Protocol):
    """What computes adapted layers; replaced on the CPU."""

    add_lora_linear: object


class AdapterManager(Protocol):
    """What is used of vLLM's `LoRAModelManager`."""

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        """Layers that can be adapted, by name in vLLM's model."""

    @property
    def packed_modules(self) -> Mapping[str, Sequence[str]]:
        """Of layers that are several in the checkpoint, their names there."""

    @property
    def punica_wrapper_mapping(self) -> Mapping[str, _Kernels]:
        """What computes the layers of each part of the model."""

    def add_adapter(self, lora: LoRAModel, /) -> bool:
        """Keep it; False if one of its number is kept."""

    def activate_adapter(self, lora_id: int, /) -> bool:
        """Copy its matrices to where the model computes; False if that number is there."""

    def remove_adapter(self, adapter_id: int, /) -> bool:
        """Forget it."""


@final
class LoadingAdapter:
    """One update: a `rollout_vllm.weight_loading.Loading`."""

    def __init__(self, loader: "AdapterLoader") -> None:
        self._loader = loader
        self._whole = WholeTensors()
        self._tensors: dict[str, Tensor] = {}

    def load(self, pieces: Iterable[Piece]) -> None:
        """Keep what comes."""
        for piece in pieces:
            tensor = self._whole.add(piece)
            if tensor is not None:
                self._tensors[piece.name] = tensor

    def finish(self) -> None:
        """Replace the adapter."""
        self._loader.replace(self._tensors)


@final
class AdapterLoader:
    """Replaces the one adapter of a model.

    Args:
        manager: of the model that runs.
        shapes: of an adapter's matrices, by name.
        rank: inner dimension of each product.
        scaling: what each product is multiplied by.
        device: where the model computes.

    Raises:
        ValueError: if a matrix has no place in vLLM's model.
        RuntimeError: as `replace`, of an adapter of zeros.
    """

    def __init__(
        self,
        manager: AdapterManager,
        shapes: Mapping[str, Sequence[int]],
        *,
        rank: int,
        scaling: float,
        device: torch.device,
    ) -> None:
        self._manager = manager
        self._rank = rank
        self._scaling = scaling
        packed = manager.packed_modules
        places = set(manager.modules) - set(packed)
        places.update(inner for names in packed.values() for inner in names)
        lost = sorted({module for module, _ in map(split_name, shapes)} - places)
        if lost:
            raise ValueError(
                f"VllmConfig.lora: {len(lost)} layers of the checkpoint can take no adapter in "
                f"vLLM's model: {', '.join(lost[:_SHOWN])}; it can adapt the layers "
                f"{', '.join(sorted({name.rpartition('.')[2] for name in places}))}; leave the "
                "others out of target_modules"
            )
        if device.type == "cpu":
            for kernels in manager.punica_wrapper_mapping.values():
                kernels.add_lora_linear = add_products
        self.replace({name: torch.zeros(tuple(shape)) for name, shape in shapes.items()})

    def begin(self) -> LoadingAdapter:
        """Begin an update."""
        return LoadingAdapter(self)

    def replace(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the old adapter out and this one in.

        Args:
            tensors: all matrices by name, in memory that is not used any more: vLLM changes it.

        Raises:
            RuntimeError: if vLLM went on with the adapter that it had.
        """
        matrices: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            module, matrix = split_name(name)
            matrices.setdefault(module, {})[matrix] = tensor
        layers = {
            module: LoRALayerWeights(
                module, self._rank, 0, pair["A"], pair["B"], scaling=self._scaling
            )
            for module, pair in matrices.items()
        }
        with torch.no_grad():
            self._manager.remove_adapter(ADAPTER_ID)
            added = self._manager.add_adapter(LoRAModel(ADAPTER_ID, self._rank, layers))
            if not (added and self._manager.activate_adapter(ADAPTER_ID)):
                raise RuntimeError(
                    f"vLLM kept the adapter that it had under number {ADAPTER_ID} instead of the "
                    "new one"
                )


def adapter_manager(model: nn.Module) -> AdapterManager:
    """That of a model that vLLM loaded with `enable_lora`."""
    return cast("AdapterManager", model.lora_manager)


def add_products(  # noqa: PLR0917  (called by vLLM)
    y: Tensor,
    x: Tensor,
    lora_a_stacked: Sequence[Tensor],
    lora_b_stacked: Sequence[Tensor],
    scale: float,
    output_slices: Sequence[int],
) -> None:
    """Add each slice's product to the layer's output; the names are vLLM's.

    Args:
        y: [tokens, out], changed in place.
        x: [tokens, in].
        lora_a_stacked: for each slice [1, 1, rank, in].
        lora_b_stacked: for each slice [1, 1, out of the slice, rank].
        scale: multiplies each product.
        output_slices: columns of `y` that belong to each slice, in order.
    """
    start = 0
    for left, right, size in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
        y[:, start : start + size] += scale * (x @ left[0, 0].T @ right[0, 0].T)
        start += size
