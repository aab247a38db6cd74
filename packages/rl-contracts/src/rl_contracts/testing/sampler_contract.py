"""What every `Sampler` that is a `WeightSink` must do, as plain coroutine functions.

The checks share one running sampler, since starting a real one takes a while; each leaves the
weights it loaded behind and assumes nothing of those it finds.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rl_contracts.rollout import Completion, PolicyVersion, Sampler, SamplingParams
from rl_contracts.train import NamedTensor, WeightSink


class TrainableSampler(Sampler, WeightSink, Protocol):
    """A sampler that takes new weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerUnderTest:
    """A running sampler and the means to check what it says."""

    sampler: TrainableSampler
    """The sampler; its weights may be replaced by the checks."""

    weights: Callable[[int], list[NamedTensor]]
    """Complete weights made from a seed; different seeds give clearly different policies."""

    logprobs: Callable[[int, Sequence[int], Sequence[int], float], Sequence[float]]
    """(seed, prompt ids, completion ids, temperature) to the logprobs that an independent
    implementation gives under `weights(seed)`."""

    prompt_ids: tuple[int, ...]
    """A prompt of at least two tokens that the sampler accepts."""

    max_model_len: int
    """Longest prompt and completion together, in tokens."""

    tolerance: float = 1e-4
    """Largest difference, in nats, between the sampler's logprobs and the independent ones."""


def _params(*, temperature: float = 1.0, seed: int | None = None) -> SamplingParams:
    return SamplingParams(max_new_tokens=8, temperature=temperature, seed=seed)


async def _load(under_test: SamplerUnderTest, seed: int) -> PolicyVersion:
    version = PolicyVersion(under_test.sampler.policy_version + 1)
    await under_test.sampler.load_weights(under_test.weights(seed), version=version)
    return version


def _assert_logprobs(
    under_test: SamplerUnderTest, completion: Completion, seed: int, temperature: float
) -> None:
    expected = under_test.logprobs(seed, under_test.prompt_ids, completion.token_ids, temperature)
    difference = torch.tensor(completion.rollout_logprobs) - torch.tensor(list(expected))
    assert difference.abs().max().item() <= under_test.tolerance, (
        f"sampler's logprobs differ by up to {difference.abs().max().item()} nats"
    )


def _assert_logprobs_by_version(
    under_test: SamplerUnderTest, completion: Completion, seeds: Mapping[PolicyVersion, int]
) -> None:
    expected = {
        version: under_test.logprobs(seed, under_test.prompt_ids, completion.token_ids, 1.0)
        for version, seed in seeds.items()
    }
    for place, version in enumerate(completion.policy_versions):
        difference = abs(completion.rollout_logprobs[place] - expected[version][place])
        assert difference <= under_test.tolerance, (
            f"token {place} is said to be of version {version}, whose logprob differs by "
            f"{difference} nats"
        )


async def check_logprobs_are_the_policys(under_test: SamplerUnderTest) -> None:
    """Logprobs are those of the distribution that the tokens were drawn from."""
    await _load(under_test, 1)
    for temperature in (1.0, 0.7):
        completions = await under_test.sampler.sample(
            under_test.prompt_ids, num_samples=3, params=_params(temperature=temperature)
        )
        assert len(completions) == 3
        for completion in completions:
            assert 1 <= len(completion.token_ids) <= 8
            _assert_logprobs(under_test, completion, 1, temperature)


async def check_new_weights_are_used_at_once(under_test: SamplerUnderTest) -> None:
    """After `load_weights` returns every token comes from, and is labelled with, the new ones."""
    for seed in (2, 3):
        version = await _load(under_test, seed)
        assert under_test.sampler.policy_version == version
        (completion,) = await under_test.sampler.sample(
            under_test.prompt_ids, num_samples=1, params=_params()
        )
        assert set(completion.policy_versions) == {version}
        _assert_logprobs(under_test, completion, seed, 1.0)


async def check_versions_rise_through_an_update(under_test: SamplerUnderTest) -> None:
    """Requests that run through an update say which tokens came from which weights.

    Each token keeps the logprob of the weights that drew it, given the whole prefix.
    """
    seeds = {await _load(under_test, 1): 1}
    running = [
        asyncio.ensure_future(
            under_test.sampler.sample(under_test.prompt_ids, num_samples=2, params=_params())
        )
        for _ in range(4)
    ]
    await asyncio.sleep(0)
    seeds[await _load(under_test, 2)] = 2
    for completions in await asyncio.gather(*running):
        for completion in completions:
            assert set(completion.policy_versions) <= set(seeds)
            _assert_logprobs_by_version(under_test, completion, seeds)


async def check_greedy_repeats_itself(under_test: SamplerUnderTest) -> None:
    """Temperature 0 always takes the same tokens."""
    await _load(under_test, 1)
    answers = {
        completion.token_ids
        for _ in range(2)
        for completion in await under_test.sampler.sample(
            under_test.prompt_ids, num_samples=2, params=_params(temperature=0.0)
        )
    }
    assert len(answers) == 1


async def check_stop_tokens_end_a_completion(under_test: SamplerUnderTest) -> None:
    """A stop token ends the completion, is part of it, and the reason says so."""
    await _load(under_test, 1)
    (free,) = await under_test.sampler.sample(
        under_test.prompt_ids, num_samples=1, params=_params(temperature=0.0)
    )
    stop = free.token_ids[min(2, len(free.token_ids) - 1)]
    params = SamplingParams(max_new_tokens=8, temperature=0.0, stop_token_ids=(stop,))
    (stopped,) = await under_test.sampler.sample(
        under_test.prompt_ids, num_samples=1, params=params
    )
    expected = free.token_ids[: free.token_ids.index(stop) + 1]
    assert stopped.token_ids == expected
    assert stopped.finish_reason == "stop"


async def check_bad_requests_are_refused(under_test: SamplerUnderTest) -> None:
    """An empty or overlong prompt and a count below one are errors, and break nothing."""
    await _load(under_test, 1)
    overlong = under_test.prompt_ids[:1] * under_test.max_model_len
    for prompt_ids, num_samples, wanted in (
        ((), 1, "got 0"),
        (overlong, 1, str(under_test.max_model_len)),
        (under_test.prompt_ids, 0, "num_samples"),
    ):
        try:
            await under_test.sampler.sample(prompt_ids, num_samples=num_samples, params=_params())
        except ValueError as error:
            assert wanted in str(error), str(error)
        else:
            raise AssertionError(f"expected ValueError about {wanted!r}")
    await under_test.sampler.sample(under_test.prompt_ids, num_samples=1, params=_params())


async def check_wrong_weights_are_refused(under_test: SamplerUnderTest) -> None:
    """A missing, unknown or misshapen weight is refused; the old policy goes on answering."""
    version = await _load(under_test, 1)
    right = under_test.weights(2)
    first = right[0]
    wrong_sets: list[list[NamedTensor]] = [
        right[1:],
        [*right, NamedTensor("no.such.weight", first.tensor)],
        [NamedTensor(first.name, _one_longer(first.tensor)), *right[1:]],
    ]
    for wrong in wrong_sets:
        try:
            await under_test.sampler.load_weights(wrong, version=PolicyVersion(version + 1))
        except ValueError:
            pass
        else:
            raise AssertionError("expected ValueError for wrong weights")
    assert under_test.sampler.policy_version == version
    (completion,) = await under_test.sampler.sample(
        under_test.prompt_ids, num_samples=1, params=_params()
    )
    _assert_logprobs(under_test, completion, 1, 1.0)


def _one_longer(tensor: Tensor) -> Tensor:
    return torch.cat([tensor, tensor[:1]])


async def check_cancelling_frees_the_place(under_test: SamplerUnderTest) -> None:
    """A cancelled request leaves a sampler that answers as before."""
    await _load(under_test, 1)
    task = asyncio.ensure_future(
        under_test.sampler.sample(under_test.prompt_ids, num_samples=2, params=_params())
    )
    await asyncio.sleep(0)
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        pass
    else:
        raise AssertionError("expected the cancelled request to raise CancelledError")
    (completion,) = await under_test.sampler.sample(
        under_test.prompt_ids, num_samples=1, params=_params()
    )
    _assert_logprobs(under_test, completion, 1, 1.0)


SamplerCheck = Callable[[SamplerUnderTest], Awaitable[None]]

SAMPLER_CHECKS: tuple[SamplerCheck, ...] = (
    check_logprobs_are_the_policys,
    check_new_weights_are_used_at_once,
    check_versions_rise_through_an_update,
    check_greedy_repeats_itself,
    check_stop_tokens_end_a_completion,
    check_bad_requests_are_refused,
    check_wrong_weights_are_refused,
    check_cancelling_frees_the_place,
)
