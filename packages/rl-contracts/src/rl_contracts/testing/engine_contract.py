"""What every `TrainEngine` must do, as plain functions that raise `AssertionError`.

Give each check a fresh `EngineUnderTest`. A new engine is done when all of `ENGINE_CHECKS` pass.
"""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from rl_contracts.packing import pack
from rl_contracts.rollout import Completion, PolicyVersion, Trajectory
from rl_contracts.train import Checkpointable, LossOutput, PackedBatch, TrainEngine

NUM_ROWS = 6


class CheckpointableEngine(TrainEngine, Checkpointable, Protocol):
    """An engine that keeps checkpoints too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineUnderTest:
    """How to make an engine, and what it may be fed."""

    make: Callable[[], CheckpointableEngine]
    """A new engine with the same first weights at every call."""

    vocab_size: int
    """Token ids run from 0 to this, exclusive."""

    tolerance: float = 1e-4
    """Largest difference, in nats, that floating-point sums in another order may make."""


def _trajectories(vocab_size: int) -> list[Trajectory]:
    """Rows of 3 to 8 tokens, two of them prompt."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for row in range(NUM_ROWS):
        ids = torch.randint(0, vocab_size, (3 + row % 6,), generator=generator).tolist()
        completion = Completion(
            token_ids=tuple(ids[2:]),
            rollout_logprobs=(-1.0,) * (len(ids) - 2),
            policy_versions=(PolicyVersion(0),) * (len(ids) - 2),
            finish_reason="length",
        )
        rows.append(
            Trajectory.from_completion(
                ids[:2], completion, trajectory_id=f"row-{row}", group_id="g"
            )
        )
    return rows


def _batches(under_test: EngineUnderTest, *, max_tokens: int) -> list[PackedBatch]:
    advantages = [1.0, -1.0, 0.5, -0.5, 2.0, -2.0]
    (batches,) = pack(_trajectories(under_test.vocab_size), advantages, max_tokens=max_tokens)
    return batches


def _whole(under_test: EngineUnderTest) -> list[PackedBatch]:
    batches = _batches(under_test, max_tokens=1000)
    assert len(batches) == 1, f"expected all rows in one batch, got {len(batches)}"
    return batches


def _num_tokens(under_test: EngineUnderTest) -> int:
    return sum(sum(t.loss_mask) for t in _trajectories(under_test.vocab_size))


def _row_advantages(batch: PackedBatch) -> Tensor:
    lengths = batch.cu_seqlens.diff().long()
    return batch.advantages.repeat_interleave(lengths)


def _reinforce(
    scale: float,
) -> Callable[[Float[Tensor, " tokens"], PackedBatch], LossOutput]:
    """Advantage times logprob, times `scale`: its gradient is the policy gradient."""

    def loss_fn(policy_logprobs: Float[Tensor, " tokens"], batch: PackedBatch) -> LossOutput:
        weighted = torch.where(batch.loss_mask, policy_logprobs * _row_advantages(batch), 0.0)
        return LossOutput(
            loss=-scale * weighted.sum(),
            metrics={"tokens": batch.loss_mask.sum().float()},
        )

    return loss_fn


def _weights(engine: TrainEngine) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.export_weights()}


def _same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


def check_version_counts_steps(under_test: EngineUnderTest) -> None:
    """The policy version is the number of optimizer steps."""
    engine = under_test.make()
    assert engine.policy_version == 0
    for expected in (1, 2):
        engine.forward_backward(_whole(under_test), _reinforce(0.01))
        assert engine.policy_version == expected - 1
        assert engine.optim_step().policy_version == expected
        assert engine.policy_version == expected


def check_backward_moves_no_weight(under_test: EngineUnderTest) -> None:
    """`forward_backward` and `logprobs` leave every weight as it is; a step does not."""
    engine = under_test.make()
    before = _weights(engine)
    engine.logprobs(_whole(under_test))
    engine.forward_backward(_whole(under_test), _reinforce(0.01))
    assert _same(before, _weights(engine))
    engine.optim_step()
    assert not _same(before, _weights(engine))


def check_logprobs_are_those_of_the_loss(under_test: EngineUnderTest) -> None:
    """The loss is given the logprobs that `logprobs` returns: float32, 0 outside the mask."""
    engine = under_test.make()
    (batch,) = _whole(under_test)
    (expected,) = engine.logprobs([batch])
    seen: list[Tensor] = []

    def loss_fn(policy_logprobs: Float[Tensor, " tokens"], batch: PackedBatch) -> LossOutput:
        seen.append(policy_logprobs.detach().clone())
        return LossOutput(loss=0.0 * policy_logprobs.sum(), metrics={})

    engine.forward_backward([batch], loss_fn)
    assert expected.dtype == torch.float32
    mask = batch.loss_mask
    assert torch.all(expected.cpu()[~mask] == 0.0)
    assert torch.all(expected.cpu()[mask] < 0.0)
    torch.testing.assert_close(seen[0].cpu(), expected.cpu(), atol=under_test.tolerance, rtol=0.0)


def check_logprobs_keep_rows_apart(under_test: EngineUnderTest) -> None:
    """A row's logprobs do not depend on the rows packed beside it."""
    engine = under_test.make()
    together: dict[str, Tensor] = {}
    apart: dict[str, Tensor] = {}
    for found, max_tokens in ((together, 1000), (apart, 8)):
        batches = _batches(under_test, max_tokens=max_tokens)
        for batch, logprobs in zip(batches, engine.logprobs(batches), strict=True):
            pieces = logprobs.cpu().split(batch.cu_seqlens.diff().tolist())
            found.update(zip(batch.trajectory_ids, pieces, strict=True))
    assert together.keys() == apart.keys()
    for row, logprobs in together.items():
        difference = (logprobs - apart[row]).abs().max().item()
        assert difference <= under_test.tolerance, f"{row} differs by {difference} nats"


def check_split_changes_nothing(under_test: EngineUnderTest) -> None:
    """Metrics and gradient are the same in one micro-batch as in many."""
    results = []
    for max_tokens in (1000, 8):
        engine = under_test.make()
        batches = _batches(under_test, max_tokens=max_tokens)
        metrics = engine.forward_backward(batches, _reinforce(1.0 / _num_tokens(under_test)))
        results.append((len(batches), metrics, engine.optim_step().grad_norm))
    (few, metrics, norm), (many, split_metrics, split_norm) = results
    assert few == 1
    assert many > 1
    assert metrics["tokens"] == split_metrics["tokens"] == _num_tokens(under_test)
    assert abs(metrics["loss"] - split_metrics["loss"]) < under_test.tolerance
    assert abs(norm - split_norm) <= 10 * under_test.tolerance * norm, (norm, split_norm)


def check_gradients_add_up(under_test: EngineUnderTest) -> None:
    """One micro-batch twice is the doubled loss once."""
    norms = []
    for scale, times in ((1.0, 2), (2.0, 1)):
        engine = under_test.make()
        engine.forward_backward(_whole(under_test) * times, _reinforce(scale))
        norms.append(engine.optim_step().grad_norm)
    assert abs(norms[0] - norms[1]) <= 10 * under_test.tolerance * norms[1], norms


def check_step_clears_the_gradient(under_test: EngineUnderTest) -> None:
    """After a step nothing of its gradient is left."""
    engine = under_test.make()
    engine.forward_backward(_whole(under_test), _reinforce(1.0))
    assert engine.optim_step().grad_norm > 0.0
    engine.forward_backward(_whole(under_test), _reinforce(0.0))
    assert engine.optim_step().grad_norm == 0.0


def check_good_tokens_become_likelier(under_test: EngineUnderTest) -> None:
    """Descent raises the logprobs of rows with positive advantage against the others'."""
    engine = under_test.make()
    (batch,) = _whole(under_test)
    weights = torch.where(batch.loss_mask, _row_advantages(batch), 0.0)
    before = (engine.logprobs([batch])[0].cpu() * weights).sum().item()
    for _ in range(3):
        engine.forward_backward([batch], _reinforce(1.0 / _num_tokens(under_test)))
        engine.optim_step()
    after = (engine.logprobs([batch])[0].cpu() * weights).sum().item()
    assert after > before, (before, after)


def check_export_is_the_callers_own(under_test: EngineUnderTest) -> None:
    """Exported tensors have distinct names and are not written to by later exports or steps."""
    engine = under_test.make()
    exported = list(engine.export_weights())
    names = [name for name, _ in exported]
    assert len(names) == len(set(names)) > 0
    copies = [tensor.clone() for _, tensor in exported]
    list(engine.export_weights())
    engine.forward_backward(_whole(under_test), _reinforce(1.0))
    engine.optim_step()
    for (name, tensor), copy in zip(exported, copies, strict=True):
        assert torch.equal(tensor, copy), f"{name} was written to after it was exported"


def check_masked_rows_are_harmless(under_test: EngineUnderTest) -> None:
    """A micro-batch without any token to look at adds nothing and breaks nothing."""
    norms = []
    for with_empty in (False, True):
        engine = under_test.make()
        batches = _whole(under_test)
        if with_empty:
            (batch,) = _whole(under_test)
            batch.loss_mask.zero_()
            batches.append(batch)
        engine.forward_backward(batches, _reinforce(1.0))
        norms.append(engine.optim_step().grad_norm)
    assert abs(norms[0] - norms[1]) <= 10 * under_test.tolerance * norms[0], norms


def check_non_finite_loss_stops_the_step(under_test: EngineUnderTest) -> None:
    """A loss that is not finite names its trajectories and leaves weights and version alone."""
    engine = under_test.make()
    before = _weights(engine)

    def loss_fn(policy_logprobs: Float[Tensor, " tokens"], batch: PackedBatch) -> LossOutput:
        return LossOutput(loss=policy_logprobs.sum() * float("nan"), metrics={})

    try:
        engine.forward_backward(_whole(under_test), loss_fn)
    except FloatingPointError as error:
        assert "row-0" in str(error), str(error)
    else:
        raise AssertionError("expected FloatingPointError for a loss of nan")
    assert engine.policy_version == 0
    assert _same(before, _weights(engine))


def _refused(call: Callable[[], object], *, what: str) -> str:
    """Text of the ValueError that the call must raise; what else happens fails the check."""
    try:
        call()
    except ValueError as error:
        return str(error)
    except (IndexError, RuntimeError) as error:
        raise AssertionError(f"expected ValueError for {what}, got {error!r}") from error
    raise AssertionError(f"expected ValueError for {what}, nothing was raised")


def check_detached_loss_is_refused(under_test: EngineUnderTest) -> None:
    """A loss without gradient is an error where the mask holds tokens, and only there."""
    engine = under_test.make()
    before = _weights(engine)

    def loss_fn(policy_logprobs: Float[Tensor, " tokens"], batch: PackedBatch) -> LossOutput:
        return _reinforce(1.0)(policy_logprobs.detach(), batch)

    text = _refused(
        lambda: engine.forward_backward(_whole(under_test), loss_fn), what="a detached loss"
    )
    assert "gradient" in text, text
    assert "row-0" in text, text
    assert engine.policy_version == 0
    assert _same(before, _weights(engine))
    (batch,) = _whole(under_test)
    nothing = replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))
    assert engine.forward_backward([nothing], loss_fn)["loss"] == 0.0
    assert engine.optim_step().grad_norm == 0.0, "a refused loss left its gradient behind"


def _malformed(batch: PackedBatch, vocab_size: int) -> Mapping[str, PackedBatch]:
    """The batch with one thing wrong, by what it is."""
    first_token_mask = batch.loss_mask.clone()
    first_token_mask[int(batch.cu_seqlens[1])] = True
    negative, too_high = batch.token_ids.clone(), batch.token_ids.clone()
    negative[-1], too_high[-1] = -1, vocab_size
    short, falling = batch.cu_seqlens.clone(), batch.cu_seqlens.clone()
    short[-1] -= 1
    falling[1] = falling[2] + 1
    return {
        "a loss mask that is True on a first token": replace(batch, loss_mask=first_token_mask),
        "positions that are all 0": replace(batch, positions=torch.zeros_like(batch.positions)),
        "positions that run on from one sequence to the next": replace(
            batch, positions=torch.arange(batch.positions.shape[0])
        ),
        "a negative token id": replace(batch, token_ids=negative),
        "a token id outside the vocabulary": replace(batch, token_ids=too_high),
        "sequences that do not reach the last token": replace(batch, cu_seqlens=short),
        "a sequence that ends before it begins": replace(batch, cu_seqlens=falling),
    }


def check_malformed_batches_are_refused(under_test: EngineUnderTest) -> None:
    """What would train on garbage is refused with its trajectories, and nothing has changed."""
    engine = under_test.make()
    (batch,) = _whole(under_test)
    before = _weights(engine)
    (expected,) = engine.logprobs([batch])
    for what, malformed in _malformed(batch, under_test.vocab_size).items():
        pair = [batch, malformed]
        texts = (
            _refused(partial(engine.logprobs, pair), what=what),
            _refused(partial(engine.forward_backward, pair, _reinforce(1.0)), what=what),
        )
        for text in texts:
            assert "micro-batch 1" in text, f"{what}: {text}"
            assert "row-0" in text, f"{what}: {text}"
    assert engine.policy_version == 0
    assert _same(before, _weights(engine))
    assert torch.equal(engine.logprobs([batch])[0], expected)


def check_checkpoint_brings_everything_back(under_test: EngineUnderTest) -> None:
    """A step after loading a checkpoint equals, bit for bit, the step after saving it."""
    engine = under_test.make()
    engine.forward_backward(_whole(under_test), _reinforce(0.1))
    engine.optim_step()
    with tempfile.TemporaryDirectory() as folder:
        engine.save_checkpoint(Path(folder) / "checkpoint")
        engine.forward_backward(_whole(under_test), _reinforce(0.1))
        engine.optim_step()
        expected = _weights(engine)
        again = under_test.make()
        again.load_checkpoint(Path(folder) / "checkpoint")
    assert again.policy_version == 1
    again.forward_backward(_whole(under_test), _reinforce(0.1))
    again.optim_step()
    assert again.policy_version == engine.policy_version
    assert _same(expected, _weights(again))


EngineCheck = Callable[[EngineUnderTest], None]

ENGINE_CHECKS: tuple[EngineCheck, ...] = (
    check_version_counts_steps,
    check_backward_moves_no_weight,
    check_logprobs_are_those_of_the_loss,
    check_logprobs_keep_rows_apart,
    check_split_changes_nothing,
    check_gradients_add_up,
    check_step_clears_the_gradient,
    check_good_tokens_become_likelier,
    check_export_is_the_callers_own,
    check_masked_rows_are_harmless,
    check_non_finite_loss_stops_the_step,
    check_detached_loss_is_refused,
    check_malformed_batches_are_refused,
    check_checkpoint_brings_everything_back,
)
