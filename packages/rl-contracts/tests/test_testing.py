"""The fakes that ship show the behaviour that engines and samplers must show."""

import asyncio
from collections.abc import Sequence
from typing import final

import pytest
import torch
from torch import Tensor

from rl_contracts.rollout import PolicyVersion
from rl_contracts.testing import (
    ENGINE_CHECKS,
    SAMPLER_CHECKS,
    EngineUnderTest,
    SamplerUnderTest,
    ToyEngine,
    ToySampler,
    toy_engine,
)
from rl_contracts.testing.engine_contract import (
    EngineCheck,
    check_detached_loss_is_refused,
    check_malformed_batches_are_refused,
)
from rl_contracts.testing.sampler_contract import SamplerCheck
from rl_contracts.testing.toy_engine import WEIGHT_NAME, toy_weights
from rl_contracts.train import BatchT, LossFn, LossOutput, NamedTensor

VOCAB = 11


@pytest.mark.parametrize("check", ENGINE_CHECKS, ids=lambda check: check.__name__)
def test_toy_engine(check: EngineCheck) -> None:
    """The toy engine passes every engine check."""
    check(EngineUnderTest(make=lambda: ToyEngine(vocab_size=VOCAB), vocab_size=VOCAB))


def toy_logprobs(
    seed: int, prompt_ids: Sequence[int], completion_ids: Sequence[int], temperature: float
) -> list[float]:
    table = torch.log_softmax(toy_weights(VOCAB, seed=seed) / temperature, dim=-1)
    previous = [prompt_ids[-1], *completion_ids[:-1]]
    return [table[p, t].item() for p, t in zip(previous, completion_ids, strict=True)]


@pytest.mark.parametrize("check", SAMPLER_CHECKS, ids=lambda check: check.__name__)
def test_toy_sampler(check: SamplerCheck) -> None:
    """The toy sampler passes every sampler check."""

    async def run() -> None:
        await check(
            SamplerUnderTest(
                sampler=ToySampler(vocab_size=VOCAB, max_model_len=32),
                weights=lambda seed: [NamedTensor(WEIGHT_NAME, toy_weights(VOCAB, seed=seed))],
                logprobs=toy_logprobs,
                prompt_ids=(3, 5),
                max_model_len=32,
            )
        )

    asyncio.run(run())


@final
class AveragingEngine:
    """A toy engine that is wrong in one way: it averages over micro-batches, as many do."""

    def __init__(self) -> None:
        self._toy = ToyEngine(vocab_size=VOCAB)
        self.logprobs = self._toy.logprobs
        self.optim_step = self._toy.optim_step
        self.export_weights = self._toy.export_weights
        self.save_checkpoint = self._toy.save_checkpoint
        self.load_checkpoint = self._toy.load_checkpoint

    @property
    def policy_version(self) -> PolicyVersion:
        return self._toy.policy_version

    def forward_backward(
        self, micro_batches: Sequence[BatchT], loss_fn: LossFn[BatchT]
    ) -> dict[str, float]:
        def averaged(policy_logprobs: Tensor, batch: BatchT) -> LossOutput:
            output = loss_fn(policy_logprobs, batch)
            return LossOutput(loss=output.loss / len(micro_batches), metrics=output.metrics)

        return self._toy.forward_backward(micro_batches, averaged)


@pytest.mark.parametrize(
    ("guard", "check", "text"),
    [
        (
            "refuse_malformed",
            check_malformed_batches_are_refused,
            "ValueError for a loss mask that is True on a first token, nothing was raised",
        ),
        ("total_of", check_detached_loss_is_refused, "a detached loss, nothing was raised"),
    ],
)
def test_an_engine_that_trusts_its_input_fails(
    monkeypatch: pytest.MonkeyPatch, guard: str, check: EngineCheck, text: str
) -> None:
    """The toy engine without one of its guards trains on what the check hands it."""
    monkeypatch.setattr(toy_engine, guard, lambda *_, **__: {})
    with pytest.raises(AssertionError, match=text):
        check(EngineUnderTest(make=lambda: ToyEngine(vocab_size=VOCAB), vocab_size=VOCAB))


def test_the_engine_checks_can_fail() -> None:
    """An engine that averages over micro-batches fails the checks that look at it."""
    failed = []
    for check in ENGINE_CHECKS:
        try:
            check(EngineUnderTest(make=AveragingEngine, vocab_size=VOCAB))
        except AssertionError:
            failed.append(check.__name__)
    assert failed == [
        "check_split_changes_nothing",
        "check_gradients_add_up",
        "check_masked_rows_are_harmless",
    ]
