"""Real vLLM on the CPU takes adapters: logprobs are those of transformers with peft, in float32."""

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rl_contracts.rollout import Completion, PolicyVersion, SamplingParams
from rollout_vllm import (
    Lora,
    RequestOptions,
    ServerConfig,
    VllmConfig,
    VllmSampler,
    adapter_weights,
    publish_weights,
)
from rollout_vllm.replica import ReplicaSetConfig
from rollout_vllm.replicas import ReplicaSet
from rollout_vllm.torch_headers import tensor_headers
from rollout_vllm.versions import installed_version
from rollout_vllm.weights_stream import WeightStream

peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (installed_version() or "").startswith("0.32."),
        reason="other versions have not been shown to apply adapters on the CPU",
    ),
]

EOS = 3
PROMPT = [5, 6, 7, 8, 9]
PARAMS = SamplingParams(max_new_tokens=24)
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}
# parts of layers that vLLM computes as one, all of such a layer, and layers that are one
LORA = Lora(
    rank=3, alpha=7.0, target_modules=("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")
)
ATTENTION = Lora(rank=8, alpha=4.0, target_modules=("q_proj", "k_proj", "v_proj", "o_proj"))


def save_model(folder: Path) -> None:
    """A tiny random model, and a tokenizer for the server."""
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**SIZES)).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(96)}, "w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token=f"w{EOS}").save_pretrained(folder)


def adapted(folder: Path, lora: Lora, *, seed: int) -> Any:  # noqa: ANN401  (peft has no types)
    """The folder's model with random adapters, as peft computes it."""
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    settings = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=list(lora.target_modules),
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(base, settings)
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        weight.requires_grad_(requires_grad=False)
        if "lora_" in name:
            weight.normal_(0.0, 0.3, generator=generator)
    return model.eval()


def weights_of(model: Any) -> list[tuple[str, torch.Tensor]]:  # noqa: ANN401
    """The adapters alone."""
    return list(peft.get_peft_model_state_dict(model).items())


def off(
    model: Any,  # noqa: ANN401
    completion: Completion,
    prompt_ids: Sequence[int] = PROMPT,
    *,
    without: Sequence[int] = (),
) -> torch.Tensor:
    """Sampler's logprobs less the model's, token by token; `without` could not be drawn."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt_ids, *completion.token_ids]])).logits
    logits = logits[0, len(prompt_ids) - 1 : -1].float()
    logits[:, list(without)] = -torch.inf
    drawn = torch.tensor(completion.token_ids)[:, None]
    plain = logits.log_softmax(dim=-1).gather(1, drawn)[:, 0]
    difference: torch.Tensor = torch.tensor(completion.rollout_logprobs) - plain
    return difference.abs()


class Running(NamedTuple):
    """A sampler that takes adapters, and the loop it runs in."""

    sampler: VllmSampler
    runner: asyncio.Runner
    folder: Path

    def model(self, seed: int) -> Any:  # noqa: ANN401
        """The trainer's model with the adapters of this seed."""
        return adapted(self.folder, LORA, seed=seed)

    def draw(self) -> list[Completion]:
        """Four completions."""
        return self.runner.run(self.sampler.sample(PROMPT, num_samples=4, params=PARAMS))

    def load(self, weights: Sequence[tuple[str, torch.Tensor]]) -> PolicyVersion:
        """Give the sampler the next version."""
        version = PolicyVersion(self.sampler.policy_version + 1)
        self.runner.run(self.sampler.load_weights(weights, version=version))
        return version


def config(folder: Path, lora: Lora, server: ServerConfig | None = None) -> VllmConfig:
    """Small, exact and quick to start."""
    return VllmConfig(
        model=str(folder),
        max_model_len=256,
        dtype="float32",
        max_num_seqs=8,
        kv_cache_gib=0.125,
        cpu_threads=1,
        lora=lora,
        server=server,
    )


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A dense model's sampler without an adapter yet, behind a server."""
    folder = tmp_path_factory.mktemp("model")
    save_model(folder)
    settings = config(folder, LORA, ServerConfig(model_name="policy"))
    with asyncio.Runner() as runner:
        sampler = runner.run(VllmSampler.start(settings, policy_version=PolicyVersion(0)))
        yield Running(sampler, runner, folder)
        runner.run(sampler.close())


def test_before_the_first_adapter_the_sampler_is_the_folders_model(running: Running) -> None:
    """An adapter of zeros stands in, and is read back with room for the next of vLLM's ranks."""
    assert running.sampler.policy_version == 0
    base = AutoModelForCausalLM.from_pretrained(running.folder, dtype=torch.float32)
    assert max(off(base, one).max() for one in running.draw()) < 1e-4
    found = running.runner.run(running.sampler._engine.settings())["lora"]
    assert (found["max_lora_rank"], found["max_loras"]) == (8, 1)
    assert found["target_modules"] == list(LORA.target_modules)


def test_each_adapter_replaces_the_one_before(running: Running) -> None:
    """Under the one number that vLLM knows, prompts whose beginning was cached included.

    A stale adapter would give the logprobs of the last model, which are far off.
    """
    before = AutoModelForCausalLM.from_pretrained(running.folder, dtype=torch.float32)
    for seed in (1, 2, 3):
        running.draw()  # the prompt's keys and values are cached now
        model = running.model(seed)
        version = running.load(weights_of(model))
        for completion in running.draw():
            assert set(completion.policy_versions) == {version}
            assert off(model, completion).max() < 1e-4
            assert off(before, completion).max() > 0.1
        before = model


def test_zeros_are_the_folders_model_again(running: Running) -> None:
    """Nothing of the last adapter is left."""
    zeros = [(name, torch.zeros_like(weight)) for name, weight in weights_of(running.model(1))]
    running.load(zeros)
    base = AutoModelForCausalLM.from_pretrained(running.folder, dtype=torch.float32)
    assert max(off(base, one).max() for one in running.draw()) < 1e-4


@pytest.mark.parametrize("in_flight", ["keep", "abort"])
def test_running_requests_go_on_with_the_next_adapter(running: Running, in_flight: Any) -> None:  # noqa: ANN401
    """Each token has the version and the logprob of the adapter that drew it."""
    old, new = running.model(4), running.model(5)
    before = running.load(weights_of(old))
    sampler, version = running.sampler, PolicyVersion(before + 1)
    by_version = {before: old, version: new}

    async def caught() -> list[Completion]:
        params, options = SamplingParams(max_new_tokens=200), RequestOptions(min_new_tokens=200)
        drawing = asyncio.create_task(
            sampler.sample(PROMPT, num_samples=4, params=params, options=options)
        )
        drawn = 0
        async for delta in sampler.stream(PROMPT, params=params, options=options):
            drawn += len(delta.token_ids)
            if drawn >= 20:
                break
        await sampler.load_weights(weights_of(new), version=version, in_flight=in_flight)
        return await drawing

    for completion in running.runner.run(caught()):
        versions = torch.tensor(completion.policy_versions)
        assert versions.tolist() == sorted(versions.tolist())
        assert set(versions.tolist()) == set(by_version)
        for number, drew in by_version.items():
            assert off(drew, completion, without=[EOS])[versions == number].max() < 1e-4


def test_what_is_no_adapter_of_this_model_is_refused(running: Running, tmp_path: Path) -> None:
    """Before anything is loaded; the present adapter goes on."""
    model = running.model(6)
    version = running.load(weights_of(model))
    right = weights_of(running.model(7))
    (name, weight), *others = right
    base = AutoModelForCausalLM.from_pretrained(running.folder, dtype=torch.float32)
    whole = [(n, w.detach()) for n, w in base.named_parameters()]
    wrong: list[tuple[list[tuple[str, torch.Tensor]], str]] = [
        (others, rf"'{name}' is missing"),
        ([*right, ("lm_head.weight", torch.zeros(96, 64))], r"'lm_head.weight' is not in the"),
        ([(name, weight[:2]), *others], rf"'{name}' has shape \[2, 64\], expected \[3, 64\]"),
        (whole, r"updates are adapters, .* got 24 other tensors .*; send adapters alone, or leave"),
    ]
    for weights, text in wrong:
        with pytest.raises(ValueError, match=text):
            running.load(weights)
    half = publish_weights(
        right, version=PolicyVersion(version + 1), folder=tmp_path, dtype="bfloat16"
    )
    with pytest.raises(ValueError, match=r"published as bfloat16, the sampler computes in float32"):
        running.runner.run(running.sampler.load_published(half))
    assert running.sampler.policy_version == version
    assert max(off(model, one).max() for one in running.draw()) < 1e-4


def test_an_adapter_comes_by_a_stream_in_pieces(running: Running) -> None:
    """Buckets smaller than a matrix."""
    model = running.model(8)
    weights = weights_of(model)
    version = PolicyVersion(running.sampler.policy_version + 1)

    async def update() -> int:
        headers = tensor_headers(weights, dtype="float32")
        stream = WeightStream(
            headers, dtype="float32", device=torch.device("cpu"), bucket_bytes=2560, timeout_s=60.0
        )
        with stream:
            offered = stream.offer(version)
            _, report = await asyncio.gather(
                running.sampler.load_published(offered), asyncio.to_thread(stream.send, weights)
            )
        return report.num_buckets

    assert running.runner.run(update()) > 10
    for completion in running.draw():
        assert set(completion.policy_versions) == {version}
        assert off(model, completion).max() < 1e-4


def test_a_saved_adapter_is_what_peft_computes(running: Running, tmp_path: Path) -> None:
    """The folder that peft writes, which is that of `FsdpEngine.save_adapter`."""
    model = running.model(9)
    model.save_pretrained(tmp_path)
    running.load(list(adapter_weights(tmp_path, LORA)))
    assert max(off(model, one).max() for one in running.draw()) < 1e-4


def test_the_server_answers_with_the_adapter(running: Running) -> None:
    """Its clients know of one model, and name no adapter."""
    model = running.model(10)
    version = running.load(weights_of(model))
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 16, "logprobs": 0}}

    async def ask() -> httpx.Response:
        url = running.sampler.server_url.removesuffix("/v1")
        async with httpx.AsyncClient(timeout=60) as client:
            return await client.post(f"{url}/inference/v1/generate", json=body)

    answer = running.runner.run(ask())
    assert answer.headers["x-policy-version-oldest"] == str(version)
    (choice,) = answer.json()["choices"]
    drawn = Completion(
        token_ids=tuple(choice["token_ids"]),
        rollout_logprobs=tuple(e["logprob"] for e in choice["logprobs"]["content"]),
        policy_versions=(version,) * len(choice["token_ids"]),
        finish_reason="stop",
    )
    assert off(model, drawn).max() < 1e-4


def test_a_restarted_replica_has_the_present_adapter(tmp_path: Path) -> None:
    """Whose engine died comes back with it; here every part of one layer is adapted."""
    save_model(tmp_path)
    started: list[VllmSampler] = []

    async def start(number: int) -> VllmSampler:
        del number
        settings = config(tmp_path, ATTENTION)
        started.append(await VllmSampler.start(settings, policy_version=PolicyVersion(0)))
        return started[-1]

    async def test() -> list[Completion]:
        replicas = await ReplicaSet.start(
            start,
            ReplicaSetConfig(num_replicas=1),
            policy_version=PolicyVersion(0),
            dtype="float32",
        )
        async with replicas:
            await replicas.load_weights(weights_of(model), version=PolicyVersion(5))
            drawn = await replicas.sample(PROMPT, num_samples=2, params=PARAMS)
            process = (await started[0]._engine.settings())["process"]["id"]
            assert isinstance(process, int)
            os.kill(process, signal.SIGKILL)
            drawn += await replicas.sample(PROMPT, num_samples=2, params=PARAMS)
        return drawn

    model = adapted(tmp_path, ATTENTION, seed=11)
    drawn = asyncio.run(test())
    assert len(started) == 2
    for completion in drawn:
        assert set(completion.policy_versions) == {5}
        assert off(model, completion).max() < 1e-4
