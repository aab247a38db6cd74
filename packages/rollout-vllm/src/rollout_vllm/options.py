"""What vLLM offers for one request beyond `rl_contracts.rollout.SamplingParams`."""

from dataclasses import dataclass

import attrs

from rl_contracts.rollout import FinishReason, PolicyVersion, SamplingParams


@attrs.frozen(kw_only=True)
class RequestOptions:
    """Options of one call; the defaults change nothing."""

    top_k: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(attrs.validators.ge(1))
    )
    """Draw from the likeliest `top_k` tokens only; None: from all.

    For evaluation, as `SamplingParams.top_p` below 1 is: `rollout_logprobs` are then those of the
    renormalised distribution, so a trainer's ratio to its plain logprobs is off by the mass kept
    (verl issue 6240)."""

    min_new_tokens: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    """Tokens before which no stop token may be drawn. Default: a completion may end at once.

    Until then `rollout_logprobs` are those of the distribution without the stop tokens."""

    deadline_s: float | None = attrs.field(
        default=None, validator=attrs.validators.optional(attrs.validators.gt(0.0))
    )
    """Seconds after which running samples are aborted; None: no limit.

    What they have until then is returned, with the finish reason `abort`; samples that ended
    before keep theirs."""

    def check(self, params: SamplingParams, *, vocab_size: int) -> None:
        """Refuse what would have no effect together with these parameters.

        Raises:
            ValueError: names the option, its value and what to do.
        """
        if self.min_new_tokens > params.max_new_tokens:
            message = (
                f"RequestOptions: expected min_new_tokens of at most max_new_tokens = "
                f"{params.max_new_tokens}, got {self.min_new_tokens}"
            )
            raise ValueError(message)
        if self.top_k is None:
            return
        if params.temperature == 0.0:
            message = (
                f"RequestOptions: top_k = {self.top_k} has no effect at temperature 0; leave it out"
            )
            raise ValueError(message)
        if self.top_k >= vocab_size:
            message = (
                f"RequestOptions: top_k = {self.top_k} has no effect: the model knows {vocab_size} "
                "tokens; leave it out"
            )
            raise ValueError(message)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenDelta:
    """Tokens that were drawn since the last delta of a stream; entries as in `Completion`."""

    token_ids: tuple[int, ...]
    """Sampled token ids; may be empty in the last delta."""

    rollout_logprobs: tuple[float, ...]
    """Log-probability, in nats, that the sampler gave each token when it drew it."""

    policy_versions: tuple[PolicyVersion, ...]
    """Version of the weights that each token was drawn from."""

    finish_reason: FinishReason | None
    """Why the completion ended; None on every delta but the last."""
