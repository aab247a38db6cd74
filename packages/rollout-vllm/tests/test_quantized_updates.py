"""A quantised engine that took new weights is the one that would have started with them."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from rl_contracts.rollout import Completion, PolicyVersion, SamplingParams
from rollout_vllm import VllmConfig, VllmSampler
from rollout_vllm.versions import installed_version

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (installed_version() or "").startswith("0.32."),
        reason="other versions have not been shown to quantise on the CPU",
    ),
]
PROMPTS = ([5, 6, 7, 8, 9], [20, 21], [40] * 9)


def saved_model(folder: Path, *, seed: int) -> PreTrainedModel:
    """A tiny random model in bfloat16, saved in the folder."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=96,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.1,
        bos_token_id=1,
        eos_token_id=3,
        pad_token_id=0,
    )
    model: PreTrainedModel = Qwen3ForCausalLM(config)
    model.requires_grad_(requires_grad=False)
    torch.nn.Module.to(model, torch.bfloat16)
    model.save_pretrained(folder)
    return model


async def greedy(sampler: VllmSampler) -> list[Completion]:
    """The likeliest completion of each prompt, with its logprobs."""
    params = SamplingParams(max_new_tokens=24, temperature=0.0)
    return [(await sampler.sample(prompt, num_samples=1, params=params))[0] for prompt in PROMPTS]


def outcome(completions: Sequence[Completion]) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    """What must be the same, whatever the version is called."""
    return [(one.token_ids, one.rollout_logprobs) for one in completions]


def test_updated_weights_are_quantised_as_the_files_are(tmp_path: Path) -> None:
    """Bit for bit: to other weights, back, and again; and quantised they differ from plain ones."""
    first, second = (saved_model(tmp_path / str(seed), seed=seed) for seed in (0, 1))

    def config(seed: int, **changes: object) -> VllmConfig:
        settings: dict[str, object] = {"quantization": "fp8_per_channel"}
        return VllmConfig(
            model=str(tmp_path / str(seed)),
            max_model_len=64,
            kv_cache_gib=0.125,
            max_num_seqs=8,
            cpu_threads=1,
            **(settings | changes),  # type: ignore[arg-type]
        )

    async def updated() -> list[list[Completion]]:
        async with await VllmSampler.start(config(0), policy_version=PolicyVersion(0)) as sampler:
            found = [await greedy(sampler)]
            for version, model in enumerate((second, first, second), start=1):
                weights = [(name, tensor) for name, tensor in model.named_parameters()]
                await sampler.load_weights(weights, version=PolicyVersion(version))
                found.append(await greedy(sampler))
        return found

    async def started(changed: VllmConfig) -> list[Completion]:
        async with await VllmSampler.start(changed, policy_version=PolicyVersion(0)) as sampler:
            return await greedy(sampler)

    found = [outcome(completions) for completions in asyncio.run(updated())]
    fresh = outcome(asyncio.run(started(config(1))))
    plain = outcome(asyncio.run(started(config(1, quantization=None))))
    assert found[1] == found[3] == fresh
    assert found[2] == found[0] != fresh
    assert plain != fresh
