"""Speculative decoding: several tokens in one step of the model, of the same distribution."""

from typing import Literal

import attrs

SpeculationMethod = Literal["ngram"]

# vLLM checks so many guesses of a request in one step (MAX_SPEC_LEN in
# vllm/v1/sample/rejection_sampler.py, 0.23 to 0.32)
_MOST_TOKENS = 128

_at_least_one = attrs.validators.ge(1)


@attrs.frozen(kw_only=True)
class Speculation:
    """How next tokens are guessed, to be checked by the model all at once.

    A guess is kept with the probability that keeps the model's own distribution
    (https://arxiv.org/abs/2211.17192), so tokens and `rollout_logprobs` are those of the model;
    what changes is how many steps it takes. Guesses come from the request's own tokens, and so need
    no second model whose weights an update would have to reach.
    """

    num_speculative_tokens: int = attrs.field(
        validator=attrs.validators.and_(_at_least_one, attrs.validators.le(_MOST_TOKENS))
    )
    """Tokens guessed in each step of a request, at most."""

    method: SpeculationMethod = attrs.field(
        default="ngram", validator=attrs.validators.in_(("ngram",))
    )
    """What guesses: `ngram` looks for the last tokens in prompt and completion, and guesses what
    followed them there. Other methods of vLLM have weights of their own, which an update does not
    reach."""

    prompt_lookup_min: int = attrs.field(default=5, validator=_at_least_one)
    """Fewest last tokens that must be found again. Default: vLLM's own (0.32)."""

    prompt_lookup_max: int = attrs.field(default=5, validator=_at_least_one)
    """Most last tokens that are looked for; the longest that is found counts. Default: vLLM's own
    (0.32)."""

    def __attrs_post_init__(self) -> None:
        """Refuse bounds that no number of tokens is within."""
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"Speculation: expected prompt_lookup_min of at most prompt_lookup_max = "
                f"{self.prompt_lookup_max}, got {self.prompt_lookup_min}"
            )

    def as_argument(self) -> dict[str, object]:
        """What vLLM's `speculative_config` takes; it has our names."""
        return attrs.asdict(self)
