"""The training half of the contracts: packed batches and what may be asked of an engine."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, Self, TypeVar, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rl_contracts.packed_images import PackedImages
from rl_contracts.rollout import PolicyVersion


class NamedTensor(NamedTuple):
    """One weight under its Hugging Face name."""

    name: str
    tensor: Tensor


@runtime_checkable
class TokenBatch(Protocol):
    """What an engine reads of a micro-batch; all else is between the loop and its loss.

    One whose prompts show images has them as `images`, a `PackedImages`; see `images_of`.
    """

    @property
    def token_ids(self) -> Int[Tensor, " tokens"]:
        """Token ids of all sequences, end to end; int64."""

    @property
    def positions(self) -> Int[Tensor, " tokens"]:
        """Position of each token in its own sequence, from 0; int64."""

    @property
    def cu_seqlens(self) -> Int[Tensor, " sequences_plus_1"]:
        """Where each sequence begins, and the number of tokens last; int32."""

    @property
    def loss_mask(self) -> Bool[Tensor, " tokens"]:
        """True on the tokens whose log-probability the loss looks at."""

    def to(self, device: torch.device) -> Self:
        """The same batch with its tensors on `device`."""


def images_of(batch: TokenBatch) -> PackedImages | None:
    """The images of a micro-batch, if its prompts show any."""
    images: PackedImages | None = getattr(batch, "images", None)
    return images


def _moved(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return None if tensor is None else tensor.to(device)


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedBatch:
    """Sequences end to end without padding, with what the losses of this field read.

    Entry ``t`` of every per-token tensor belongs to token ``t``: ``logprobs[t]`` is the
    log-probability of ``token_ids[t]`` given the tokens before it in its own sequence. The
    first token of a sequence has none, so `loss_mask` is False there.
    """

    token_ids: Int[Tensor, " tokens"]
    """int64."""

    positions: Int[Tensor, " tokens"]
    """int64, from 0 in each sequence."""

    cu_seqlens: Int[Tensor, " sequences_plus_1"]
    """int32: where each sequence begins, and the number of tokens last."""

    loss_mask: Bool[Tensor, " tokens"]
    """True on the tokens that the policy sampled and that the loss looks at."""

    advantages: Float[Tensor, " sequences"]
    """float32, one per sequence, in reward units."""

    rollout_logprobs: Float[Tensor, " tokens"]
    """float32, nats: what the sampler reported when it drew the token; 0 outside the mask."""

    proximal_logprobs: Float[Tensor, " tokens"] | None = None
    """float32, nats: recomputed by the trainer at the start of the step; None if not computed."""

    ref_logprobs: Float[Tensor, " tokens"] | None = None
    """float32, nats: under a frozen reference; None if there is none."""

    trajectory_ids: tuple[str, ...]
    """One per sequence, in order: leads a row back to its rollout."""

    routed_experts: Int[Tensor, "tokens layers top_k"] | None = None
    """int16: the experts that the sampler sent each token to, for router replay; -1 where it says
    none, as of the last token of a sequence. None if it did not report them."""

    images: PackedImages | None = None
    """What the prompts show; None if they are text alone."""

    def __post_init__(self) -> None:
        """Check shapes once, where data is made. Reads no tensor value, so never synchronises."""
        num_tokens = self.token_ids.shape[0]
        num_sequences = self.cu_seqlens.shape[0] - 1
        for name in (
            "positions",
            "loss_mask",
            "rollout_logprobs",
            "proximal_logprobs",
            "ref_logprobs",
        ):
            value: Tensor | None = getattr(self, name)
            if value is not None and tuple(value.shape) != (num_tokens,):
                message = (
                    f"PackedBatch: expected {name} of shape ({num_tokens},), one entry per token, "
                    f"got {tuple(value.shape)}"
                )
                raise ValueError(message)
        routes = self.routed_experts
        if routes is not None and (
            routes.ndim != 3  # noqa: PLR2004 - axes
            or routes.shape[0] != num_tokens
            or routes.dtype != torch.int16
        ):
            message = (
                f"PackedBatch: expected routed_experts of shape ({num_tokens}, layers, experts per "
                f"token) and type torch.int16, got {tuple(routes.shape)} and {routes.dtype}"
            )
            raise ValueError(message)
        if tuple(self.advantages.shape) != (num_sequences,):
            message = (
                f"PackedBatch: expected advantages of shape ({num_sequences},), one per sequence, "
                f"got {tuple(self.advantages.shape)}"
            )
            raise ValueError(message)
        if len(self.trajectory_ids) != num_sequences:
            message = (
                f"PackedBatch: expected one trajectory id per sequence, "
                f"got {len(self.trajectory_ids)} for {num_sequences} sequences"
            )
            raise ValueError(message)

    def to(self, device: torch.device) -> "PackedBatch":
        """The same batch with its tensors on `device`."""
        return PackedBatch(
            token_ids=self.token_ids.to(device),
            positions=self.positions.to(device),
            cu_seqlens=self.cu_seqlens.to(device),
            loss_mask=self.loss_mask.to(device),
            advantages=self.advantages.to(device),
            rollout_logprobs=self.rollout_logprobs.to(device),
            proximal_logprobs=_moved(self.proximal_logprobs, device),
            ref_logprobs=_moved(self.ref_logprobs, device),
            trajectory_ids=self.trajectory_ids,
            routed_experts=_moved(self.routed_experts, device),
            images=None if self.images is None else self.images.to(device),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOutput:
    """What a loss function returns for one micro-batch.

    Both parts are *sums divided by a global denominator* that was known before the first
    backward pass, so that adding them up over micro-batches and ranks gives the value of the
    whole batch, however it was split.
    """

    loss: Float[Tensor, ""]
    """Share of the loss; carries the gradient."""

    metrics: Mapping[str, Float[Tensor, ""]]
    """Detached shares of further means, added up like the loss."""


BatchT = TypeVar("BatchT", bound=TokenBatch)

LossFn = Callable[[Float[Tensor, " tokens"], BatchT], LossOutput]
"""A loss: `policy_logprobs` (0 outside the loss mask) and the batch in, `LossOutput` out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What one optimizer step did."""

    policy_version: PolicyVersion
    """Version of the weights after the step."""

    grad_norm: float
    """L2 norm of the whole gradient before clipping, over all ranks, replicas counted once."""


class TrainEngine(Protocol):
    """Owns the policy's weights and moves them one optimizer step at a time.

    With several ranks every rank holds an engine, every method is called on all of them in the
    same order, and each is given its own share of the micro-batches: the same number on each.
    """

    @property
    def policy_version(self) -> PolicyVersion:
        """Optimizer steps behind the present weights."""

    def logprobs(self, micro_batches: Sequence[BatchT]) -> list[Float[Tensor, " tokens"]]:
        """Log-probabilities of the given tokens under the present weights, without gradient.

        One float32 tensor per micro-batch, in the order given; 0 where `loss_mask` is False.

        Raises:
            ValueError: on every rank, if a rank was given another number of micro-batches, none, or
                a malformed one; names it (see `rl_contracts.batch_checks`).
        """

    def forward_backward(
        self, micro_batches: Sequence[BatchT], loss_fn: LossFn[BatchT]
    ) -> dict[str, float]:
        """Add the gradient of the loss, summed over micro-batches and ranks, to what is there.

        Moves no weight. Returns ``loss`` and the metrics of `loss_fn`, each summed over
        micro-batches and ranks.

        Raises:
            ValueError: on every rank, if a rank was given another number of micro-batches, none, or
                a malformed one, if `loss_fn` returned a loss without gradient for one that has
                tokens in its mask, or if its metrics differ; names it.
            FloatingPointError: on every rank, if the loss of a micro-batch is not finite; names its
                trajectories.
        """

    def optim_step(self) -> StepResult:
        """Clip, step, clear the gradient, and raise the policy version by one.

        Raises:
            FloatingPointError: if the gradient is not finite; the weights stay as they are.
        """

    def export_weights(self) -> Iterator[NamedTensor]:
        """All weights under their Hugging Face names, whole, one after the other.

        Every yielded tensor is the caller's own: it is not written to afterwards. On several
        ranks every rank must run the iterator to its end.
        """


class Checkpointable(Protocol):
    """Can put its whole state into a folder and take it back, bit for bit."""

    def save_checkpoint(self, folder: Path) -> None:
        """Write weights, optimizer, schedule, random states and version into a new folder."""

    def load_checkpoint(self, folder: Path) -> None:
        """Take all of it back."""


class PretrainedExporter(Protocol):
    """Can leave its model behind as others read it."""

    def save_pretrained(self, folder: Path) -> None:
        """Write a Hugging Face folder: weights as safetensors, configuration, tokenizer."""


class WeightSink(Protocol):
    """Anything that takes new weights: a sampler, a checkpoint writer, a test."""

    async def load_weights(self, weights: Iterable[NamedTensor], *, version: PolicyVersion) -> None:
        """Take the weights. After it returns, no later token is drawn from older ones.

        Raises:
            ValueError: for a name that the model lacks, a weight that is missing, or a shape
                that differs; the sampler then keeps answering with its old weights or refuses
                to answer, and never answers with half of each.
        """
