"""Log-probabilities in chunks against plain torch."""

import pytest
import torch
from torch import Tensor

from engine_fsdp import head_rows
from engine_fsdp.head import linear_logprobs, linear_statistics
from engine_fsdp.head_rows import logit_gradient, row_statistics

ROW_BYTES = 11 * 4


def _inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(7, 5).to(dtype).requires_grad_()
    weight = torch.randn(11, 5).to(dtype).requires_grad_()
    return hidden, weight, torch.tensor([0, 10, 3, 3, 7, 1, 10])


def _plain(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> Tensor:
    logits = (hidden @ weight.t()).float() / temperature
    return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]


@pytest.mark.parametrize("kept_bytes", [0, 4 * 11 * 8, 2**20])
@pytest.mark.parametrize("chunk_rows", [1, 3, 7, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_equals_plain_log_softmax(chunk_rows: int, kept_bytes: int, temperature: float) -> None:
    """Values and both gradients equal those of all logits at once, whatever the chunk."""
    hidden, weight, targets = _inputs(torch.float64)
    upstream = torch.linspace(-1.0, 1.0, 7)
    expected = _plain(hidden, weight, targets, temperature)
    expected_grads = torch.autograd.grad(expected @ upstream, (hidden, weight))
    got = linear_logprobs(
        hidden,
        weight,
        targets,
        temperature=temperature,
        chunk_bytes=chunk_rows * ROW_BYTES,
        kept_bytes=kept_bytes,
    )
    grads = torch.autograd.grad(got @ upstream, (hidden, weight))
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(grads, expected_grads, atol=1e-6, rtol=1e-5)


def test_statistics_are_those_of_a_distribution() -> None:
    """Log-probabilities as in training, and the entropy that torch computes, whatever the chunk."""
    hidden, weight, targets = _inputs(torch.float64)
    logits = (hidden @ weight.t()).float() / 0.7
    for chunk_rows in (1, 3, 100):
        got = linear_statistics(
            hidden, weight, targets, temperature=0.7, chunk_bytes=chunk_rows * ROW_BYTES
        )
        entropies = torch.distributions.Categorical(logits=logits).entropy()
        torch.testing.assert_close(got.entropies, entropies, atol=1e-6, rtol=1e-6)
        expected = _plain(hidden, weight, targets, 0.7)
        torch.testing.assert_close(got.logprobs, expected, atol=1e-6, rtol=1e-6)
        assert not got.entropies.requires_grad


def test_what_gpus_fuse_is_what_cpus_compute() -> None:
    """The functions that are compiled for GPUs, run as they are, against those for CPUs."""
    torch.manual_seed(0)
    logits, grad = 3.0 * torch.randn(7, 11), torch.randn(7)
    targets = torch.tensor([0, 10, 3, 3, 7, 1, 10])
    expected = row_statistics(logits, targets, 0.7, with_entropy=True)
    got = head_rows._entropy_statistics(0.7, logits, targets)
    torch.testing.assert_close(got, tuple(expected), atol=1e-5, rtol=1e-5)
    got = head_rows._statistics(0.7, logits, targets)
    torch.testing.assert_close(got[:2], tuple(expected)[:2], atol=1e-5, rtol=1e-5)
    (gradient,) = head_rows._gradient(0.7, logits, targets, expected.denominators, grad)
    again = logit_gradient(logits, targets, expected.denominators, grad, 0.7)
    torch.testing.assert_close(gradient, again, atol=1e-6, rtol=1e-5)


def test_a_token_that_cannot_be_has_no_share_in_the_entropy() -> None:
    """A logit of minus infinity: the entropy of the others, ln 2, and not NaN."""
    logits = torch.tensor([[0.0, 0.0, -torch.inf]])
    target = torch.tensor([0])
    assert head_rows._entropy_statistics(1.0, logits, target)[2].item() == pytest.approx(
        0.6931, abs=1e-4
    )
    got = row_statistics(logits, target, 1.0, with_entropy=True)
    assert got.entropies.item() == pytest.approx(0.6931, abs=1e-4)


def test_two_tokens_by_hand() -> None:
    """Logits 2, 1, 0 at temperature 0.5 give token 0 a logprob of -0.1429, as the sampler's."""
    got = linear_logprobs(
        torch.tensor([[2.0, 1.0, 0.0]]),
        torch.eye(3),
        torch.tensor([0]),
        temperature=0.5,
        kept_bytes=0,
    )
    assert got.item() == pytest.approx(-0.1429, abs=1e-4)


def test_statistics_are_float32_for_bfloat16_weights() -> None:
    """The softmax of bfloat16 logits is taken in float32: exact to 1e-6, ratio exactly 1 (A26)."""
    hidden, weight, targets = _inputs(torch.bfloat16)
    got = linear_logprobs(hidden, weight, targets, temperature=1.0, kept_bytes=0)
    again = linear_logprobs(hidden, weight, targets, temperature=1.0, kept_bytes=0)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, _plain(hidden, weight, targets, 1.0), atol=1e-6, rtol=1e-6)
    assert (got - again).exp().eq(1.0).all()


def test_backward_twice_gives_the_same_gradient() -> None:
    """The kept logits are not used up by the first backward pass."""
    hidden, weight, targets = _inputs(torch.float32)
    total = linear_logprobs(hidden, weight, targets, temperature=0.7, kept_bytes=2**20).sum()
    first = torch.autograd.grad(total, weight, retain_graph=True)
    assert torch.equal(first[0], torch.autograd.grad(total, weight)[0])


def test_no_rows_give_zero_gradients() -> None:
    """Nothing to score: no value, and gradients of zero, not None (A11)."""
    hidden, weight, _ = _inputs(torch.float32)
    empty = linear_logprobs(
        hidden[:0], weight, torch.zeros(0, dtype=torch.int64), temperature=1.0, kept_bytes=0
    )
    grads = torch.autograd.grad(empty.sum(), (hidden, weight))
    assert empty.shape == (0,)
    assert all(grad.eq(0.0).all() for grad in grads)
