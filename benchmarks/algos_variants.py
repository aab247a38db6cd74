"""What `algos_loss.py` measures: losses of ours, verl's functions, the tensors given to them."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from algos_gspo_dapo_grpo import (
    BatchCounts,
    CispoLoss,
    DapoLoss,
    DecoupledPpoLoss,
    GmpoLoss,
    GrpoLoss,
    GspoLoss,
    GspoTokenLoss,
    KlPenalty,
    PolicyLoss,
    Sequences,
    SequenceTruncation,
    TokenTruncation,
    count_batch,
    policy_loss,
)

COMPILE_OPTIONS: dict[str, str | int | bool | Callable[..., object]] = {"combo_kernels": True}
"""As the package's README advises."""

COMPLETION_SHARE = 0.9
"""Tokens in the loss mask; the rest are the prompts'."""

Work = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class Verl:
    """One of verl's losses, set as the case beside it."""

    mode: str
    clip_low: float
    clip_high: float
    aggregation: str = "token-mean"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A loss, and which of the tensors that may be given it is given."""

    name: str
    config: PolicyLoss
    rollout: bool = False
    ref: bool = False
    metrics: bool = True
    large: bool = False
    """Also compiled for any lengths, and at 16 times the tokens, where no cache is enough."""
    verl: Verl | None = None
    """Verl's function of the same formula."""

    @property
    def bytes_per_token(self) -> int:
        """Policy, proximal, mask, gradient, and what else the formula reads."""
        return 4 + 4 + 1 + 4 + 4 * self.rollout + 4 * self.ref


KL = KlPenalty(coefficient=0.04)
CASES = (
    Case(
        name="dapo",
        config=DapoLoss(),
        large=True,
        verl=Verl(mode="vanilla", clip_low=0.2, clip_high=0.28),
    ),
    Case(name="dapo, metrics not read", config=DapoLoss(), metrics=False),
    Case(name="grpo, sequence mean", config=GrpoLoss()),
    Case(
        name="grpo, dual clip, kl, truncated weights",
        config=GrpoLoss(dual_clip=3.0, kl=KL, rollout_correction=TokenTruncation()),
        rollout=True,
        ref=True,
    ),
    Case(
        name="gspo",
        config=GspoLoss(),
        large=True,
        verl=Verl(mode="gspo", clip_low=3e-4, clip_high=4e-4, aggregation="seq-mean-token-mean"),
    ),
    Case(
        name="gspo, kl, sequence weights",
        config=GspoLoss(kl=KL, rollout_correction=SequenceTruncation()),
        rollout=True,
        ref=True,
        large=True,
    ),
    Case(name="gspo_token", config=GspoTokenLoss()),
    Case(
        name="gmpo",
        config=GmpoLoss(),
        verl=Verl(mode="geo_mean", clip_low=0.4, clip_high=0.4),
    ),
    Case(
        name="cispo",
        config=CispoLoss(),
        verl=Verl(mode="cispo", clip_low=1.0, clip_high=4.0),
    ),
    Case(name="decoupled ppo", config=DecoupledPpoLoss(), rollout=True),
)


class Batch:
    """Packed tokens of sequences whose lengths differ up to sevenfold."""

    def __init__(self, tokens: int, device: torch.device) -> None:
        """Draw a batch; a prompt's share of every sequence is outside the mask."""
        generator = torch.Generator().manual_seed(4)
        num_sequences = max(tokens // 2048, 2)
        shares = torch.rand(num_sequences, generator=generator) + 1 / 6
        lengths = (shares / shares.sum() * tokens).to(torch.int64)
        lengths[-1] += tokens - lengths.sum()
        proximal = -2.0 * torch.rand(tokens, generator=generator) - 0.1

        def near(distance: float) -> Tensor:
            noise = torch.randn(tokens, generator=generator)
            return (proximal + distance * noise).clamp(max=-1e-3).to(device)

        self.tokens = tokens
        self.lengths = lengths
        self.policy = near(0.05).requires_grad_()
        self.proximal = proximal.to(device)
        self.rollout = near(0.02)
        self.ref = near(0.1)
        self.mask = (torch.rand(tokens, generator=generator) < COMPLETION_SHARE).to(device)
        self.advantages = torch.randn(num_sequences, generator=generator).to(device)
        bounds = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        self.cu_seqlens = bounds.to(torch.int32).to(device)
        sequences = Sequences.packed(self.cu_seqlens, num_tokens=tokens)
        self.counts = count_batch(self.mask, sequences)

    def padded(self, values: Tensor) -> Tensor:
        """Values as verl wants them, one row per sequence."""
        rows = torch.split(values, self.lengths.tolist())
        return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def ours(case: Case, batch: Batch, *, kind: str) -> Work:
    """Forward and backward through `policy_loss`."""
    counts: BatchCounts = batch.counts

    def loss_of(  # noqa: PLR0917  # what a graph takes
        policy: Tensor,
        proximal: Tensor,
        rollout: Tensor | None,
        ref: Tensor | None,
        advantages: Tensor,
        mask: Tensor,
        cu_seqlens: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        share = policy_loss(
            policy,
            proximal_logprobs=proximal,
            advantages=advantages,
            loss_mask=mask,
            sequences=Sequences.packed(cu_seqlens, num_tokens=policy.shape[0]),
            config=case.config,
            counts=counts,
            rollout_logprobs=rollout,
            ref_logprobs=ref,
        )
        return share.loss, share.metrics if case.metrics else {}

    function = loss_of
    if kind != "eager":
        function = torch.compile(
            loss_of, fullgraph=True, dynamic=kind == "any lengths", options=COMPILE_OPTIONS
        )

    def work() -> None:
        batch.policy.grad = None
        loss, _ = function(
            batch.policy,
            batch.proximal,
            batch.rollout if case.rollout else None,
            batch.ref if case.ref else None,
            batch.advantages,
            batch.mask,
            batch.cu_seqlens,
        )
        loss.backward()

    return work


def verls(verl: Verl, batch: Batch, *, compiled: bool) -> Work:
    """Forward and backward through verl's function, on the same tokens in padded rows."""
    core_algos = importlib.import_module("verl.trainer.ppo.core_algos")
    actor_config = importlib.import_module("verl.workers.config").ActorConfig
    config = actor_config(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=verl.clip_low,
        clip_ratio_high=verl.clip_high,
    )
    policy = batch.padded(batch.policy.detach()).requires_grad_()
    proximal, mask = batch.padded(batch.proximal), batch.padded(batch.mask).to(torch.float32)
    advantages = batch.advantages[:, None].expand_as(mask).contiguous()
    function = core_algos.get_policy_loss_fn(verl.mode)
    if compiled:
        function = torch.compile(function, dynamic=False, options=COMPILE_OPTIONS)

    def work() -> None:
        policy.grad = None
        loss, _ = function(proximal, policy, advantages, mask, verl.aggregation, config, None)
        loss.backward()

    return work


def copy_of(num_bytes: int, device: torch.device) -> Work:
    """Read half of the bytes and write the other half."""
    source = torch.zeros(num_bytes // 8, device=device)
    target = torch.empty_like(source)

    def work() -> None:
        target.copy_(source)

    return work
