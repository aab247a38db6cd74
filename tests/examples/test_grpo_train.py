"""The loop over fakes: which prompts, seeds and settings reach the sampler and the trainer."""

import asyncio
import functools
import sys
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest

from algos_gspo_dapo_grpo import (
    BatchCounts,
    DapoLoss,
    DynamicSampling,
    GrpoLoss,
    GspoLoss,
    KlPenalty,
)
from async_policy import RefillError, Scheduler
from rl_contracts import Completion, PolicyVersion, SamplingParams
from rl_contracts.train import PackedBatch, StepResult
from rl_tasks import (
    ChatMessage,
    EncodedProblem,
    LastNumber,
    Problem,
    PromptOrder,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from graders import graded_here
from grpo import LoopConfig, Run, Task, sampling_seed, train
from samplers import Samplers
from trainer import Trainer, TrainResult

NUM_PROBLEMS = 5


@dataclass
class Tokenizer:
    """Token 10 + d is the digit d."""

    bos_token_id: int | None = None

    def apply_chat_template(self, *_: object, **__: object) -> list[int]:
        return [1]

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:  # noqa: ARG002, FBT001, FBT002  # transformers' signature
        return "".join(str(token - 10) for token in token_ids)


@dataclass
class FakeSampler:
    """Answers 0, 1, 2, ... whatever it is asked, and writes down what it was asked."""

    asked: list[tuple[tuple[int, ...], int, SamplingParams, int]] = field(default_factory=list)
    version: int = 0
    uniform: frozenset[int] = frozenset()

    async def load_from(self, source: object) -> None:
        self.version = cast("int", source)

    async def sample(
        self,
        prompt_ids: tuple[int, ...],
        *,
        num_samples: int,
        params: SamplingParams,
        images: tuple[object, ...] = (),
    ) -> list[Completion]:
        assert not images
        self.asked.append((prompt_ids, num_samples, params, self.version))
        return [
            Completion(
                token_ids=(11 if prompt_ids[0] in self.uniform else 10 + member,),
                rollout_logprobs=(-1.0,),
                policy_versions=(PolicyVersion(self.version),),
                finish_reason="stop",
            )
            for member in range(num_samples)
        ]


@dataclass
class FakeTrainer:
    """Counts steps and writes down what it was given."""

    num_shares: int = 2
    version: int = 0
    scored: int = 0
    given: list[tuple[list[list[PackedBatch]], "functools.partial[object]"]] = field(
        default_factory=list
    )

    async def train(
        self, shares: list[list[PackedBatch]], loss_fn: "functools.partial[object]"
    ) -> TrainResult:
        self.given.append((shares, loss_fn))
        self.version += 1
        step = StepResult(policy_version=PolicyVersion(self.version), grad_norm=1.0)
        return TrainResult(step=step, metrics={"loss": 0.0}, seconds=1.0, peak_bytes=0)

    async def with_ref_logprobs(self, shares: list[list[PackedBatch]]) -> list[list[PackedBatch]]:
        self.scored += 1
        return shares

    def weights(self, dtype: str) -> int:
        assert dtype == "float32"
        return self.version


def problems() -> list[EncodedProblem]:
    return [
        EncodedProblem(
            problem=Problem(
                problem_id=f"p{index}",
                messages=(ChatMessage(role="user", content="?"),),
                ground_truth="1",
                data_source="test",
            ),
            prompt_ids=(100 + index, 2),
        )
        for index in range(NUM_PROBLEMS)
    ]


def run(
    config: LoopConfig,
    *,
    uniform: Collection[int] = (),
    beside: bool = False,
    trained_meanwhile: int = 0,
) -> tuple[FakeSampler, FakeTrainer, list[tuple[int, dict[str, float]]]]:
    sampler, trainer = FakeSampler(uniform=frozenset(uniform)), FakeTrainer()
    steps: list[tuple[int, dict[str, float]]] = []

    async def evaluate() -> dict[str, float]:
        version = sampler.version
        enough = min(len(trainer.given) + trained_meanwhile, config.num_steps)
        while len(trainer.given) < enough:  # noqa: ASYNC110  (nobody tells of it)
            await asyncio.sleep(0)
        assert sampler.version == version
        return {"reward/heldout/mean": float(version)}

    async def record(step: int, metrics: dict[str, float]) -> None:
        steps.append((step, metrics))

    async def finish_step(step: int, metrics: dict[str, float]) -> bool:
        await record(step, metrics)
        return True

    asyncio.run(
        train(
            Run(
                config=config,
                task=Task(
                    train=problems(),
                    heldout=(),
                    rewards={"test": LastNumber()},
                    tokenizer=Tokenizer(),
                    grade=graded_here({"test": LastNumber()}),
                ),
                scheduler=Scheduler(config.schedule()),
                trainer=cast("Trainer", trainer),
                sampler=cast("Samplers", sampler),
                dtype="float32",
                evaluate=evaluate,
                record=record,
                finish_step=finish_step,
                evaluates_beside=lambda step: beside and step < config.num_steps,
            )
        )
    )
    return sampler, trainer, steps


def config_of(**changes: object) -> LoopConfig:
    settings: dict[str, object] = {
        "num_steps": 4,
        "groups_per_step": 2,
        "group_size": 3,
        "max_staleness": 0,
        "max_new_tokens": 5,
        "temperature": 0.7,
        "evaluate_every": 3,
        "seed": 9,
        "max_tokens_per_micro_batch": 9,
    }
    return LoopConfig(**{**settings, **changes})  # type: ignore[arg-type]


def test_prompts_seeds_and_settings_reach_the_sampler() -> None:
    """The prompts are those of `PromptOrder`, each with its own seed and the loop's settings."""
    sampler, _, _ = run(config_of())
    draws = PromptOrder(num_problems=NUM_PROBLEMS, seed=9).take(8)
    assert [prompt for prompt, *_ in sampler.asked] == [(100 + d.problem, 2) for d in draws]
    assert [params.seed for _, _, params, _ in sampler.asked] == [
        sampling_seed("train", 9, str(index)) for index in range(8)
    ]
    assert {num_samples for _, num_samples, _, _ in sampler.asked} == {3}
    assert {(p.max_new_tokens, p.temperature, p.top_p) for _, _, p, _ in sampler.asked} == {
        (5, 0.7, 1.0)
    }


def test_every_step_is_sampled_from_the_weights_before_it() -> None:
    """In turn, step s is sampled at version s; with one step of staleness at s - 1 or s."""
    sampler, _, steps = run(config_of())
    assert [version for *_, version in sampler.asked] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert {metrics["staleness/trajectory/max"] for _, metrics in steps} == {0.0}
    sampler, _, steps = run(config_of(max_staleness=1))
    assert all(
        version in {index // 2 - 1, index // 2} for index, (*_, version) in enumerate(sampler.asked)
    )
    assert max(metrics["staleness/trajectory/max"] for _, metrics in steps) == 1.0


def test_loss_and_counts_reach_the_trainer() -> None:
    """The configured loss and the counts of the whole step arrive; rows fit the token budget."""
    for loss in (GrpoLoss(clip_low=0.1), GspoLoss(), DapoLoss()):
        _, trainer, _ = run(config_of(loss=loss))
        assert len(trainer.given) == 4
        for shares, loss_fn in trainer.given:
            assert loss_fn.keywords["config"] == loss
            # two groups of three answers 0, 1, 2 of which one is right: all six rows count
            assert loss_fn.keywords["counts"] == BatchCounts(num_tokens=6, num_sequences=6)
            assert len(shares) == 2
            batches = [batch for share in shares for batch in share]
            assert all(batch.token_ids.shape[0] <= 9 for batch in batches)
            assert sum(int(batch.loss_mask.sum()) for batch in batches) == 6


def test_a_kl_term_is_scored_by_the_reference_once_a_step() -> None:
    """With a KL term every step's rows go to the reference, and without one none do."""
    _, trainer, _ = run(config_of(loss=GrpoLoss(kl=KlPenalty(coefficient=0.1))))
    assert trainer.scored == 4
    _, trainer, _ = run(config_of())
    assert trainer.scored == 0


def test_evaluations_stand_where_they_were_asked_for() -> None:
    """Every third step and the last, on the version that the step made."""
    _, _, steps = run(config_of())
    assert [step for step, _ in steps] == [1, 2, 3, 4]
    found = {s: m["reward/heldout/mean"] for s, m in steps if "reward/heldout/mean" in m}
    assert found == {3: 3.0, 4: 4.0}


def test_training_goes_on_beside_an_evaluation() -> None:
    """Step 2 is measured while step 3 is trained, on its own weights, and recorded before step 3.

    Without going on, the answers to the held-out problems would wait for step 3 for ever.
    """
    _, _, steps = run(
        config_of(max_staleness=1, publish_every=2, evaluate_every=2, num_steps=5),
        beside=True,
        trained_meanwhile=1,
    )
    found = {s: m["reward/heldout/mean"] for s, m in steps if "reward/heldout/mean" in m}
    assert [step for step, _ in steps] == [1, 2, 3, 4, 5]
    assert found == {2: 2.0, 4: 4.0, 5: 5.0}


def test_weights_are_published_as_often_as_asked() -> None:
    """Every second step, with staleness 1: steps 2 and 3 train on what version 2 answered."""
    sampler, _, steps = run(config_of(max_staleness=1, publish_every=2, evaluate_every=9))
    assert {version for *_, version in sampler.asked} == {0, 2}
    assert [metrics["staleness/trajectory/max"] for _, metrics in steps] == [0.0, 1.0, 0.0, 1.0]
    assert sampler.version == 4  # the last step's weights are those that are evaluated


def test_publishing_too_rarely_is_refused_before_anything_runs() -> None:
    """With staleness 1 nothing could be trained on after the second step."""
    with pytest.raises(ValueError, match=r"publish_every = 3 leaves .* max_staleness to 2"):
        config_of(max_staleness=1, publish_every=3)


def test_completion_order_trains_on_every_prompt_once() -> None:
    """Whichever is done first: each of the eight groups is trained on once, in some step."""
    _, trainer, steps = run(config_of(max_staleness=1, order="completion"))
    trained = [
        trajectory_id.split("/")[0]
        for shares, _ in trainer.given
        for share in shares
        for batch in share
        for trajectory_id in batch.trajectory_ids
    ]
    assert {name: trained.count(name) for name in trained} == {f"group-{i}": 3 for i in range(8)}
    assert max(metrics["staleness/trajectory/max"] for _, metrics in steps) <= 1.0


def test_dynamic_sampling_fills_steps_with_groups_that_have_a_signal() -> None:
    """Prompts 100 and 102 have one answer for all, so others take their places, and are counted.

    The sampler answers 0, 1, 2 in every group, of which "1" is right, but for those two prompts:
    there every answer is 1.
    """
    config = config_of(
        dynamic_sampling=DynamicSampling(max_rounds=5, incomplete="raise"), num_steps=3
    )
    sampler, trainer, steps = run(config, uniform={100, 102})
    assert all(
        loss_fn.keywords["counts"] == BatchCounts(num_tokens=6, num_sequences=6)
        for _, loss_fn in trainer.given
    )
    asked = [prompt[0] for prompt, *_ in sampler.asked]
    set_aside = sum(metrics["groups/set_aside/count"] for _, metrics in steps)
    draws = [100 + d.problem for d in PromptOrder(num_problems=NUM_PROBLEMS, seed=9).take(20)]
    assert asked == draws[: len(asked)]
    assert set_aside == sum(prompt in {100, 102} for prompt in asked) > 0
    assert len(asked) == 6 + set_aside
    for _, metrics in steps:
        aside = metrics["groups/set_aside/count"]
        assert metrics["groups/uniform/fraction"] == aside / (2 + aside)
        assert metrics["batch/sampled/sequences"] == 3 * (2 + aside)


def test_a_search_without_a_signal_ends() -> None:
    """Where every group is uniform, the bound ends the run by name (A21)."""
    config = config_of(dynamic_sampling=DynamicSampling(max_rounds=3, incomplete="raise"))
    with pytest.raises(RefillError, match="6"):  # 3 rounds of 2 groups
        run(config, uniform={100, 101, 102, 103, 104})
