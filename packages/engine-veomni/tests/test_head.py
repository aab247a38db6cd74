"""Log-probabilities without all logits."""

import pytest
import torch

from engine_veomni.head import linear_logprobs, logprobs_as_loss


def test_one_row_by_hand() -> None:
    """Logits 0 and ln 3 at temperature 1: probabilities 1/4 and 3/4."""
    weight = torch.tensor([[0.0], [torch.tensor(3.0).log()]])
    logprobs = linear_logprobs(torch.ones(2, 1), weight, torch.tensor([0, 1]), temperature=1.0)
    torch.testing.assert_close(logprobs, torch.tensor([0.25, 0.75]).log())


@pytest.mark.parametrize("chunk_rows", [1, 3, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_rows_at_a_time_change_nothing(chunk_rows: int, temperature: float) -> None:
    """Values and gradients are those of `log_softmax` over all rows at once."""
    results = []
    for chunked in (True, False):
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(7, 5, generator=generator).requires_grad_()
        weight = torch.randn(11, 5, generator=generator).requires_grad_()
        targets = torch.randint(0, 11, (7,), generator=generator)
        if chunked:
            logprobs = linear_logprobs(
                hidden, weight, targets, temperature=temperature, chunk_bytes=chunk_rows * 44
            )
        else:
            logits = hidden @ weight.t() / temperature
            logprobs = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
        (logprobs * torch.arange(7.0)).sum().backward()
        results.append((logprobs, hidden.grad, weight.grad))
    for found, wanted in zip(*results, strict=True):
        assert found is not None
        assert wanted is not None
        torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)


def test_the_temperature_divides_in_float32() -> None:
    """A bfloat16 logit of 1 over 0.7 is 1.42857, and not the bfloat16 next to it, 1.4297."""
    weight = torch.tensor([[1.0], [0.0]], dtype=torch.bfloat16)
    hidden = torch.ones(1, 1, dtype=torch.bfloat16)
    (logprob,) = linear_logprobs(hidden, weight, torch.tensor([0]), temperature=0.7).tolist()
    wanted = -torch.tensor(-1 / 0.7, dtype=torch.float64).exp().log1p().item()
    assert abs(logprob - wanted) < 1e-6


def test_no_row_at_all_keeps_the_graph() -> None:
    """A micro-batch without tokens to look at still takes part in the backward pass."""
    hidden, weight = torch.zeros(1, 2, 3, requires_grad=True), torch.ones(4, 3, requires_grad=True)
    logprobs, *others = logprobs_as_loss(
        hidden_states=hidden,
        weights=weight,
        labels=torch.zeros(1, 0, dtype=torch.int64),
        scored_rows=torch.zeros(0, dtype=torch.int64),
        temperature=1.0,
    )
    assert others == [None, None]
    logprobs.sum().backward()
    assert weight.grad is not None
    assert not weight.grad.any()


def test_a_token_that_is_nearly_certain_keeps_its_gradient_in_bfloat16() -> None:
    """At 1 - p = 4.5e-5, below what bfloat16 tells from 1, and the other entry is p - 0."""
    weight = torch.tensor([[10.0], [0.0]], dtype=torch.bfloat16, requires_grad=True)
    hidden = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
    linear_logprobs(hidden, weight, torch.tensor([0]), temperature=1.0).sum().backward()
    wanted = torch.tensor(10.0).neg().exp().item()
    assert weight.grad is not None
    assert weight.grad.flatten().tolist() == pytest.approx([wanted, -wanted], rel=0.01)
    assert hidden.grad is not None
    assert hidden.grad.item() == pytest.approx(10 * wanted, rel=0.01)
