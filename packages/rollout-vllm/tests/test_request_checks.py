"""What is refused of a request, and how versions of tokens are counted; no vLLM."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from rl_contracts.rollout import PolicyVersion, SamplingParams
from rollout_vllm import RequestOptions, VllmConfig
from rollout_vllm.engine import Engine
from rollout_vllm.engine_seeds import seed_engine
from rollout_vllm.model_checks import check_model
from rollout_vllm.request_checks import check_params, checked_prompt
from rollout_vllm.token_versions import TokenVersions

V0, V1, V2 = PolicyVersion(0), PolicyVersion(1), PolicyVersion(2)
PLAIN = SamplingParams(max_new_tokens=8)
GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0)


class Limits:
    """The three numbers that the checks ask an engine for."""

    max_model_len = 16
    vocab_size = 96
    tied = False


ENGINE: Engine = Limits()  # type: ignore[assignment]  # what the checks use of one


def refused(
    params: SamplingParams, options: RequestOptions, text: str, *, samples: int = 1
) -> None:
    """The parameters are refused in these words."""
    with pytest.raises(ValueError, match=text):
        check_params(params, options, num_samples=samples, engine=ENGINE)


def test_options_without_effect_are_refused() -> None:
    """Each message names the option, its value and what to do."""
    refused(GREEDY, RequestOptions(top_k=5), r"top_k = 5 has no effect at temperature 0; leave")
    refused(PLAIN, RequestOptions(top_k=96), r"top_k = 96 .* the model knows 96 tokens")
    refused(PLAIN, RequestOptions(min_new_tokens=9), r"at most max_new_tokens = 8, got 9")
    check_params(PLAIN, RequestOptions(top_k=95, min_new_tokens=8), num_samples=1, engine=ENGINE)


def test_seeds_of_a_whole_group_must_exist() -> None:
    """Sample i has the seed seed + i; the last one of the group must fit too."""
    last = 2**63 - 4
    refused(
        SamplingParams(max_new_tokens=8, seed=last + 1),
        RequestOptions(),
        rf"from 0 to {last} \(sample i .* got {last + 1}",
        samples=4,
    )
    refused(SamplingParams(max_new_tokens=8, seed=-1), RequestOptions(), r"or None, got -1")
    check_params(
        SamplingParams(max_new_tokens=8, seed=last),
        RequestOptions(),
        num_samples=4,
        engine=ENGINE,
    )


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ([], r"prompt of 1 to 15 tokens .* got 0"),
        ([5] * 16, r"one token must fit behind it\), got 16"),
        ([5, 96], r"prompt_ids\[1\] is 96, the model knows the token ids 0 to 95"),
        ([5, -1], r"prompt_ids\[1\] is -1"),
    ],
)
def test_bad_prompts_are_refused(prompt: list[int], text: str) -> None:
    """Length and ids are checked before the engine hears of them."""
    with pytest.raises(ValueError, match=text):
        checked_prompt(prompt, engine=ENGINE)


def test_a_prompt_of_text_is_no_prompt() -> None:
    """Only whole numbers are token ids: no floats, no strings."""
    with pytest.raises(TypeError, match="float"):
        checked_prompt([5.0], engine=ENGINE)  # type: ignore[list-item]
    with pytest.raises(TypeError, match="str"):
        checked_prompt("text", engine=ENGINE)  # type: ignore[arg-type]


def test_tokens_belong_to_the_weights_that_drew_them() -> None:
    """Two updates at 3 and 4 tokens of one request, 6 in all."""
    versions = TokenVersions()
    versions.begin("a")
    versions.mark({"a": 3}, V1)
    versions.mark({"a": 4}, V2)
    assert versions.take("a", 6) == (0, 0, 0, 1, 2, 2)


def test_request_that_has_ended_belongs_to_the_old_weights() -> None:
    """Its outcome may be taken after an update that it did not see."""
    versions = TokenVersions()
    versions.begin("ended")
    versions.begin("waits")
    versions.mark({"waits": 0}, V1)
    versions.begin("later")
    assert versions.take("ended", 2) == (0, 0)
    assert versions.take("waits", 2) == (1, 1)
    assert versions.take("later", 1) == (1,)


def test_a_stream_learns_versions_as_it_goes() -> None:
    """What was taken before stays as it was."""
    versions = TokenVersions()
    versions.begin("a")
    assert versions.take("a", 2) == (0, 0)
    versions.mark({"a": 2}, V1)
    assert versions.take("a", 4) == (0, 0, 1, 1)
    versions.forget("a")
    versions.forget("a")
    versions.mark({}, V2)
    with pytest.raises(KeyError):
        versions.take("a", 1)


def write_config(folder: Path, **fields: object) -> str:
    """A model's folder with a config.json and nothing else."""
    (folder / "config.json").write_text(json.dumps(fields))
    return str(folder)


def gpu_config(model: str, *, size: int = 1) -> VllmConfig:
    """A config of a sampler whose experts are shared by `size` GPUs."""
    return VllmConfig(
        model=model,
        device="cuda",
        max_model_len=64,
        kv_cache_gib=1.0,
        tensor_parallel_size=size,
        expert_parallel_size=size,
    )


@pytest.mark.parametrize("field", ["num_experts", "n_routed_experts", "num_local_experts"])
def test_experts_are_shared_evenly(tmp_path: Path, field: str) -> None:
    """The size must divide the number in config.json, whatever the family calls it."""
    model = write_config(tmp_path, **{field: 8})
    check_model(gpu_config(model, size=4))
    with pytest.raises(ValueError, match=r"must divide the 8 experts of the model, got 3"):
        check_model(gpu_config(model, size=3))


def test_settings_of_experts_need_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a dense model they would be accepted and do nothing."""
    model = write_config(tmp_path, hidden_size=64)
    check_model(gpu_config(model))
    with pytest.raises(ValueError, match=r"expert_parallel_size = 2 has no effect: .* no experts"):
        check_model(gpu_config(model, size=2))
    monkeypatch.setattr("rollout_vllm.config.installed_version", lambda: "0.30.0")
    routed = VllmConfig(model=model, max_model_len=64, kv_cache_gib=1.0, return_routed_experts=True)
    with pytest.raises(ValueError, match=r"return_routed_experts = True has no effect"):
        check_model(routed)


def test_experts_of_a_text_part_are_found(tmp_path: Path) -> None:
    """Models that see keep them in text_config."""
    model = write_config(tmp_path, text_config={"num_experts": 6})
    with pytest.raises(ValueError, match=r"must divide the 6 experts of the model, got 4"):
        check_model(gpu_config(model, size=4))


def test_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    """The folder is named with what was expected."""
    with pytest.raises(ValueError, match=r"expected a local Hugging Face folder with a config.js"):
        check_model(gpu_config(str(tmp_path)))


def test_data_parallel_engines_draw_from_streams_of_their_own() -> None:
    """With one seed, the first samples of two engines would be the same; workers of one agree."""

    def drawn(seed: int, index: int) -> tuple[float, float, float]:
        seed_engine(seed, index=index)
        legacy = np.random.mtrand._rand  # the stream that vLLM draws request seeds from
        return random.random(), legacy.random_sample(), torch.rand(1).item()  # noqa: S311

    before = random.getstate(), np.random.mtrand._rand.get_state(), torch.get_rng_state()
    try:
        assert seed_engine(7, index=0) == 7
        first, second = drawn(7, 0), drawn(7, 1)
        assert all(left != right for left, right in zip(first, second, strict=True))
        assert drawn(7, 1) == second
        assert seed_engine(2**32 - 1, index=1) == 1_000_002  # numpy takes 32 bits
    finally:
        random.setstate(before[0])
        np.random.mtrand._rand.set_state(before[1])
        torch.set_rng_state(before[2])
