"""The settings that `sampler_process.py` runs with, and the checks that single ones need."""

import asyncio
import copy
import math
from collections.abc import Mapping, Sequence
from typing import get_args

import torch
from transformers import PreTrainedModel

from rl_contracts.rollout import Completion, PolicyVersion, SamplingParams
from rollout_vllm import Lora, RequestOptions, Speculation, VllmSampler
from rollout_vllm.torch_headers import tensor_headers
from rollout_vllm.weights_stream import Carriage, WeightStream

YARN: dict[str, object] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
# a rank below vLLM's next, all of one layer that vLLM computes as one, and a part of another
LORA = Lora(
    rank=12,
    alpha=18.0,
    target_modules=("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"),
)
# what differs from the plain config
MODES: dict[str, dict[str, object]] = {
    "cpu": {"cpu_threads": 1},
    "cuda": {"device": "cuda", "engine_args": {"max_cudagraph_capture_size": 64}},
    "cuda-eager": {"device": "cuda", "enforce_eager": True},
    "cpu-routed-moe": {"cpu_threads": 1, "return_routed_experts": True},
    "cpu-guesses": {
        "cpu_threads": 1,
        "speculation": Speculation(
            num_speculative_tokens=3, prompt_lookup_min=1, prompt_lookup_max=3
        ),
    },
    "cpu-pp2": {"cpu_threads": 1, "pipeline_parallel_size": 2},
    "cpu-pp2-moe": {"cpu_threads": 1, "pipeline_parallel_size": 2},
    "cpu-yarn": {"cpu_threads": 1, "hf_overrides": {"rope_parameters": YARN}},
    "cpu-lora": {"cpu_threads": 1, "lora": LORA},
    "cuda-lora": {"device": "cuda", "lora": LORA},
    "cuda-moe": {"device": "cuda", "enforce_eager": True},
    "cuda-tp2": {"device": "cuda", "enforce_eager": True, "tensor_parallel_size": 2},
    "cuda-dp2": {"device": "cuda", "enforce_eager": True, "data_parallel_size": 2},
    "cuda-ep2-moe": {
        "device": "cuda",
        "enforce_eager": True,
        "tensor_parallel_size": 2,
        "expert_parallel_size": 2,
    },
}
# Kolmogorov's bound that a right sampler passes in all but one of a million runs
_BOUND = math.sqrt(-math.log(1e-6 / 2) / 2)


def with_overrides(model: PreTrainedModel, overrides: Mapping[str, object]) -> PreTrainedModel:
    """The same weights in a model whose config.json says something else."""
    if not overrides:
        return model
    config = type(model.config).from_dict({**model.config.to_dict(), **overrides})
    other = type(model)(config)
    other.load_state_dict(model.state_dict())
    other.requires_grad_(requires_grad=False)
    torch.nn.Module.to(other, model.dtype)
    return other


class _Adapted(torch.nn.Module):
    """A linear layer with an adapter, added up as peft does."""

    def __init__(
        self, layer: torch.nn.Module, left: torch.Tensor, right: torch.Tensor, scaling: float
    ) -> None:
        super().__init__()
        self.layer, self.scaling = layer, scaling
        self.left, self.right = torch.nn.Parameter(left), torch.nn.Parameter(right)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.scaling * (x @ self.left.T @ self.right.T)
        plain: torch.Tensor = self.layer(x)
        return plain + added


def with_adapter(
    model: PreTrainedModel, lora: Lora, *, seed: int
) -> tuple[PreTrainedModel, list[tuple[str, torch.Tensor]]]:
    """A copy of the model with random adapters, and these under peft's names, on the CPU."""
    adapted, weights = copy.deepcopy(model), []
    generator = torch.Generator().manual_seed(seed)
    for name, layer in list(model.named_modules()):
        if not isinstance(layer, torch.nn.Linear):
            continue
        parent, _, last = name.rpartition(".")
        if last not in lora.target_modules:
            continue
        shapes = {"A": (lora.rank, layer.in_features), "B": (layer.out_features, lora.rank)}
        pair = {
            matrix: torch.empty(shape).normal_(0.0, 0.1, generator=generator).to(model.dtype)
            for matrix, shape in shapes.items()
        }
        weights += [
            (f"base_model.model.{name}.lora_{matrix}.weight", weight)
            for matrix, weight in pair.items()
        ]
        left, right = (weight.to(layer.weight.device) for weight in pair.values())
        setattr(adapted.get_submodule(parent), last, _Adapted(layer, left, right, lora.scaling))
    return adapted.requires_grad_(requires_grad=False), weights


async def guesses(sampler: VllmSampler, prompt: Sequence[int]) -> str:
    """Some steps of a request yield several tokens."""
    params = SamplingParams(max_new_tokens=200, temperature=0.0)
    options = RequestOptions(min_new_tokens=200)
    deltas = [
        len(delta.token_ids)
        async for delta in sampler.stream(prompt, params=params, options=options)
    ]
    assert sum(deltas) == 200
    assert len(deltas) < 180, f"{len(deltas)} steps for 200 tokens"
    return f"200 tokens in {len(deltas)} steps, up to {max(deltas)} in one"


async def distribution(sampler: VllmSampler, model: PreTrainedModel, prompt: Sequence[int]) -> str:
    """Tokens are drawn as often as the model says: their places in its distribution are uniform.

    With a temperature of its own for each group, all at once, so that a request that is checked
    with another one's is seen.
    """
    temperatures = (0.5, 1.0, 1.5)
    groups = await asyncio.gather(
        *[
            sampler.sample(
                prompt,
                num_samples=64,
                params=SamplingParams(max_new_tokens=48, temperature=temperature),
            )
            for temperature in temperatures
        ]
    )
    lines = []
    for temperature, group in zip(temperatures, groups, strict=True):
        places = torch.cat([_places(model, prompt, one, temperature) for one in group])
        ordered = places.sort().values
        steps = torch.arange(len(ordered)) / len(ordered)
        distance = (ordered - steps).abs().max().item()
        assert distance < _BOUND / math.sqrt(len(ordered)) + 1 / len(ordered), (
            temperature,
            distance,
            len(ordered),
        )
        lines.append(f"{distance:.3f} of {len(ordered)} at {temperature}")
    return ", ".join(lines)


def _places(
    model: PreTrainedModel, prompt: Sequence[int], completion: Completion, temperature: float
) -> torch.Tensor:
    """Where each token lies in the model's cumulative distribution, at random within its own."""
    ids = torch.tensor([[*prompt, *completion.token_ids]], device=model.device)
    logits = model(ids).logits[0, len(prompt) - 1 : -1].double().cpu() / temperature
    probabilities = logits.softmax(dim=-1)
    drawn = torch.tensor(completion.token_ids)[:, None]
    own = probabilities.gather(1, drawn)[:, 0]
    below = probabilities.cumsum(dim=-1).gather(1, drawn)[:, 0] - own
    places: torch.Tensor = below + own * torch.rand(len(own), dtype=torch.float64)
    return places


async def streamed(
    sampler: VllmSampler, weights: Sequence[tuple[str, torch.Tensor]], *, num_receivers: int
) -> str:
    """Every stage takes its own part of a stream, by both ways; the caller checks logprobs."""
    buckets = []
    for carriage in get_args(Carriage):
        stream = WeightStream(
            tensor_headers(weights, dtype=sampler.dtype),
            dtype=sampler.dtype,
            device=torch.device("cpu"),
            carriage=carriage,
            bucket_bytes=2**18,
            timeout_s=120.0,
            checksums=True,
        )
        with stream:
            offered = stream.offer(PolicyVersion(sampler.policy_version + 1))
            _, report = await asyncio.gather(
                sampler.load_published(offered),
                asyncio.to_thread(stream.send, weights, num_receivers=num_receivers),
            )
        buckets.append(f"{report.num_buckets} by {carriage}")
    return f"buckets: {', '.join(buckets)}"
