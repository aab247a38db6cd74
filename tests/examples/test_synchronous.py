"""With `max_staleness = 0` the loop is the synchronous one, bit for bit, with a real engine."""

import asyncio
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import attrs
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from async_policy import Batch, Scheduler, Ticket
from engine_fsdp import FsdpConfig, FsdpEngine, OptimConfig
from parallel_state.process_group import init_process_group
from rl_contracts import Completion, FinishReason, PolicyVersion, SamplingParams
from rl_contracts.train import LossFn, PackedBatch
from rl_tasks import EncodedProblem, ExactMatch, PromptOrder, RewardResult, encode_problems

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from graders import graded_here
from grpo import Group, LoopConfig, Run, Task, loss_fn, rows_of, sample_group, sampling_seed, train
from samplers import Samplers
from tiny_models import character_tokenizer, sorting_problems, untrained
from trainer import Trainer, TrainResult

NUM_STEPS = 20

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A tiny Qwen3 with random weights, and a process group of one rank."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = character_tokenizer()
    torch.manual_seed(0)
    untrained("qwen3", tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    init_process_group()
    yield folder
    dist.destroy_process_group()


@dataclass
class PlainSampler:
    """Draws tokens with plain transformers from the weights that were published last.

    Each of its answers yields to other tasks between two tokens, so that groups really overlap.
    """

    tokenizer: PreTrainedTokenizerFast
    version: int = 0
    model: Any = None
    order: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = cast("Any", untrained("qwen3", self.tokenizer)).eval()

    async def load_from(self, source: object) -> None:
        version, weights = cast("tuple[int, Mapping[str, Tensor]]", source)
        self.model.load_state_dict(weights)
        self.version = version

    @torch.no_grad()
    async def sample(
        self,
        prompt: tuple[int, ...],
        *,
        num_samples: int,
        params: SamplingParams,
        images: tuple[object, ...],
    ) -> list[Completion]:
        assert not images
        assert params.seed is not None
        generator = torch.Generator().manual_seed(params.seed)
        ids = torch.tensor([prompt] * num_samples)
        logprobs, versions = [], []
        for _ in range(params.max_new_tokens):
            log_p = self.model(input_ids=ids).logits[:, -1].log_softmax(dim=-1)
            tokens = torch.multinomial(log_p.exp(), 1, generator=generator)
            logprobs.append(log_p.gather(1, tokens))
            versions.append(PolicyVersion(self.version))
            ids = torch.cat([ids, tokens], dim=1)
            await asyncio.sleep(0)
        reported = torch.cat(logprobs, dim=1)
        return [
            Completion(
                token_ids=tuple(ids[member, len(prompt) :].tolist()),
                rollout_logprobs=tuple(reported[member].tolist()),
                policy_versions=tuple(versions),
                finish_reason="length",
            )
            for member in range(num_samples)
        ]


@dataclass
class EngineTrainer:
    """The real engine, in this process."""

    engine: FsdpEngine
    num_shares: int = 1

    async def train(
        self, shares: list[list[PackedBatch]], loss: LossFn[PackedBatch]
    ) -> TrainResult:
        metrics = self.engine.forward_backward(shares[0], loss)
        return TrainResult(
            step=self.engine.optim_step(), metrics=metrics, seconds=1.0, peak_bytes=0
        )

    def weights(self, dtype: str) -> tuple[int, Mapping[str, Tensor]]:
        assert dtype == "float32"
        return int(self.engine.policy_version), dict(self.engine.export_weights())


def engine_of(model: Path) -> FsdpEngine:
    config = FsdpConfig(
        model_path=str(model), optim=OptimConfig(learning_rate=3e-3), compute_dtype="float32"
    )
    return FsdpEngine(config, device=torch.device("cpu"))


def task_of(model: Path) -> Task:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    problems = encode_problems(
        tokenizer, sorting_problems(30, seed=0), max_prompt_tokens=16, overlong="error"
    ).problems
    rewards = {"sort": FirstDigit()}
    return Task(
        train=problems,
        heldout=(),
        rewards=rewards,
        tokenizer=tokenizer,
        grade=graded_here(rewards),
    )


class FirstDigit:
    """1 if the answer begins with the smallest digit: what random weights find now and then."""

    def __call__(
        self, text: str, *, ground_truth: str, finish_reason: FinishReason
    ) -> RewardResult:
        return ExactMatch()(text[:1], ground_truth=ground_truth[:1], finish_reason=finish_reason)


CONFIG = LoopConfig(
    num_steps=NUM_STEPS,
    groups_per_step=3,
    group_size=8,
    max_staleness=0,
    max_new_tokens=3,
    max_tokens_per_micro_batch=64,
    seed=3,
)


async def by_the_loop(model: Path, config: LoopConfig) -> Mapping[str, Tensor]:
    """Weights after `train`, with everything that overlaps in it."""
    task, trainer = task_of(model), EngineTrainer(engine_of(model))

    async def nothing() -> dict[str, float]:
        return {}

    async def record(step: int, metrics: dict[str, float]) -> None:
        assert step == metrics["policy/version/value"]

    async def go_on(step: int, metrics: dict[str, float]) -> bool:
        await record(step, metrics)
        return True

    await train(
        Run(
            config=config,
            task=task,
            scheduler=Scheduler(config.schedule()),
            trainer=cast("Trainer", trainer),
            sampler=cast("Samplers", PlainSampler(character_tokenizer())),
            dtype="float32",
            evaluate=nothing,
            record=record,
            finish_step=go_on,
            evaluates_beside=lambda _: True,
        )
    )
    return dict(trainer.engine.export_weights())


async def by_hand(model: Path) -> Mapping[str, Tensor]:
    """Weights after sampling and training in turn, written down without any scheduler."""
    task, engine = task_of(model), engine_of(model)
    trainer, sampler = EngineTrainer(engine), PlainSampler(character_tokenizer())
    draws = PromptOrder(num_problems=len(task.train), seed=CONFIG.seed).take(NUM_STEPS * 3)
    for step in range(NUM_STEPS):
        await sampler.load_from(trainer.weights("float32"))
        groups: list[Group] = []
        for index in range(step * 3, step * 3 + 3):
            problem: EncodedProblem = task.train[draws[index].problem]
            params = SamplingParams(
                max_new_tokens=3,
                temperature=1.0,
                seed=sampling_seed("train", CONFIG.seed, str(index)),
            )
            groups.append(
                await sample_group(
                    task,
                    cast("Samplers", sampler),
                    problem,
                    params,
                    num_samples=8,
                    group_id=f"group-{index}",
                )
            )
        ticket = Ticket(
            index=0, step=PolicyVersion(step), admitted_version=PolicyVersion(step), attempt=0
        )
        batch = Batch(
            version=PolicyVersion(step),
            tickets=(ticket,) * 3,
            groups=tuple(groups),
            staleness=(0,) * 3,
            waited_s=0.0,
        )
        rows = rows_of(batch, CONFIG)
        shares = Run.pack(cast("Run", _Packs(CONFIG, trainer)), rows)
        await trainer.train(shares, loss_fn(CONFIG.loss, rows))
    return dict(engine.export_weights())


@dataclass
class _Packs:
    config: LoopConfig
    trainer: EngineTrainer


def test_in_turn_is_the_synchronous_loop_bit_for_bit(model: Path) -> None:
    """20 steps of a real engine: every weight equal, and with one step of staleness others."""
    wanted = asyncio.run(by_hand(model))
    found = asyncio.run(by_the_loop(model, CONFIG))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    stale = asyncio.run(by_the_loop(model, attrs.evolve(CONFIG, max_staleness=1)))
    assert not all(torch.equal(stale[name], wanted[name]) for name in wanted)
    first = dict(engine_of(model).export_weights())
    assert not all(torch.equal(first[name], wanted[name]) for name in wanted)
