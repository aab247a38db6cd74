"""Names and layouts of experts."""

import pytest
import torch

from rl_contracts.expert_layout import is_stack, split_stack, view_stack

PREFIX = "model.layers.0.mlp.experts"


def test_gate_and_up_come_apart_untransposed() -> None:
    """With E=2, I=3, H=3 the gate is all 1, the up projection all 2 (A42)."""
    stack = torch.cat([torch.ones(2, 3, 3), torch.full((2, 3, 3), 2.0)], dim=1)
    weights = dict(split_stack(f"{PREFIX}.gate_up_proj", stack))
    assert list(weights) == [
        f"{PREFIX}.0.gate_proj.weight",
        f"{PREFIX}.0.up_proj.weight",
        f"{PREFIX}.1.gate_proj.weight",
        f"{PREFIX}.1.up_proj.weight",
    ]
    for name, weight in weights.items():
        assert torch.equal(weight, torch.full((3, 3), 1.0 if "gate" in name else 2.0))


def test_down_is_not_transposed() -> None:
    """A square down projection keeps its rows, under the number of its expert (A42)."""
    stack = torch.arange(18.0).view(2, 3, 3)
    weights = dict(split_stack(f"{PREFIX}.down_proj", stack, first_expert=4))
    assert list(weights) == [f"{PREFIX}.4.down_proj.weight", f"{PREFIX}.5.down_proj.weight"]
    assert torch.equal(weights[f"{PREFIX}.5.down_proj.weight"][0], torch.tensor([9.0, 10.0, 11.0]))


def test_parts_are_copies_and_views_are_not() -> None:
    """Writing to the stack later changes no tensor that was split off, and every view of it."""
    stack = torch.zeros(1, 2, 2)
    ((_, copy),) = split_stack(f"{PREFIX}.down_proj", stack)
    ((_, view),) = view_stack(f"{PREFIX}.down_proj", stack)
    stack.fill_(7.0)
    assert torch.equal(copy, torch.zeros(2, 2))
    assert torch.equal(view, torch.full((2, 2), 7.0))


@pytest.mark.parametrize(
    ("name", "known"),
    [
        (f"{PREFIX}.gate_up_proj", True),
        (f"{PREFIX}.down_proj", True),
        (f"{PREFIX}.gate_up_proj_bias", False),
        ("model.layers.0.mlp.down_proj.weight", False),
        ("model.layers.0.mlp.down_proj", False),
        ("down_proj", False),
    ],
)
def test_only_known_stacks_are_split(name: str, *, known: bool) -> None:
    """Any other name is refused with those that are known, and no tensor is cut in half."""
    assert is_stack(name) is known
    if not known:
        with pytest.raises(
            ValueError, match=r"ends in experts\.gate_up_proj or experts\.down_proj"
        ):
            list(view_stack(name, torch.zeros(1, 2, 2)))
