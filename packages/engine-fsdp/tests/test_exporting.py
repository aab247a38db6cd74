"""Weights leave one after the other."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine_fsdp.exporting import exported_weights
from engine_fsdp.model import load_model

SaveModel = Callable[..., Path]

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_one_whole_tensor_is_in_memory_at_a_time(
    save_model: SaveModel, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Each is gone, stacked experts too, before the next one is gathered, within the budget."""
    model = load_model(save_model(kind), temperature=1.0)
    alive: list[weakref.ref[Tensor]] = []
    budgets: set[int] = set()

    def gather(
        params: Iterable[tuple[str, Tensor]], group: None, max_bytes: int, **_: object
    ) -> Iterator[tuple[str, Tensor]]:
        assert group is None
        budgets.add(max_bytes)
        for name, parameter in params:
            assert [ref for ref in alive if ref() is not None] == []
            whole = [parameter.detach().clone()]
            alive.append(weakref.ref(whole[0]))
            yield name, whole.pop()

    monkeypatch.setattr("engine_fsdp.exporting.gather_full", gather)
    exported = exported_weights(model, device=CPU, dtype=torch.float32, gather_bytes=1000)
    names = []
    for name, tensor in exported:
        names.append(name)
        del tensor
    assert budgets == {1000}
    assert names == [name for name, _ in model.stored_weights()]
    assert len(alive) == len(list(model.named_weights()))
