"""Checks of a real sampler on one device, against plain transformers; prints one line per check.

    python sampler_process.py MODE float32|bfloat16 FOLDER

MODE is a key of `MODES`. The exit status is 1 if a check failed. Makes its own tiny models, needs
no network.
"""

import asyncio
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import get_args

import attrs
import torch
from setting_checks import (
    MODES,
    distribution,
    guesses,
    streamed,
    with_adapter,
    with_overrides,
)
from transformers import (
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from rl_contracts.rollout import Completion, PolicyVersion, SamplingParams
from rollout_vllm import Dtype, RequestOptions, RoutedCompletion, VllmConfig, VllmSampler

VOCAB_SIZE = 96
EOS = 3
PROMPT = [5, 6, 7, 8, 9]
SIZES: dict[str, object] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}
# largest difference, nats; bfloat16 has 8 bits of mantissa, and the two add up in different orders
TOLERANCES: dict[Dtype, float] = {"float32": 2e-4, "float16": 2e-2, "bfloat16": 1.5e-1}
# Mean difference of a mixture of experts in bfloat16, where near ties send tokens to other experts:
# transformers in bfloat16 is 0.03 off transformers in float32 on these models, and 2 at most.
MEAN_TOLERANCE = 0.1


def make_model(folder: Path, *, seed: int, dtype: Dtype, experts: int = 0) -> PreTrainedModel:
    """A tiny random model, saved in the folder in the type that the sampler computes in."""
    torch.manual_seed(seed)
    model: PreTrainedModel
    if experts:
        moe = {
            "num_experts": experts,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
            "norm_topk_prob": True,
        }
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig.from_dict(SIZES | moe))
    else:
        model = Qwen3ForCausalLM(Qwen3Config.from_dict(SIZES | {"tie_word_embeddings": True}))
    model.requires_grad_(requires_grad=False).to(getattr(torch, dtype))
    model.save_pretrained(folder)
    return model


def checkpoint_weights(model: PreTrainedModel) -> list[tuple[str, torch.Tensor]]:
    """Weights on the CPU under the names of the checkpoint: experts one by one."""
    weights: list[tuple[str, torch.Tensor]] = []
    for name, tensor in model.named_parameters():
        value, stem = tensor.detach().cpu(), name.rpartition(".")[0]
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(value):
                gate, up = both.chunk(2)
                weights.append((f"{stem}.{expert}.gate_proj.weight", gate))
                weights.append((f"{stem}.{expert}.up_proj.weight", up))
        elif name.endswith("experts.down_proj"):
            weights += [(f"{stem}.{expert}.down_proj.weight", w) for expert, w in enumerate(value)]
        else:
            weights.append((name, value))
    return weights


def plain_logprobs(
    model: PreTrainedModel, completion: Completion, *, temperature: float
) -> torch.Tensor:
    """Logprobs of all tokens at each sampled place, by transformers."""
    ids = torch.tensor([[*PROMPT, *completion.token_ids]], device=model.device)
    logits = model(ids).logits[0, len(PROMPT) - 1 : -1].float() / temperature
    logprobs: torch.Tensor = logits.log_softmax(dim=-1).cpu()
    return logprobs


def mismatch(
    model: PreTrainedModel, completion: Completion, *, temperature: float = 1.0
) -> torch.Tensor:
    """Sampler's logprobs less those of transformers, token by token."""
    plain = plain_logprobs(model, completion, temperature=temperature)
    own = torch.tensor(completion.rollout_logprobs)
    return own - plain.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]


class Checks:
    """The checks of one sampler; each raises or returns what it measured."""

    def __init__(
        self,
        sampler: VllmSampler,
        model: PreTrainedModel,
        overrides: Mapping[str, object],
    ) -> None:
        self.sampler = sampler
        self.model = model
        self.overrides = overrides
        self.base = model

    def next_model(
        self, folder: Path, *, seed: int, dtype: Dtype
    ) -> tuple[PreTrainedModel, list[tuple[str, torch.Tensor]]]:
        """Another model, and the update that makes it of the sampler's."""
        lora = self.sampler._config.lora
        if lora is not None:
            return with_adapter(self.base, lora, seed=seed)
        experts = getattr(self.model.config, "num_experts", 0)
        made = make_model(folder / f"new{seed}", seed=seed, dtype=dtype, experts=experts)
        new = with_overrides(made, self.overrides)
        torch.nn.Module.to(new, self.model.device)
        return new, checkpoint_weights(new)

    def close(self, differences: list[torch.Tensor]) -> str:
        """Whether differences in nats are those of rounding."""
        off = torch.cat(differences).abs()
        mean, largest = off.mean().item(), off.max().item()
        if self.sampler.dtype == "bfloat16" and hasattr(self.model.config, "num_experts"):
            assert mean < MEAN_TOLERANCE, (mean, largest)
        else:
            assert largest < TOLERANCES[self.sampler.dtype], (mean, largest)
        return f"mean difference {mean:.2e}, largest {largest:.2e}"

    async def settings(self) -> str:
        """What the engine says that it runs."""
        reported = await self.sampler._engine.settings()
        names = (
            ("device", "device_type"),
            ("worker", "attention_backend"),
            ("scheduler", "max_num_seqs"),
            ("scheduler", "max_num_batched_tokens"),
            ("model", "enforce_eager"),
            ("cache", "enable_prefix_caching"),
            ("parallel", "distributed_executor_backend"),
        )
        return ", ".join(f"{key}={reported[part].get(key)}" for part, key in names)

    async def distinct(self) -> str:
        """No two samples of one prompt are the same, wherever they were drawn."""
        params = SamplingParams(max_new_tokens=24)
        groups = await asyncio.gather(
            *[self.sampler.sample(PROMPT, num_samples=1, params=params) for _ in range(32)]
        )
        drawn = {completion.token_ids for group in groups for completion in group}
        long = [ids for ids in drawn if len(ids) > 8]
        assert len(drawn) >= 28, f"{len(drawn)} of 32 differ"
        return f"{len(drawn)} of 32 differ, {len(long)} of them long"

    async def experts(self) -> str:
        """The router's decisions are those of transformers."""
        params = SamplingParams(max_new_tokens=24)
        same = total = 0
        for completion in await self.sampler.sample(PROMPT, num_samples=4, params=params):
            assert isinstance(completion, RoutedCompletion)
            ids = torch.tensor([[*PROMPT, *completion.token_ids]], device=self.model.device)
            logits = self.model(ids, output_router_logits=True).router_logits
            expected = torch.stack([layer.topk(2).indices[:-1] for layer in logits], dim=1)
            found = torch.tensor(completion.routed_experts.tolist()).sort(dim=-1).values
            assert found.shape == expected.shape, (found.shape, expected.shape)
            same += int((found == expected.cpu().sort(dim=-1).values).all(dim=-1).sum())
            total += found[..., 0].numel()
        assert same / total > 0.98, (same, total)  # ties fall either way
        return f"{same} of {total} choices are the same"

    async def logprobs(self) -> str:
        """Sampled tokens carry the logprobs of the tempered distribution."""
        differences = []
        for temperature in (1.0, 0.7):
            params = SamplingParams(max_new_tokens=24, temperature=temperature)
            for completion in await self.sampler.sample(PROMPT, num_samples=8, params=params):
                assert set(completion.policy_versions) == {self.sampler.policy_version}
                assert 1 <= len(completion.token_ids) <= 24
                differences.append(mismatch(self.model, completion, temperature=temperature))
        return self.close(differences)

    async def greedy(self) -> str:
        """Greedy tokens are the likeliest, up to rounding."""
        params = SamplingParams(max_new_tokens=16, temperature=0.0)
        (completion,) = await self.sampler.sample(PROMPT, num_samples=1, params=params)
        plain = plain_logprobs(self.model, completion, temperature=1.0)
        taken = plain.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        return self.close([plain.max(dim=-1).values - taken])

    async def top_k(self) -> str:
        """With top_k the logprobs are those of the k likeliest, renormalised."""
        params, options = SamplingParams(max_new_tokens=16), RequestOptions(top_k=4)
        differences = []
        for completion in await self.sampler.sample(
            PROMPT, num_samples=4, params=params, options=options
        ):
            likeliest = plain_logprobs(self.model, completion, temperature=1.0).topk(5).values
            off = mismatch(self.model, completion) + likeliest[:, :4].logsumexp(dim=-1)
            # where the fourth and the fifth are all but equal, rounding decides which is kept
            clear = likeliest[:, 3] - likeliest[:, 4] > TOLERANCES[self.sampler.dtype]
            differences.append(off[clear])
        return self.close(differences)

    async def stream(self) -> str:
        """The deltas joined are the completion."""
        params = SamplingParams(max_new_tokens=16, seed=7)
        (whole,) = await self.sampler.sample(PROMPT, num_samples=1, params=params)
        deltas = [delta async for delta in self.sampler.stream(PROMPT, params=params)]
        assert tuple(t for d in deltas for t in d.token_ids) == whole.token_ids
        assert deltas[-1].finish_reason == whole.finish_reason
        assert all(delta.finish_reason is None for delta in deltas[:-1])
        async with aclosing(self.sampler.stream(PROMPT, params=params)) as early:
            async for _ in early:
                break
        assert self.sampler.num_running == 0
        return f"{len(deltas)} deltas of {len(whole.token_ids)} tokens"

    async def deadline(self) -> str:
        """What a request has at its deadline comes back, with the reason abort."""
        params = SamplingParams(max_new_tokens=250)
        options = RequestOptions(deadline_s=0.1, min_new_tokens=250)
        cut = await self.sampler.sample(PROMPT, num_samples=8, params=params, options=options)
        assert {completion.finish_reason for completion in cut} == {"abort"}
        for completion in cut:
            if completion.token_ids:
                assert len(completion.rollout_logprobs) == len(completion.token_ids) < 250
        return f"{sum(len(c.token_ids) for c in cut)} tokens of 8 samples"

    async def bad_requests(self) -> str:
        """Wrong input is named and harms nobody."""
        params = SamplingParams(max_new_tokens=4)
        for prompt in ([], [5] * 256, [VOCAB_SIZE], [-1]):
            try:
                await self.sampler.sample(prompt, num_samples=1, params=params)
            except ValueError:
                continue
            raise AssertionError(prompt)
        return await self.greedy()

    async def many(self) -> str:
        """A thousand requests at once all come back."""
        params = SamplingParams(max_new_tokens=8)
        tasks = [
            self.sampler.sample([5 + i % 80], num_samples=2, params=params) for i in range(500)
        ]
        groups = await asyncio.gather(*tasks)
        assert all(len(group) == 2 and all(c.token_ids for c in group) for group in groups)
        return f"{sum(len(c.token_ids) for group in groups for c in group)} tokens"


async def update_in_flight(checks: Checks, folder: Path, *, dtype: Dtype) -> str:
    """Tokens of running requests carry the version of the weights that drew them."""
    new, weights = checks.next_model(folder, seed=1, dtype=dtype)
    sampler = checks.sampler
    params, options = SamplingParams(max_new_tokens=240), RequestOptions(min_new_tokens=240)
    tasks = [
        asyncio.create_task(sampler.sample(PROMPT, num_samples=4, params=params, options=options))
        for _ in range(8)
    ]
    await _tokens_drawn(sampler, 20)
    await sampler.load_weights(weights, version=PolicyVersion(1))
    mixed, differences = 0, []
    for task in tasks:
        for completion in await task:
            versions = torch.tensor(completion.policy_versions)
            assert versions.tolist() == sorted(versions.tolist())
            off = {0: _masked(checks.model, completion), 1: _masked(new, completion)}
            differences.append(torch.where(versions == 0, off[0], off[1]))
            mixed += len(set(versions.tolist())) == 2
    checks.model = new
    assert mixed, "no request was caught in flight"
    return f"{mixed} of 32 caught in flight, {checks.close(differences)}"


async def _tokens_drawn(sampler: VllmSampler, number: int) -> None:
    """Returns once another request has so many tokens."""
    params, options = SamplingParams(max_new_tokens=240), RequestOptions(min_new_tokens=240)
    drawn = 0
    async with aclosing(sampler.stream(PROMPT, params=params, options=options)) as deltas:
        async for delta in deltas:
            drawn += len(delta.token_ids)
            if drawn >= number:
                return


def _masked(model: PreTrainedModel, completion: Completion) -> torch.Tensor:
    """As `mismatch`, for requests whose end of sequence was ruled out."""
    plain = plain_logprobs(model, completion, temperature=1.0)
    plain[:, EOS] = -torch.inf
    plain = plain.log_softmax(dim=-1)
    own = torch.tensor(completion.rollout_logprobs)
    return own - plain.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]


async def report(title: str, check: Callable[[], Awaitable[str]]) -> bool:
    """Run one check and print its outcome; False if it failed."""
    try:
        line = f"ok      {title}: {await check()}"
    except Exception:  # noqa: BLE001  (printed and counted)
        line = f"FAILED  {title}: {traceback.format_exc(limit=-4)}"
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
    return line.startswith("ok")


async def run(mode: str, dtype: Dtype, folder: Path) -> int:
    """All checks; 1 if one failed."""
    plain = VllmConfig(
        model=str(folder / "model"), max_model_len=256, dtype=dtype, kv_cache_gib=0.125
    )
    config = attrs.evolve(plain, **MODES[mode])  # type: ignore[arg-type]  # checked by the config
    experts = 8 if mode.endswith("moe") else 0
    model = with_overrides(
        make_model(folder / "model", seed=0, dtype=dtype, experts=experts), config.hf_overrides
    )
    torch.backends.cuda.matmul.allow_tf32 = False
    async with await VllmSampler.start(config, policy_version=PolicyVersion(0)) as sampler:
        torch.nn.Module.to(model, config.device)
        checks = Checks(sampler, model, config.hf_overrides)
        named = [
            checks.settings,
            checks.logprobs,
            checks.greedy,
            checks.top_k,
            checks.distinct,
            checks.stream,
            checks.deadline,
            checks.bad_requests,
            checks.many,
        ]
        if config.return_routed_experts:
            named.append(checks.experts)
        outcomes = [await report(check.__name__, check) for check in named]

        async def updated() -> str:
            return await update_in_flight(checks, folder, dtype=dtype)

        outcomes += [await report("update in flight", updated)]
        outcomes += [await report("logprobs after the update", checks.logprobs)]
        if config.lora is not None:
            checks.model, weights = checks.next_model(folder, seed=2, dtype=dtype)
            await sampler.load_weights(weights, version=PolicyVersion(2))
            outcomes += [await report("logprobs after another adapter", checks.logprobs)]
        if config.speculation is not None:
            outcomes += [
                await report("guesses", lambda: guesses(sampler, PROMPT)),
                await report("distribution", lambda: distribution(sampler, checks.model, PROMPT)),
            ]
        if config.pipeline_parallel_size > 1:
            weights = checkpoint_weights(model)
            outcomes += [
                await report(
                    "streamed",
                    lambda: streamed(sampler, weights, num_receivers=config.num_devices),
                )
            ]
            checks.model = model
            outcomes += [await report("logprobs after the stream", checks.logprobs)]
    return 0 if all(outcomes) else 1


def main() -> int:
    """Read the arguments and run."""
    mode, dtype, folder = sys.argv[1:]
    assert mode in MODES, mode
    assert dtype in get_args(Dtype), dtype
    torch.set_grad_enabled(False)
    return asyncio.run(run(mode, dtype, Path(folder)))  # type: ignore[arg-type]


if __name__ == "__main__":
    raise SystemExit(main())
