"""What is refused of a request before the engine hears of it."""

import operator
from collections.abc import Sequence

from rl_contracts.images import PromptImage, check_places
from rl_contracts.rollout import SamplingParams
from rollout_vllm.engine import Engine
from rollout_vllm.options import RequestOptions

# vLLM raises lower temperatures to this one (_MAX_TEMP in vllm/sampling_params.py, 0.23 to 0.32)
_LOWEST_TEMPERATURE = 0.01
# vLLM takes 64-bit seeds (torch.Generator.manual_seed)
_SEEDS = 2**63


def checked_prompt(prompt_ids: Sequence[int], *, engine: Engine) -> list[int]:
    """The prompt as a list of plain ints.

    Raises:
        ValueError: if it is empty, leaves no room for a token, or holds an unknown token id.
    """
    prompt = [operator.index(token) for token in prompt_ids]
    longest = engine.max_model_len - 1
    if not 1 <= len(prompt) <= longest:
        message = (
            f"sample: expected a prompt of 1 to {longest} tokens (max_model_len is "
            f"{engine.max_model_len}, and one token must fit behind it), got {len(prompt)}"
        )
        raise ValueError(message)
    _check_ids(prompt, "prompt_ids", engine=engine)
    return prompt


def check_images(prompt_ids: Sequence[int], images: Sequence[PromptImage], *, most: int) -> None:
    """Refuse images that vLLM would not show, or would show somewhere else.

    Args:
        prompt_ids: with every placeholder.
        images: in the order of their places.
        most: `VllmConfig.images_per_prompt`.

    Raises:
        ValueError: names the image.
    """
    if len(images) > most:
        message = (
            f"sample: expected at most {most} images (VllmConfig.images_per_prompt), got "
            f"{len(images)}"
        )
        raise ValueError(message)
    check_places("sample", images, num_tokens=len(prompt_ids))
    for number, image in enumerate(images):
        first = image.first_token
        placeholders = set(prompt_ids[first : first + image.num_tokens])
        if len(placeholders) > 1:
            message = (
                f"sample: image {number} stands at the tokens {first} to "
                f"{first + image.num_tokens - 1} of the prompt, expected one and the same "
                f"placeholder there, got the ids {sorted(placeholders)}"
            )
            raise ValueError(message)


def check_params(
    params: SamplingParams, options: RequestOptions, *, num_samples: int, engine: Engine
) -> None:
    """Refuse what vLLM would change, or what has no effect.

    Raises:
        ValueError: names the parameter, its value and what works.
    """
    if num_samples < 1:
        raise ValueError(f"sample: expected num_samples of 1 or more, got {num_samples}")
    _check_ids(params.stop_token_ids, "stop_token_ids", engine=engine)
    if 0.0 < params.temperature < _LOWEST_TEMPERATURE:
        message = (
            f"sample: vLLM raises temperature {params.temperature} to {_LOWEST_TEMPERATURE}; "
            "give 0 for greedy tokens"
        )
        raise ValueError(message)
    if params.temperature == 0.0 and params.top_p != 1.0:
        message = f"sample: top_p = {params.top_p} has no effect at temperature 0; give top_p = 1"
        raise ValueError(message)
    if params.seed is not None and not 0 <= params.seed <= _SEEDS - num_samples:
        message = (
            f"sample: expected a seed from 0 to {_SEEDS - num_samples} (sample i of a group has "
            f"the seed seed + i), or None, got {params.seed}"
        )
        raise ValueError(message)
    options.check(params, vocab_size=engine.vocab_size)


def _check_ids(token_ids: Sequence[int], name: str, *, engine: Engine) -> None:
    vocab_size = engine.vocab_size
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return
    place, token = next(
        (place, token) for place, token in enumerate(token_ids) if not 0 <= token < vocab_size
    )
    message = (
        f"sample: {name}[{place}] is {token}, the model knows the token ids 0 to {vocab_size - 1}"
    )
    raise ValueError(message)
