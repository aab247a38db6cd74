"""Packed attention against plain transformers, sequence by sequence."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from engine_fsdp.attention import lay_out, packed_attention
from engine_fsdp.attention_groups import PackedGroups
from engine_fsdp.attention_varlen import PackedVarlen
from engine_fsdp.model import load_model, pack_rows

SaveModel = Callable[..., Path]

LENGTHS = (1, 9, 30, 8, 2, 9)
SCORED = [length - 1 for length in LENGTHS]
VOCAB_SIZE = 37


def _rows() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCAB_SIZE, (length,), generator=generator) for length in LENGTHS]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("tied", [True, False])
def test_packed_equals_one_by_one(save_model: SaveModel, kind: str, tied: bool) -> None:  # noqa: FBT001
    """Logprobs of six packed sequences equal eager transformers' own, each alone, to 1e-5."""
    folder = save_model(kind, tie_word_embeddings=tied)
    plain: Any = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", experts_implementation="eager"
    )
    packed = load_model(folder, temperature=1.0)
    with torch.no_grad():
        got = packed(*pack_rows(_rows())).logprobs.split(SCORED)
        for row, logprobs in zip(_rows(), got, strict=True):
            log_p = plain(row[None]).logits[0, :-1].log_softmax(-1)
            expected = log_p.gather(1, row[1:, None])[:, 0]
            torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0.0)


def test_no_token_sees_another_sequence(save_model: SaveModel) -> None:
    """Changing every token of one sequence leaves the others' logprobs bit-identical."""
    packed = load_model(save_model("qwen3"), temperature=1.0)
    rows = _rows()
    with torch.no_grad():
        before = packed(*pack_rows(rows)).logprobs.split(SCORED)
        rows[2] = (rows[2] + 5) % VOCAB_SIZE
        after = packed(*pack_rows(rows)).logprobs.split(SCORED)
    same = [torch.equal(first, second) for first, second in zip(before, after, strict=True)]
    assert same == [True, True, False, True, True, True]


def test_gradient_reaches_only_the_own_sequence() -> None:
    """With unequal lengths, the gradient of one sequence's output is zero on all other tokens."""
    packed = PackedGroups.of(torch.tensor([0, 3, 10, 12]), torch.device("cpu"))
    torch.manual_seed(0)
    states = [torch.randn(1, 2, 12, 4, requires_grad=True) for _ in range(3)]
    output, _ = packed_attention(
        nn.Identity(), states[0], states[1], states[2], None, packed=packed
    )
    output[0, 3:10].sum().backward()
    for state in states:
        assert state.grad is not None
        touched = state.grad.abs().sum(dim=(0, 1, 3)) > 0
        assert not touched[:3].any()
        assert not touched[10:].any()
    assert touched[3:10].all()  # the values of the own sequence


def test_equal_lengths_need_no_filling() -> None:
    """Sequences of one length lie as they are; others get less than a fourth of filling."""
    even = PackedGroups.of(torch.tensor([0, 4, 8, 12]), torch.device("cpu"))
    assert (even.slots, even.num_slots) == (None, 12)
    lengths = torch.arange(1, 200)
    mixed = PackedGroups.of(
        torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]), torch.device("cpu")
    )
    num_tokens = int(lengths.sum())
    assert mixed.slots is not None
    assert len(mixed.slots.unique()) == num_tokens
    assert mixed.num_slots < 1.25 * num_tokens


@pytest.mark.parametrize(
    ("asked", "named"),
    [({"sliding_window": 4}, "sliding_window"), ({"softcap": 5.0}, "softcap"), ({}, "packed")],
)
def test_other_attention_is_refused(asked: dict[str, Any], named: str) -> None:
    """A window, a soft cap or a call without the sequences' places is an error, not ignored."""
    query = key = value = torch.zeros(1, 2, 4, 4)
    packed = PackedGroups.of(torch.tensor([0, 4]), torch.device("cpu")) if asked else None
    with pytest.raises(ValueError, match=rf"causal within whole sequences.*{named}"):
        packed_attention(nn.Identity(), query, key, value, None, packed=packed, **asked)


def test_lengths_of_any_kind_are_known_without_the_device() -> None:
    """The layout for GPUs: int32 starts, and the longest sequence as a number."""
    starts = torch.tensor([0, 3, 10, 12])
    packed = lay_out(starts, device=torch.device("meta"), dtype=torch.bfloat16)
    assert isinstance(packed, PackedVarlen)
    assert packed.max_length == 7
    assert packed.cu_seqlens.dtype == torch.int32


@pytest.mark.parametrize(("kind", "dtype"), [("cpu", torch.bfloat16), ("meta", torch.float32)])
def test_float32_and_cpus_attend_by_groups(kind: str, dtype: torch.dtype) -> None:
    """The kernel for any lengths takes no float32, and runs on no CPU."""
    packed = lay_out(torch.tensor([0, 3, 10]), device=torch.device(kind), dtype=dtype)
    assert isinstance(packed, PackedGroups)
