"""The rollout half of the contracts: what a sampler returns and what may be asked of it.

Knows nothing of torch, of an engine or of vLLM.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NewType, Protocol, runtime_checkable

import attrs

from rl_contracts.finite import finite

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from rl_contracts.images import ImagePatches, PromptImage

PolicyVersion = NewType("PolicyVersion", int)
"""Number of optimizer steps behind a set of weights, from 0."""

FinishReason = Literal["stop", "length", "abort"]
"""Why a completion ended: the model ended it, a length limit cut it, or the caller aborted it."""


@attrs.frozen(kw_only=True)
class SamplingParams:
    """How tokens are drawn; the distribution that `rollout_logprobs` refer to."""

    max_new_tokens: int = attrs.field(validator=attrs.validators.ge(1))
    """Longest completion, in tokens."""

    temperature: float = attrs.field(default=1.0, validator=[finite, attrs.validators.ge(0.0)])
    """Divides the logits, 0 means greedy. Default: the policy itself, untempered."""

    top_p: float = attrs.field(
        default=1.0, validator=[finite, attrs.validators.gt(0.0), attrs.validators.le(1.0)]
    )
    """Probability mass kept (nucleus sampling). Default: all of it.

    Below 1 is for evaluation: `rollout_logprobs` are then those of the renormalised distribution,
    so a trainer's ratio to its plain logprobs is off by the mass kept (verl issue 6240)."""

    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a completion, beside the model's own end of sequence."""

    seed: int | None = None
    """Seed of this request; None draws from the sampler's own stream."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """Tokens sampled for one prompt, with what is needed to train on them later."""

    token_ids: tuple[int, ...]
    """Sampled token ids, prompt excluded, the stop token included."""

    rollout_logprobs: tuple[float, ...]
    """Log-probability, in nats, that the sampler gave each token when it drew it."""

    policy_versions: tuple[PolicyVersion, ...]
    """Version of the weights that each token was drawn from; never falls along the tokens."""

    finish_reason: FinishReason
    """Why it ended. Only `stop` means that the model ended it by itself."""

    def __post_init__(self) -> None:
        """Check that the three sequences belong together."""
        num_tokens = len(self.token_ids)
        for name in ("rollout_logprobs", "policy_versions"):
            if len(getattr(self, name)) != num_tokens:
                message = (
                    f"Completion: expected one entry of {name} per token, "
                    f"got {len(getattr(self, name))} for {num_tokens} tokens"
                )
                raise ValueError(message)
        for earlier, later in zip(self.policy_versions, self.policy_versions[1:], strict=False):
            if later < earlier:
                message = (
                    "Completion: policy_versions must not fall along the tokens, "
                    f"got {later} after {earlier}"
                )
                raise ValueError(message)


@runtime_checkable
class Routed(Protocol):
    """A completion of a mixture of experts that says where its tokens went."""

    @property
    def routed_experts(self) -> "npt.NDArray[np.integer[Any]]":
        """Of prompt and completion, ``[positions, layers, experts per token]``.

        All but the last token, which was never the input of a step.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """The token record of one rollout, as trained on: prompt and sampled tokens in one row.

    Build one with `Trajectory.from_completion`; rewards and advantages are the caller's.
    """

    trajectory_id: str
    """Unique within a run; leads from a packed row back to its rollout."""

    group_id: str
    """Shared by the samples of one prompt, which share a baseline."""

    token_ids: tuple[int, ...]
    """All tokens, the prompt first: the sampled ids themselves, never text tokenised again."""

    loss_mask: tuple[bool, ...]
    """True on the tokens that the policy sampled."""

    rollout_logprobs: tuple[float, ...]
    """Sampler's log-probability of each token, in nats; 0.0 where `loss_mask` is False."""

    oldest_version: PolicyVersion
    """Oldest policy version that a token of this trajectory was drawn from."""

    newest_version: PolicyVersion
    """Newest policy version that a token of this trajectory was drawn from."""

    routed_experts: "npt.NDArray[np.integer[Any]] | None" = field(
        default=None, compare=False, repr=False
    )
    """``[tokens - 1, layers, experts per token]``: the sampler's experts of every token but the
    last, for router replay; None if it did not report them."""

    images: "tuple[ImagePatches, ...]" = field(default=(), compare=False, repr=False)
    """Of the prompt, in the order of their places; the completions of one prompt share them."""

    def __post_init__(self) -> None:
        """Check that the per-token sequences belong together."""
        num_tokens = len(self.token_ids)
        for name in ("loss_mask", "rollout_logprobs"):
            if len(getattr(self, name)) != num_tokens:
                message = (
                    f"Trajectory {self.trajectory_id}: expected one entry of {name} per token, "
                    f"got {len(getattr(self, name))} for {num_tokens} tokens"
                )
                raise ValueError(message)
        routes = self.routed_experts
        if routes is not None and (routes.ndim != 3 or routes.shape[0] != num_tokens - 1):  # noqa: PLR2004
            message = (
                f"Trajectory {self.trajectory_id}: expected routed_experts of shape "
                f"({num_tokens - 1}, layers, experts per token), those of all tokens but the last, "
                f"got {routes.shape}"
            )
            raise ValueError(message)
        if self.loss_mask and self.loss_mask[0]:
            message = (
                f"Trajectory {self.trajectory_id}: loss_mask is True on the first token, "
                "whose log-probability has no prefix to be conditioned on; give a prompt of at "
                "least one token"
            )
            raise ValueError(message)
        if self.oldest_version > self.newest_version:
            message = (
                f"Trajectory {self.trajectory_id}: oldest_version {self.oldest_version} is above "
                f"newest_version {self.newest_version}"
            )
            raise ValueError(message)
        if self.images:
            from rl_contracts.images import check_trajectory_images  # noqa: PLC0415 - needs numpy

            check_trajectory_images(self)

    @classmethod
    def from_completion(
        cls,
        prompt_ids: Sequence[int],
        completion: Completion,
        *,
        trajectory_id: str,
        group_id: str,
        images: "tuple[ImagePatches, ...]" = (),
    ) -> "Trajectory":
        """Join a prompt and one completion of it, with its routes if it is `Routed`.

        `images` are those of the prompt; they are not copied.

        Raises:
            ValueError: if the prompt or the completion is empty, or an image lies outside of the
                prompt.
        """
        if not prompt_ids or not completion.token_ids:
            message = (
                f"Trajectory {trajectory_id}: expected a prompt and a completion of at least one "
                f"token each, got {len(prompt_ids)} and {len(completion.token_ids)}"
            )
            raise ValueError(message)
        num_prompt = len(prompt_ids)
        return cls(
            trajectory_id=trajectory_id,
            group_id=group_id,
            token_ids=(*prompt_ids, *completion.token_ids),
            loss_mask=(False,) * num_prompt + (True,) * len(completion.token_ids),
            rollout_logprobs=(0.0,) * num_prompt + completion.rollout_logprobs,
            oldest_version=completion.policy_versions[0],
            newest_version=completion.policy_versions[-1],
            routed_experts=completion.routed_experts if isinstance(completion, Routed) else None,
            images=images,
        )


@runtime_checkable
class Sampler(Protocol):
    """Draws completions from the policy that it was last given."""

    @property
    def policy_version(self) -> PolicyVersion:
        """Version of the weights that the next token will be drawn from."""

    async def sample(
        self,
        prompt_ids: Sequence[int],
        *,
        num_samples: int,
        params: SamplingParams,
        images: "Sequence[PromptImage]" = (),
    ) -> list[Completion]:
        """Draw `num_samples` completions of one prompt.

        Cancelling the awaiting task frees the requests' places in the sampler.

        Args:
            prompt_ids: the prompt, every placeholder of an image included.
            num_samples: how many.
            params: how they are drawn.
            images: what stands at the placeholders; only for a sampler of a model that sees.

        Raises:
            ValueError: for an empty prompt, a prompt that leaves no room for a token,
                `num_samples` below 1, or images that the sampler cannot show; the message holds
                the numbers.
        """
