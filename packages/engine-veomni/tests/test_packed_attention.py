"""Sequences in one row do not see each other."""

import pytest
import torch

from engine_veomni.packed_attention import packed_attention


def test_a_row_of_two_equals_two_rows() -> None:
    """Changing the first sequence changes nothing in the second, and no token sees a later one."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 4, 7, 8, generator=generator) for _ in range(3))
    key, value = key[:, :2], value[:, :2]

    def attend(lengths: tuple[int, ...]) -> torch.Tensor:
        output, weights = packed_attention(
            torch.nn.Identity(),
            query,
            key,
            value,
            None,
            scaling=0.3,
            sequence_lengths=lengths,
            cu_seqlens=torch.tensor([0, *lengths]).cumsum(0),
        )
        assert weights is None
        return output

    together = attend((3, 4))
    assert together.shape == (1, 7, 4, 8)
    scores = 0.3 * query @ key.repeat_interleave(2, dim=1).transpose(2, 3)
    same = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    seen = (same[:, None] == same[None]) & torch.ones(7, 7, dtype=torch.bool).tril()
    by_hand = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value.repeat_interleave(2, dim=1)
    torch.testing.assert_close(together, by_hand.transpose(1, 2), atol=1e-6, rtol=0.0)
    value[:, :, :3] += 1.0
    assert torch.equal(attend((3, 4))[:, 3:], together[:, 3:])
    assert not torch.allclose(attend((3, 4))[:, :3], together[:, :3])


def test_lengths_that_do_not_fill_the_row_are_an_error() -> None:
    """A token that belongs to no sequence has no attention."""
    rows = torch.zeros(1, 1, 5, 8)
    with pytest.raises(RuntimeError, match="split_with_sizes"):
        packed_attention(
            torch.nn.Identity(),
            rows,
            rows,
            rows,
            None,
            scaling=1.0,
            sequence_lengths=(2, 2),
            cu_seqlens=torch.tensor([0, 2, 4]),
        )
