"""The one adapter of a model is replaced, and seen to be; imports vLLM, runs no engine."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from vllm.lora.lora_model import LoRAModel
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from rollout_vllm.copy_plan import Piece
from rollout_vllm.lora import ADAPTER_ID
from rollout_vllm.lora_loading import AdapterLoader, add_products

pytestmark = pytest.mark.slow

STEM = "base_model.model.model.layers.0.self_attn."
SHAPES = {
    f"{STEM}{layer}.lora_{matrix}.weight": shape
    for layer in ("q_proj", "o_proj")
    for matrix, shape in (("A", (2, 4)), ("B", (4, 2)))
}


class Manager:
    """Keeps adapters by number as vLLM's does: what has a known number is not looked at again."""

    def __init__(self, *, forgets: bool = True, copies: bool = True) -> None:
        self.modules = dict.fromkeys(
            ("model.layers.0.self_attn.qkv_proj", "model.layers.0.self_attn.o_proj"), nn.Identity()
        )
        self.packed_modules = {
            "model.layers.0.self_attn.qkv_proj": [
                f"model.layers.0.self_attn.{part}_proj" for part in "qkv"
            ]
        }
        self.kernels = SimpleNamespace(add_lora_linear=None)
        self.punica_wrapper_mapping = {"language_model": self.kernels}
        self.kept: dict[int, LoRAModel] = {}
        self.active: LoRAModel | None = None
        self._forgets, self._copies = forgets, copies

    def add_adapter(self, lora: LoRAModel, /) -> bool:
        """As `LoRAModelManager.add_adapter`."""
        new = lora.id not in self.kept
        self.kept.setdefault(lora.id, lora)
        return new

    def activate_adapter(self, lora_id: int, /) -> bool:
        """As `LoRAModelManager.activate_adapter`."""
        if self.active is not None and not self._copies:
            return False
        self.active = self.kept[lora_id]
        return True

    def remove_adapter(self, adapter_id: int, /) -> bool:
        """As `LoRAModelManager.remove_adapter`."""
        return self._forgets and self.kept.pop(adapter_id, None) is not None


def loader(manager: Manager, shapes: dict[str, tuple[int, int]] = SHAPES) -> AdapterLoader:
    """What the engine's process makes when it starts."""
    cpu = torch.device("cpu")
    return AdapterLoader(manager, shapes, rank=2, scaling=3.0, device=cpu)


def pieces(value: float) -> list[Piece]:
    """All matrices of an adapter, each in two pieces."""
    whole = [(name, torch.full(shape, value)) for name, shape in SHAPES.items()]
    return [
        Piece(name, rows, start, tensor.shape[0])
        for name, tensor in whole
        for start, rows in ((0, tensor[:1]), (1, tensor[1:]))
    ]


def test_the_number_stands_for_zeros_and_then_for_each_adapter_in_turn() -> None:
    """Scaled as configured, under the names of the checkpoint's layers."""
    manager = Manager()
    adapters = loader(manager)
    for value in (0.0, 1.0, 2.0):
        if value:
            loading = adapters.begin()
            loading.load(pieces(value))
            loading.finish()
        assert list(manager.kept) == [ADAPTER_ID]
        assert manager.active is manager.kept[ADAPTER_ID]
        layers = manager.active.loras
        assert sorted(layers) == [
            "model.layers.0.self_attn.o_proj",
            "model.layers.0.self_attn.q_proj",
        ]
        for layer in layers.values():
            assert layer.scaling == 3.0
            assert layer.lora_a.tolist() == [[value] * 4] * 2
            assert layer.lora_b.tolist() == [[value] * 2] * 4


@pytest.mark.parametrize("manager", [Manager(forgets=False), Manager(copies=False)])
def test_an_adapter_that_stays_is_an_error(manager: Manager) -> None:
    """Kept under the number, or where the model computes: vLLM itself says nothing."""
    adapters = loader(manager)
    loading = adapters.begin()
    loading.load(pieces(1.0))
    with pytest.raises(RuntimeError, match=r"kept the adapter that it had under number 1 instead"):
        loading.finish()


def test_a_layer_without_a_place_is_an_error() -> None:
    """vLLM would leave its matrices out without a word; a packed layer is known by its parts."""
    for layer in ("mlp.gate", "self_attn.qkv_proj"):
        name = f"base_model.model.model.layers.0.{layer}.lora_A.weight"
        with pytest.raises(
            ValueError,
            match=rf"1 layers .* no adapter in vLLM's model: model.layers.0.{layer}; it can adapt "
            "the layers k_proj, o_proj, q_proj, v_proj; leave",
        ):
            loader(Manager(), {**SHAPES, name: (2, 4)})


def test_products_on_the_cpu_are_those_of_vllms_own_kernels() -> None:
    """Two slices of a layer, a rank below the room kept for it; one number by hand."""
    manager = Manager()
    loader(manager)
    assert manager.kernels.add_lora_linear is add_products
    generator = torch.Generator().manual_seed(0)
    sizes, tokens = (6, 4), 5
    left = tuple(torch.randn(1, 1, 8, 3, generator=generator) for _ in sizes)
    right = tuple(torch.randn(1, 1, size, 8, generator=generator) for size in sizes)
    for matrix in (*left, *(one.transpose(2, 3) for one in right)):
        matrix[:, :, 2:] = 0.0
    x = torch.randn(tokens, 3, generator=generator)
    own, vllms = torch.ones(tokens, 10), torch.ones(tokens, 10)
    add_products(own, x, left, right, 0.5, sizes)
    kernels = PunicaWrapperCPU(tokens, 1, "cpu")
    kernels.is_prefill, kernels._token_lora_indices = False, torch.zeros(tokens, dtype=torch.long)
    kernels.indices_len = [tokens] * 5
    kernels.add_lora_linear(vllms, x, left, right, 0.5, sizes)
    torch.testing.assert_close(own, vllms)
    inner = left[1][0, 0, :2] @ x[4]
    assert own[4, 7].item() == pytest.approx(1 + 0.5 * float(right[1][0, 0, 1, :2] @ inner))
