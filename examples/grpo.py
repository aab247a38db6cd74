"""GRPO, or the losses of DAPO and GSPO: what a loop is made of, and the plainest loop.

    draw prompts -> sample groups -> reward -> advantages -> pack -> loss, step -> publish

`async_policy.Rollouts` owns *when* groups are sampled: with `max_staleness` 0 strictly in turn,
with 1 while the trainer works on the step before. `train` below is a loop; a recipe has its own.
"""

import asyncio
import functools
import hashlib
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import attrs
import torch
from graders import Answers, Grade
from jaxtyping import Float
from samplers import Samplers
from torch import Tensor
from trainer import Trainer, TrainResult

from algos_gspo_dapo_grpo import (
    BatchCounts,
    ClipCovLoss,
    DapoLoss,
    DecoupledPpoLoss,
    DynamicSampling,
    GroupAdvantages,
    GrpoAdvantages,
    GrpoLoss,
    KlCovLoss,
    PolicyLoss,
    Sequences,
    SoftOverlong,
    group_advantages,
    group_ids_of,
    is_informative,
    mismatch_metrics,
    policy_loss,
    soft_overlong_penalty,
)
from async_policy import (
    Batch,
    ConsumptionOrder,
    Refill,
    Rollouts,
    Scheduler,
    SchedulerConfig,
    Ticket,
    Timeouts,
)
from rl_contracts import Completion, PolicyVersion, SamplingParams, Trajectory
from rl_contracts.images import ImagePatches
from rl_contracts.packing import pack
from rl_contracts.train import LossFn, LossOutput, PackedBatch
from rl_metrics import staleness_histogram
from rl_tasks import (
    EncodedProblem,
    LoadedImages,
    PromptOrder,
    Reward,
    Tokenizer,
    decode_completion,
)
from rollout_vllm import Dtype

TIMEOUTS = Timeouts(batch_s=7200.0, publish_s=7200.0)
"""How long the loop waits for a batch, and for samplers to take new weights. Both include the start
of a sampler in the place of one that died, and a turn of the other side on shared devices."""


@attrs.frozen(kw_only=True)
class LoopConfig:
    """The loop: how much is sampled, how stale it may be, and what is learned from it."""

    num_steps: int = attrs.field(validator=attrs.validators.ge(1))
    """Optimizer steps of the whole run."""

    groups_per_step: int = attrs.field(default=8, validator=attrs.validators.ge(1))
    """Prompts that one optimizer step consumes. Default: docs/first_run.md."""

    group_size: int = attrs.field(default=8, validator=attrs.validators.ge(2))
    """Completions of one prompt, which share a baseline. Default: docs/first_run.md."""

    max_staleness: int = attrs.field(default=1, validator=attrs.validators.ge(0))
    """Most optimizer steps between a trajectory's oldest token and the weights trained on it.

    0 samples and trains strictly in turn; the default overlaps them by one step."""

    order: ConsumptionOrder = attrs.field(
        default="data", validator=attrs.validators.in_(("data", "completion"))
    )
    """Which groups a step trains on: ``data`` takes them in the order of the prompts, the same in
    every run; ``completion`` those that are done, which is faster where lengths differ a lot."""

    publish_every: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    """Optimizer steps between two publishes; at most ``max_staleness + 1``. An evaluation publishes
    too. Default: every step, which keeps the data as fresh as it can be."""

    max_new_tokens: int = attrs.field(validator=attrs.validators.ge(1))
    """Longest completion, in tokens."""

    temperature: float = attrs.field(
        default=1.0, validator=[attrs.validators.ge(0.01), attrs.validators.le(100.0)]
    )
    """Divides the logits, in the sampler and in the trainer alike.

    From 0.01, below which vLLM takes 0.01 instead, to 100, where tokens are all but uniform."""

    max_tokens_per_micro_batch: int = attrs.field(default=2048, validator=attrs.validators.ge(1))
    """Token budget of one forward pass: bounds memory, changes no result."""

    advantages: GroupAdvantages = attrs.field(factory=GrpoAdvantages)
    """How rewards become advantages."""

    overlong: SoftOverlong | None = None
    """Punishment of completions that come close to `max_new_tokens`, which its `max_length` must
    be. Default: none; a completion that is cut off is graded like any other."""

    dynamic_sampling: DynamicSampling | None = None
    """Fill every step with groups that have a signal, and sample others in place of those whose
    members all have the same reward (arXiv:2503.14476, section 3.2). `max_rounds` bounds the
    search; with ``incomplete = "yield"`` a short step is trained on, and ``"raise"`` ends the run.
    Default: none; groups without a signal are counted and leave a smaller step."""

    loss: PolicyLoss = attrs.field(factory=GrpoLoss)
    """The policy loss; its ratio is taken against the logprobs that the sampler reported. A KL term
    is measured against the model that the run began with."""

    evaluate_every: int = attrs.field(default=8, validator=attrs.validators.ge(1))
    """Optimizer steps between evaluations on the held-out problems; also before and after. With
    `max_staleness` above 0 the next step is trained beside one, unless a checkpoint is written or
    trainer and sampler take turns on the same devices."""

    evaluation_samples: int = attrs.field(default=4, validator=attrs.validators.ge(1))
    """Completions per held-out problem in an evaluation."""

    seed: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    """Of the prompt order and of the sampling."""

    def __attrs_post_init__(self) -> None:
        """Refuse settings of the schedule that do not go together."""
        interval = self.schedule().max_publish_interval
        if self.publish_every > interval:
            raise ValueError(
                f"loop.publish_every = {self.publish_every} leaves nothing to train on after "
                f"{interval} steps with loop.max_staleness = {self.max_staleness}; set "
                f"max_staleness to {self.publish_every - 1} or more, or publish_every to "
                f"{interval} or less"
            )
        if self.overlong is not None and self.overlong.max_length != self.max_new_tokens:
            raise ValueError(
                f"loop.overlong.max_length = {self.overlong.max_length} and loop.max_new_tokens = "
                f"{self.max_new_tokens}: the punishment ends where completions are cut off; set "
                "both to the same length"
            )

    @loss.validator
    def _only_what_takes_effect(self, _: object, loss: PolicyLoss) -> None:
        if isinstance(loss, ClipCovLoss | KlCovLoss | DecoupledPpoLoss):
            raise ValueError(  # noqa: TRY004  # a setting, not a type, is wrong
                f"loop.loss.kind = {loss.kind} needs the trainer's logprobs at the start of a "
                "step, which this loop does not compute; choose another kind"
            )
        if loss.rollout_correction is not None:
            raise ValueError(
                "this loop takes the ratio against the sampler's own logprobs, so a rollout "
                "correction would always be 1; leave loss.rollout_correction at none"
            )

    def check_lengths(self, max_model_len: int) -> None:
        """Refuse a token budget that a single row may exceed.

        Raises:
            ValueError: with both numbers.
        """
        if self.max_tokens_per_micro_batch < max_model_len:
            raise ValueError(
                f"loop.max_tokens_per_micro_batch = {self.max_tokens_per_micro_batch} holds no row "
                f"of {max_model_len} tokens, the longest prompt and completion together; raise it"
            )

    @property
    def has_kl_term(self) -> bool:
        """Whether the loss needs logprobs of a reference."""
        return not isinstance(self.loss, DapoLoss) and self.loss.kl is not None

    def schedule(self) -> SchedulerConfig:
        """The scheduler's part of these settings."""
        return SchedulerConfig(
            num_steps=self.num_steps,
            groups_per_step=self.groups_per_step,
            max_staleness=self.max_staleness,
            order=self.order,
            refill=None
            if self.dynamic_sampling is None
            else Refill(
                max_rounds=self.dynamic_sampling.max_rounds,
                incomplete=self.dynamic_sampling.incomplete,
            ),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Problems to train on, problems never trained on, and how answers are rewarded."""

    train: Sequence[EncodedProblem]
    heldout: Sequence[EncodedProblem]
    rewards: Mapping[str, Reward]
    tokenizer: Tokenizer

    grade: Grade
    """Rewards answers, here or in processes of their own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The completions of one prompt with their rewards; NaN where none could be given."""

    problem: EncodedProblem
    completions: tuple[Completion, ...]
    texts: tuple[str, ...]
    rewards: tuple[float, ...]
    group_id: str

    images: tuple[ImagePatches, ...] = field(default=(), repr=False)
    """Of the prompt, processed once for all completions."""

    def trajectories(self) -> list[Trajectory]:
        """One per completion."""
        return [
            Trajectory.from_completion(
                self.problem.prompt_ids,
                completion,
                trajectory_id=f"{self.group_id}/{member}",
                group_id=self.group_id,
                images=self.images,
            )
            for member, completion in enumerate(self.completions)
        ]


def loss_of(
    policy_logprobs: Float[Tensor, " tokens"],
    batch: PackedBatch,
    *,
    config: PolicyLoss,
    counts: BatchCounts,
) -> LossOutput:
    """The policy loss of one micro-batch, its ratio taken against the sampler's logprobs.

    There is one optimizer step per batch, so the trainer's own start-of-step logprobs would make
    every ratio 1 and the clip inert. Against the sampler's the clip bounds staleness too. Where a
    sampler reported none (NaN), the ratio is 1.
    """
    reported = torch.isfinite(batch.rollout_logprobs)
    proximal = torch.where(reported, batch.rollout_logprobs, policy_logprobs.detach())
    sequences = Sequences.packed(batch.cu_seqlens, num_tokens=batch.token_ids.shape[0])
    share = policy_loss(
        policy_logprobs,
        proximal_logprobs=proximal,
        ref_logprobs=batch.ref_logprobs,
        advantages=batch.advantages,
        loss_mask=batch.loss_mask,
        sequences=sequences,
        config=config,
        counts=counts,
    )
    mismatch = mismatch_metrics(
        policy_logprobs.detach(), batch.rollout_logprobs, batch.loss_mask, counts=counts
    )
    return LossOutput(loss=share.loss, metrics={**share.metrics, **mismatch})


def sampling_seed(purpose: str, seed: int, name: str) -> int:
    """Seed of one group: far from every other group's, and the same whenever it is sampled.

    The sampler gives sample ``i`` of a group this seed plus ``i``; seeds that count up from group
    to group would make neighbours share most of their draws.
    """
    digest = hashlib.blake2b(f"{purpose}/{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 2


NO_IMAGES = LoadedImages(shown=(), patches=())
"""Of a prompt of text alone."""


async def sample_group(
    task: Task,
    sampler: Samplers,
    problem: EncodedProblem,
    params: SamplingParams,
    *,
    num_samples: int,
    group_id: str,
) -> Group:
    """Sample completions of one problem and reward them."""
    # in a thread: an image takes milliseconds
    images = await asyncio.to_thread(problem.load_images) if problem.problem.images else NO_IMAGES
    completions = await sampler.sample(
        problem.prompt_ids, num_samples=num_samples, params=params, images=images.shown
    )
    texts = [decode_completion(task.tokenizer, c.token_ids) for c in completions]

    results = await task.grade(
        Answers(
            problem=replace(problem.problem, images=()),  # no reward looks at them
            texts=tuple(texts),
            finish_reasons=tuple(completion.finish_reason for completion in completions),
        )
    )
    return Group(
        problem=problem,
        completions=tuple(completions),
        texts=tuple(texts),
        rewards=tuple(float("nan") if r.value is None else r.value for r in results),
        group_id=group_id,
        images=images.patches,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """What a batch of groups comes to for the trainer."""

    trajectories: list[Trajectory]
    """Those that carry a gradient."""

    advantages: list[float]
    """One per trajectory, in reward units."""

    metrics: dict[str, float]
    """What the whole batch was like."""

    @property
    def counts(self) -> BatchCounts:
        """The global denominators of the loss."""
        return BatchCounts(
            num_tokens=sum(sum(row.loss_mask) for row in self.trajectories),
            num_sequences=len(self.trajectories),
        )


@dataclass(kw_only=True, slots=True)
class Run:
    """What a loop works with: the parts of a run, and the clock between its steps."""

    config: LoopConfig
    """The loop's settings."""

    task: Task
    """Problems and rewards."""

    scheduler: Scheduler
    """Where the run stands."""

    trainer: Trainer
    """The policy, at the scheduler's version."""

    sampler: Samplers
    """Has weights of any version."""

    dtype: Dtype
    """That the sampler takes weights in."""

    evaluate: Callable[[], Awaitable[dict[str, float]]]
    """Measures the published policy on the held-out problems."""

    record: Callable[[int, dict[str, float]], Awaitable[None]]
    """Records step number and metrics."""

    finish_step: Callable[[int, dict[str, float]], Awaitable[bool]]
    """Records them too, then keeps checkpoints; False ends the run."""

    evaluates_beside: Callable[[int], bool]
    """Whether training may go on while the policy of this step is measured."""

    published_s: float = 0.0
    """Seconds that the last publish took."""

    step_began: float = field(default_factory=time.monotonic)
    """When the present step did."""

    _evaluating: "tuple[int, dict[str, float], asyncio.Future[dict[str, float]]] | None" = None
    """A step that is measured while training goes on, and what else is known of it."""

    def rollouts(self) -> Rollouts[Group]:
        """Groups of the problems in their order, sampled as far ahead as the settings allow."""
        order = PromptOrder(num_problems=len(self.task.train), seed=self.config.seed)
        draws = order.take(self.scheduler.config.max_prompts)

        async def sample(ticket: Ticket) -> Group:
            params = SamplingParams(
                max_new_tokens=self.config.max_new_tokens,
                temperature=self.config.temperature,
                seed=sampling_seed("train", self.config.seed, str(ticket.index)),
            )
            return await sample_group(
                self.task,
                self.sampler,
                self.task.train[draws[ticket.index].problem],
                params,
                num_samples=self.config.group_size,
                group_id=f"group-{ticket.index}",
            )

        async def publish(_: PolicyVersion) -> None:
            begin = time.monotonic()
            await self.sampler.load_from(self.trainer.weights(self.dtype))
            self.published_s = time.monotonic() - begin

        def oldest_version(group: Group) -> PolicyVersion:
            return min(completion.policy_versions[0] for completion in group.completions)

        def has_signal(group: Group) -> bool:
            return is_informative(group.rewards)

        return Rollouts(
            self.scheduler,
            sample=sample,
            oldest_version=oldest_version,
            publish=publish,
            timeouts=TIMEOUTS,
            keep=None if self.config.dynamic_sampling is None else has_signal,
        )

    def pack(self, rows: Rows) -> list[list[PackedBatch]]:
        """Micro-batches, in as many shares as the trainer takes."""
        return pack(
            rows.trajectories,
            rows.advantages,
            max_tokens=self.config.max_tokens_per_micro_batch,
            num_ranks=self.trainer.num_shares,
        )

    def evaluates_at(self, step: int) -> bool:
        """Whether the policy is measured on the held-out problems after this step."""
        return step % self.config.evaluate_every == 0 or step == self.config.num_steps

    def publishes_at(self, step: int) -> bool:
        """Whether the sampler gets the weights of this step."""
        return step % self.config.publish_every == 0 or self.evaluates_at(step)

    async def publish(self, rollouts: Rollouts[Group], step: int) -> None:
        """Give the sampler the weights of this step, if it is to have them.

        Not before the answers to held-out problems are there that are drawn from the ones before.
        """
        if self.publishes_at(step):
            await self._until_evaluated()
            await rollouts.publish(PolicyVersion(step))

    async def finish(self, batch: Batch[Group], rows: Rows, result: TrainResult) -> bool:
        """Measure, evaluate and record a step; False ends the run."""
        step = result.step.policy_version
        now = time.monotonic()
        seconds = now - self.step_began
        metrics = rows.metrics | {
            **{name: value for name, value in result.metrics.items() if name != "loss"},
            "gradient/norm/value": result.step.grad_norm,
            "policy/version/value": step,
            "time/sample/seconds": batch.waited_s,
            "time/train/seconds": result.seconds,
            "time/step/seconds": seconds,
            "throughput/sampled/tokens_per_second": rows.metrics["batch/sampled/tokens"] / seconds,
            "throughput/trained/tokens_per_second": rows.metrics["batch/trained/tokens"]
            / result.seconds,
        }
        if result.peak_bytes:
            metrics["memory/device/max"] = float(result.peak_bytes)
        if self.publishes_at(step):
            metrics["time/publish/seconds"] = self.published_s
        self.step_began = now
        await self._until_evaluated()
        if self.evaluates_at(step):
            evaluation = asyncio.ensure_future(self.evaluate())
            self._evaluating = step, metrics, evaluation
            if self.evaluates_beside(step):
                return True  # it is recorded before the next step is
            metrics |= await evaluation
            self._evaluating = None
        return await self.finish_step(step, metrics)

    async def _until_evaluated(self) -> None:
        """Record the step that is being measured, if one is, once that is done."""
        if self._evaluating is not None:
            step, metrics, evaluation = self._evaluating
            metrics |= await evaluation
            self._evaluating = None
            await self.record(step, metrics)

    async def close(self) -> None:
        """End an evaluation that nobody waits for any more."""
        if self._evaluating is not None:
            _, _, evaluation = self._evaluating
            evaluation.cancel()
            await asyncio.gather(evaluation, return_exceptions=True)


async def train(run: Run) -> None:
    """Run the loop from the scheduler's present step to its last."""
    async with run.rollouts() as rollouts:
        await rollouts.publish(run.scheduler.trained_version)
        async for batch in rollouts.batches():
            rows = rows_of(batch, run.config)
            shares = run.pack(rows)
            if run.config.has_kl_term:
                shares = await run.trainer.with_ref_logprobs(shares)
            result = await run.trainer.train(shares, loss_fn(run.config.loss, rows))
            step = result.step.policy_version
            rollouts.trained(step)
            await run.publish(rollouts, step)
            if not await run.finish(batch, rows, result):
                return


def loss_fn(config: PolicyLoss, rows: Rows) -> LossFn[PackedBatch]:
    """The loss over all micro-batches and ranks, its denominators those of the whole batch."""
    return functools.partial(loss_of, config=config, counts=rows.counts)


def rows_of(batch: Batch[Group], config: LoopConfig) -> Rows:
    """Trajectories that carry a gradient, their advantages, and what the batch was like.

    A group whose members have the same reward has advantages of exactly 0 and adds nothing to any
    gradient: it is counted and left out of the packed batch, and so is a completion that could not
    be scored. Denominators are those of what is left, as DAPO's dynamic sampling has them
    (arXiv:2503.14476, section 3.2).
    """
    groups = batch.groups
    rewards = torch.tensor([reward for group in groups for reward in group.rewards])
    if config.overlong is not None:
        lengths = torch.tensor([len(c.token_ids) for group in groups for c in group.completions])
        rewards += soft_overlong_penalty(lengths, config=config.overlong)
    informative = [
        is_informative(of_group.tolist())
        for of_group in rewards.split([len(group.rewards) for group in groups])
    ]
    ids = group_ids_of([group.group_id for group in groups for _ in group.rewards])
    values = group_advantages(rewards, ids, config=config.advantages).tolist()
    rows = [trajectory for group in groups for trajectory in group.trajectories()]
    counts = [
        spread and math.isfinite(reward)
        for group, spread in zip(groups, informative, strict=True)
        for reward in group.rewards
    ]
    kept = [
        (row, value) for row, value, counted in zip(rows, values, counts, strict=True) if counted
    ]
    # A step without any gradient is still a step: one row of advantage 0 stands for it.
    kept = kept or [(rows[0], 0.0)]
    num_uniform = informative.count(False) + len(batch.set_aside)
    return Rows(
        trajectories=[row for row, _ in kept],
        advantages=[value for _, value in kept],
        metrics={
            **sampling_metrics((*groups, *batch.set_aside)),
            **pipeline_metrics(batch),
            "groups/uniform/fraction": num_uniform / (len(groups) + len(batch.set_aside)),
            "batch/trained/sequences": float(len(kept)),
            "batch/trained/tokens": float(sum(len(row.token_ids) for row, _ in kept)),
        },
    )


def sampling_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Rewards and lengths of everything that was sampled for a step."""
    completions = [completion for group in groups for completion in group.completions]
    rewards = [reward for group in groups for reward in group.rewards]
    scored = [reward for reward in rewards if math.isfinite(reward)]
    num_tokens = sum(len(completion.token_ids) for completion in completions)
    stopped = sum(completion.finish_reason == "stop" for completion in completions)
    return {
        "reward/train/mean": sum(scored) / len(scored) if scored else 0.0,
        "reward/unscorable/count": float(len(rewards) - len(scored)),
        "length/completion/mean": num_tokens / len(completions),
        "length/stopped/fraction": stopped / len(completions),
        "batch/sampled/tokens": float(num_tokens),
        "batch/sampled/sequences": float(len(completions)),
    }


def pipeline_metrics(batch: Batch[Group]) -> dict[str, float]:
    """How old the batch is, and what sampling did meanwhile."""
    of_trajectories = [
        (staleness, len(set(completion.policy_versions)) > 1)
        for staleness, group in zip(batch.staleness, batch.groups, strict=True)
        for completion in group.completions
    ]
    ages = [staleness for staleness, _ in of_trajectories]
    group_size = len(of_trajectories) / len(batch.groups)
    activity = batch.activity
    return {
        "staleness/trajectory/mean": sum(ages) / len(ages),
        "staleness/trajectory/max": float(max(ages)),
        **staleness_histogram(ages),
        "partial/trajectory/fraction": sum(partial for _, partial in of_trajectories) / len(ages),
        "lost/groups/fraction": activity.redone_fraction,
        "groups/set_aside/count": float(len(batch.set_aside)),
        "queue/ready/value": activity.num_waiting * group_size,
        "queue/in_flight/value": activity.num_in_flight * group_size,
        "idle/trainer/fraction": activity.idle_fraction,
    }
