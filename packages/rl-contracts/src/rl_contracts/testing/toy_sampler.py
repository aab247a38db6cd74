"""A sampler whose policy is the table of `ToyEngine`."""

import asyncio
from collections.abc import Iterable, Sequence
from typing import final

import torch
from torch import Tensor

from rl_contracts.images import PromptImage
from rl_contracts.rollout import Completion, FinishReason, PolicyVersion, SamplingParams
from rl_contracts.testing.toy_engine import WEIGHT_NAME, toy_weights
from rl_contracts.train import NamedTensor


@final
class ToySampler:
    """A `Sampler` and `WeightSink` in plain torch.

    Args:
        vocab_size: number of tokens.
        max_model_len: longest prompt and completion together, in tokens.
        seed: of the first table and of the draws.
    """

    def __init__(self, *, vocab_size: int, max_model_len: int = 64, seed: int = 0) -> None:
        self._table = toy_weights(vocab_size, seed=seed)
        self._max_model_len = max_model_len
        self._generator = torch.Generator().manual_seed(seed)
        self._version = PolicyVersion(0)

    @property
    def policy_version(self) -> PolicyVersion:
        """Version of the weights that the next token will be drawn from."""
        return self._version

    async def sample(
        self,
        prompt_ids: Sequence[int],
        *,
        num_samples: int,
        params: SamplingParams,
        images: Sequence[PromptImage] = (),
    ) -> list[Completion]:
        """See `Sampler.sample`."""
        if images:
            raise ValueError(f"expected a prompt without images, got {len(images)}")
        if not prompt_ids:
            raise ValueError("expected a prompt of at least one token, got 0")
        if len(prompt_ids) >= self._max_model_len:
            raise ValueError(
                f"expected a prompt shorter than max_model_len {self._max_model_len}, "
                f"got {len(prompt_ids)} tokens"
            )
        if num_samples < 1:
            raise ValueError(f"expected num_samples of at least 1, got {num_samples}")
        generator = self._generator
        if params.seed is not None:
            generator = torch.Generator().manual_seed(params.seed)
        return [await self._complete(prompt_ids, params, generator) for _ in range(num_samples)]

    async def _complete(
        self, prompt_ids: Sequence[int], params: SamplingParams, generator: torch.Generator
    ) -> Completion:
        token_ids: list[int] = []
        logprobs: list[float] = []
        versions: list[PolicyVersion] = []
        finish_reason: FinishReason = "length"
        room = min(params.max_new_tokens, self._max_model_len - len(prompt_ids))
        while len(token_ids) < room:
            await asyncio.sleep(0)  # a place to be cancelled at, and to take new weights at
            previous = token_ids[-1] if token_ids else prompt_ids[-1]
            distribution = _distribution(self._table[previous], params)
            if params.temperature == 0.0:
                token = int(distribution.argmax())
            else:
                token = int(torch.multinomial(distribution, 1, generator=generator))
            token_ids.append(token)
            logprobs.append(float(distribution[token].log()))
            versions.append(self._version)
            if token in params.stop_token_ids:
                finish_reason = "stop"
                break
        return Completion(
            token_ids=tuple(token_ids),
            rollout_logprobs=tuple(logprobs),
            policy_versions=tuple(versions),
            finish_reason=finish_reason,
        )

    async def load_weights(self, weights: Iterable[NamedTensor], *, version: PolicyVersion) -> None:
        """See `WeightSink.load_weights`."""
        given = {weight.name: weight.tensor for weight in weights}
        if set(given) != {WEIGHT_NAME}:
            raise ValueError(f"expected the weight {WEIGHT_NAME!r} alone, got {sorted(given)}")
        table = given[WEIGHT_NAME]
        if table.shape != self._table.shape:
            raise ValueError(
                f"{WEIGHT_NAME}: expected shape {tuple(self._table.shape)}, "
                f"got {tuple(table.shape)}"
            )
        self._table = table.detach().clone()
        self._version = version


def _distribution(logits: Tensor, params: SamplingParams) -> Tensor:
    """Probabilities after temperature and top-p; greedy ones are the untempered policy's."""
    tempered = logits if params.temperature == 0.0 else logits / params.temperature
    probabilities = torch.softmax(tempered.double(), dim=-1)
    ordered, order = probabilities.sort(descending=True)
    # A token stays if the mass before it is below top_p; the first always stays.
    kept = (ordered.cumsum(-1) - ordered) < params.top_p
    masked = torch.zeros_like(probabilities).scatter(-1, order, torch.where(kept, ordered, 0.0))
    return masked / masked.sum()
