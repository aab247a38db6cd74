"""The vLLM sampler shows the behaviour that `rl_contracts` asks of a sampler."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rl_contracts import PolicyVersion
from rl_contracts.testing import SAMPLER_CHECKS, SamplerUnderTest
from rl_contracts.train import NamedTensor
from rollout_vllm import VllmConfig, VllmSampler

VOCAB_SIZE = 64
MAX_MODEL_LEN = 48


def policy(seed: int) -> Qwen3ForCausalLM:
    """A random Qwen3 with clear preferences."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        eos_token_id=VOCAB_SIZE - 1,
        initializer_range=0.2,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    model.eval()
    return model


def weights(seed: int) -> list[NamedTensor]:
    """All weights under their Hugging Face names, the tied head left out."""
    named = policy(seed).state_dict()
    return [NamedTensor(name, tensor) for name, tensor in named.items() if "lm_head" not in name]


def logprobs(
    seed: int, prompt_ids: Sequence[int], completion_ids: Sequence[int], temperature: float
) -> list[float]:
    """What transformers makes of the same tokens."""
    ids = torch.tensor([[*prompt_ids, *completion_ids]])
    with torch.no_grad():
        logits = policy(seed)(input_ids=ids).logits[0].float() / temperature
    rows = torch.log_softmax(logits, dim=-1)[len(prompt_ids) - 1 : -1]
    return [row[token].item() for row, token in zip(rows, completion_ids, strict=True)]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each check said; one running sampler for all of them."""
    folder: Path = tmp_path_factory.mktemp("model")
    policy(1).save_pretrained(folder)
    config = VllmConfig(
        model=str(folder),
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=16,
        kv_cache_gib=0.25,
        cpu_threads=1,
    )

    async def run() -> dict[str, str]:
        found: dict[str, str] = {}
        sampler = await VllmSampler.start(config, policy_version=PolicyVersion(0))
        try:
            under_test = SamplerUnderTest(
                sampler=sampler,
                weights=weights,
                logprobs=logprobs,
                prompt_ids=(3, 5, 7, 11),
                max_model_len=MAX_MODEL_LEN,
            )
            for check in SAMPLER_CHECKS:
                try:
                    await check(under_test)
                except AssertionError as error:
                    found[check.__name__] = f"failed: {error}"
                else:
                    found[check.__name__] = "passed"
        finally:
            await sampler.close()
        return found

    return asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize("check", [check.__name__ for check in SAMPLER_CHECKS])
def test_vllm_sampler(outcomes: dict[str, str], check: str) -> None:
    """The sampler passes the check that the parameter names."""
    assert outcomes[check] == "passed"
