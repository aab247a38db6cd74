"""The real server on the CPU, asked by the real `openai` client: a tiny model in float32."""

import asyncio
import json
import os
import signal
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import attrs
import httpx
import openai
import pytest
import torch
from fastapi import HTTPException
from openai import AsyncOpenAI
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rl_contracts.rollout import PolicyVersion, SamplingParams
from rollout_vllm import (
    InFlight,
    SamplerDiedError,
    ServerConfig,
    VllmConfig,
    VllmSampler,
)
from rollout_vllm.admission import Admission
from rollout_vllm.lifetime import Lifetime
from rollout_vllm.served_engine import ServedEngine
from rollout_vllm.versions import installed_version
from rollout_vllm.vllm_engine import VllmEngine
from rollout_vllm.weight_updates import WeightUpdates

pytestmark = pytest.mark.slow

T = TypeVar("T")
VOCAB_SIZE = 96
EOS = 3
PROMPT = [5, 6, 7, 8, 9]
# vLLM says from 0.32 on which weights drew which token
SAYS_VERSIONS = (installed_version() or "").startswith("0.32.")


def make_model(seed: int) -> PreTrainedModel:
    """About 150k parameters whose logits are far from uniform."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.15,
        bos_token_id=1,
        eos_token_id=EOS,
        pad_token_id=0,
    )
    model: PreTrainedModel = Qwen3ForCausalLM(config)
    return model.requires_grad_(requires_grad=False)


def save_model(folder: Path) -> None:
    """A model, a tokenizer of single characters, and generation defaults that must not be used."""
    make_model(0).save_pretrained(folder)
    special = {"pad_token": "<pad>", "bos_token": "<s>", "unk_token": "<unk>", "eos_token": "</s>"}
    letters = [letter for letter in map(chr, range(ord(" "), ord("~"))) if letter not in "`^"]
    vocabulary = {word: i for i, word in enumerate([*special.values(), *letters])}
    assert len(vocabulary) == VOCAB_SIZE
    tokenizer = Tokenizer(models.WordLevel(vocabulary, special["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    fast.save_pretrained(folder)
    defaults = {"eos_token_id": EOS, "do_sample": True, "temperature": 0.1, "top_k": 1}
    (folder / "generation_config.json").write_text(json.dumps(defaults), encoding="utf-8")


def weights_of(model: PreTrainedModel) -> list[tuple[str, torch.Tensor]]:
    """Weights under the names of the checkpoint."""
    return [(name, tensor.detach()) for name, tensor in model.named_parameters()]


def plain_logprobs(
    model: PreTrainedModel, token_ids: Sequence[int], *, temperature: float = 1.0
) -> list[float]:
    """Logprobs of these tokens after PROMPT, by transformers."""
    logits = model(torch.tensor([[*PROMPT, *token_ids]])).logits[0, len(PROMPT) - 1 : -1]
    logprobs = (logits.float() / temperature).log_softmax(dim=-1)
    return [row[token].item() for row, token in zip(logprobs, token_ids, strict=True)]


class Served(NamedTuple):
    """A sampler with a server, and the loop it runs in."""

    sampler: VllmSampler
    runner: asyncio.Runner
    client: AsyncOpenAI

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Result of it; nothing here may hang."""
        return self.runner.run(asyncio.wait_for(work, 60))

    async def post(self, path: str, body: Mapping[str, object]) -> httpx.Response:
        """One request with the key."""
        url = self.sampler.server_url.removesuffix("/v1") + path
        headers = {"Authorization": f"Bearer {self.client.api_key}"}
        async with httpx.AsyncClient(timeout=60) as client:
            return await client.post(url, json=body, headers=headers)

    async def generate(self, num_tokens: int, **params: object) -> "Drawn":
        """Tokens for tokens, by the endpoint that knows no text."""
        sampling: dict[str, object] = {"max_tokens": num_tokens, "logprobs": 0, **params}
        sampling |= {"ignore_eos": True}
        answer = await self.post(
            "/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": sampling}
        )
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        spans = choice.get("weight_versions") or []
        versions = [
            int(span["version"]) for span in spans for _ in range(span["start"], span["end"])
        ]
        return Drawn(choice["token_ids"], logprobs, versions, choice["finish_reason"], answer)


class Drawn(NamedTuple):
    """What `/inference/v1/generate` answered."""

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str
    answer: httpx.Response

    def largest_difference(self, by_version: Mapping[int, PreTrainedModel]) -> float:
        """Between its logprobs and those of the model that is said to have drawn each token."""
        plain = {v: plain_logprobs(model, self.token_ids) for v, model in by_version.items()}
        versions = self.versions or [max(by_version)] * len(self.token_ids)
        return max(
            abs(own - plain[version][place])
            for place, (own, version) in enumerate(zip(self.logprobs, versions, strict=True))
        )


def config(folder: Path, server: ServerConfig) -> VllmConfig:
    """Small, exact and quick to start."""
    return VllmConfig(
        model=str(folder),
        max_model_len=256,
        dtype="float32",
        max_num_seqs=8,
        kv_cache_gib=0.125,
        cpu_threads=1,
        server=server,
    )


async def running(sampler: VllmSampler, number: int) -> None:
    """Wait until so many requests run."""
    async with asyncio.timeout(30):
        while sampler.num_running != number:  # noqa: ASYNC110  (nobody tells of it)
            await asyncio.sleep(0.01)


async def start(settings: VllmConfig, *, api_key: str) -> tuple[VllmSampler, AsyncOpenAI]:
    """A sampler, and a client that sends this key and asks once."""
    sampler = await VllmSampler.start(settings, policy_version=PolicyVersion(0))
    return sampler, AsyncOpenAI(base_url=sampler.server_url, api_key=api_key, max_retries=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's."""
    folder = tmp_path_factory.mktemp("model")
    save_model(folder)
    return folder


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    """A server with a key, and with all that vLLM's own server can be made to offer."""
    settings = config(
        folder, ServerConfig(api_key_variable="POLICY_KEY", tool_call_parser="hermes")
    )
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner() as runner:
        patch.setenv("POLICY_KEY", "s3cret-key")
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")
        patch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
        sampler, client = runner.run(start(settings, api_key="s3cret-key"))
        yield Served(sampler, runner, client)
        runner.run(client.close())
        runner.run(sampler.close())


def test_a_chat_and_the_same_chat_in_parts(served: Served) -> None:
    """The stream's parts joined are the answer, and every token has its logprob."""
    messages: Any = [{"role": "user", "content": "hello"}]

    async def ask() -> None:
        raw = await served.client.chat.completions.with_raw_response.create(
            model="policy", messages=messages, max_tokens=24, seed=5, logprobs=True
        )
        whole = raw.parse().choices[0]
        assert whole.logprobs is not None
        assert len(whole.logprobs.content or []) == raw.parse().usage.completion_tokens  # type: ignore[union-attr]
        assert raw.headers["x-policy-version-oldest"] == "0"
        assert raw.headers["x-policy-version-newest"] == "0"
        stream = await served.client.chat.completions.create(
            model="policy", messages=messages, max_tokens=24, seed=5, stream=True
        )
        parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert len(parts) > 10
        assert "".join(parts) == whole.message.content

    served.run(ask())


@pytest.mark.parametrize("temperature", [None, 0.7])
def test_completions_of_token_ids(served: Served, temperature: float | None) -> None:
    """Ids in and out; a temperature that is left out is 1, whatever the model's files say."""

    async def ask() -> tuple[list[int], list[float]]:
        answer = await served.client.completions.create(
            model="policy",
            prompt=PROMPT,
            max_tokens=24,
            logprobs=0,
            extra_body={"return_token_ids": True},
            temperature=openai.omit if temperature is None else temperature,
        )
        (choice,) = answer.choices
        assert choice.model_extra is not None
        assert choice.model_extra["prompt_token_ids"] == PROMPT
        assert choice.logprobs is not None
        return choice.model_extra["token_ids"], list(choice.logprobs.token_logprobs or [])

    token_ids, logprobs = served.run(ask())
    plain = plain_logprobs(make_model(0), token_ids, temperature=temperature or 1.0)
    assert max(abs(a - b) for a, b in zip(logprobs, plain, strict=True)) < 1e-4


def test_tokens_for_tokens(served: Served) -> None:
    """The endpoint without text says which weights drew which token."""
    drawn = served.run(served.generate(24))
    assert drawn.largest_difference({0: make_model(0)}) < 1e-4
    if SAYS_VERSIONS:
        assert drawn.versions == [0] * 24


def test_text_becomes_tokens_as_in_a_chat(served: Served) -> None:
    """Who sends tokens can have the chat template applied first, and read what came."""
    chat = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
    tokens = served.run(served.post("/tokenize", chat)).json()["tokens"]
    text = served.run(served.post("/detokenize", {"model": "policy", "tokens": tokens})).json()
    assert text["prompt"].startswith("user: hi")


def test_a_tool_that_must_be_called_is_called(served: Served) -> None:
    """Even a random model does, as vLLM lets it write nothing else."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["a"],
    }
    # vLLM holds arguments to their schema if the client says so
    function = {"name": "add", "parameters": schema, "strict": True}
    tools: Any = [{"type": "function", "function": function}]

    async def ask() -> None:
        answer = await served.client.chat.completions.create(
            model="policy",
            messages=[{"role": "user", "content": "2"}],
            max_tokens=100,
            tools=tools,
            tool_choice={"type": "function", "function": {"name": "add"}},
        )
        (call,) = answer.choices[0].message.tool_calls or []
        assert call.type == "function"
        assert call.function.name == "add"
        assert json.loads(call.function.arguments)["a"] in range(10)

    served.run(ask())


def test_wrong_requests_are_refused_with_the_reason(served: Served) -> None:
    """A wrong key, an unknown model, a prompt that does not fit, an id that does not exist."""

    async def ask() -> None:
        client = served.client
        with pytest.raises(openai.AuthenticationError, match="expected the server's key"):
            await client.with_options(api_key="wrong").models.list()
        with pytest.raises(openai.NotFoundError, match="`gpt` does not exist"):
            await client.completions.create(model="gpt", prompt=PROMPT)
        with pytest.raises(openai.BadRequestError, match=r"maximum context length is 256 tokens"):
            await client.completions.create(model="policy", prompt=[5] * 300)
        with pytest.raises(openai.BadRequestError, match=r"(?i)token .*96.* is out of vocabulary"):
            await client.completions.create(model="policy", prompt=[VOCAB_SIZE])
        listed = [model.id async for model in client.models.list()]
        assert listed == ["policy"]

    served.run(ask())
    assert served.sampler.num_running == 0


@pytest.mark.parametrize(
    "path",
    [
        "/collective_rpc",
        "/init_weight_transfer_engine",
        "/update_weights",
        "/pause",
        "/resume",
        "/sleep",
        "/wake_up",
        "/reset_prefix_cache",
        "/server_info",
        "/start_profile",
        "/stop_profile",
        "/abort_requests",
        "/inference/v1/abort_requests",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/v1/responses",
        "/scale_elastic_ep",
        "/invocations",
        "/metrics",
        "/version",
        "/openapi.json",
        "/docs",
    ],
)
def test_nothing_but_sampling_is_served(served: Served, path: str) -> None:
    """Not even what vLLM offers in its development mode, which is on here."""
    assert served.run(served.post(path, {})).status_code == 404


def test_a_client_that_leaves_frees_its_place(served: Served) -> None:
    """In the middle of a stream, and while it waits for the whole."""

    async def leave() -> None:
        stream = await served.client.completions.create(
            model="policy", prompt=PROMPT, max_tokens=250, stream=True
        )
        await anext(aiter(stream))
        assert served.sampler.num_running == 1
        await stream.close()
        await running(served.sampler, 0)
        asking = asyncio.create_task(served.generate(250, n=1))
        await running(served.sampler, 1)
        asking.cancel()
        await running(served.sampler, 0)

    served.run(leave())


def test_new_weights_answer_the_next_request(served: Served) -> None:
    """The same request, greedily, gives other tokens, with the new weights' logprobs."""
    model = make_model(1)
    before = served.run(served.generate(16, temperature=0))
    served.run(served.sampler.load_weights(weights_of(model), version=PolicyVersion(1)))
    after = served.run(served.generate(16, temperature=0))
    assert after.token_ids != before.token_ids
    assert after.answer.headers["x-policy-version-oldest"] == "1"
    assert after.largest_difference({1: model}) < 1e-4


@pytest.mark.parametrize("in_flight", ["keep", "abort", "wait"])
def test_new_weights_while_a_request_runs(served: Served, in_flight: InFlight) -> None:
    """One answer in every mode, whole; the sampler's own requests go on beside it."""
    version = served.sampler.policy_version
    old, new = make_model(2), make_model(3)
    served.run(served.sampler.load_weights(weights_of(old), version=PolicyVersion(version + 1)))
    params = SamplingParams(max_new_tokens=200)

    async def update() -> Drawn:
        asking = asyncio.create_task(served.generate(200))
        own = asyncio.create_task(served.sampler.sample(PROMPT, num_samples=2, params=params))
        await running(served.sampler, 2)
        await asyncio.sleep(0.1)
        await served.sampler.load_weights(
            weights_of(new), version=PolicyVersion(version + 2), in_flight=in_flight
        )
        for completion in await own:
            assert completion.finish_reason in {"stop", "length"}
        return await asking

    drawn = served.run(update())
    assert drawn.finish_reason == "length"
    assert len(drawn.token_ids) == 200
    assert drawn.answer.headers["x-policy-version-oldest"] == str(version + 1)
    if SAYS_VERSIONS:
        expected = {version + 1} if in_flight == "wait" else {version + 1, version + 2}
        assert set(drawn.versions) == expected
        assert drawn.largest_difference({version + 1: old, version + 2: new}) < 1e-4


def test_a_dead_engine_is_an_error_for_everybody(served: Served) -> None:
    """Running requests and later ones; nobody hangs."""
    process = served.run(served.sampler._engine.settings())["process"]["id"]
    assert isinstance(process, int)

    async def kill() -> None:
        long: Any = {
            "model": "policy",
            "prompt": PROMPT,
            "max_tokens": 250,
            "extra_body": {"ignore_eos": True},
        }
        stream = await served.client.completions.create(**long, stream=True)
        await anext(aiter(stream))
        asking = asyncio.create_task(served.client.completions.create(**long))
        await asyncio.sleep(0.05)
        os.kill(process, signal.SIGKILL)
        with pytest.raises(openai.InternalServerError, match="engine process died") as raised:
            await asking
        assert raised.value.status_code == 503
        with pytest.raises(openai.APIError, match="engine process died"):
            async for _ in stream:
                pass
        with pytest.raises(openai.InternalServerError, match="engine process died"):
            await served.client.models.list()
        with pytest.raises(SamplerDiedError):
            await served.sampler.ping()

    served.run(kill())


def test_without_a_key_any_client_of_this_machine_until_the_sampler_closes(folder: Path) -> None:
    """Closing ends running requests with an error, then the port is free."""

    async def body() -> None:
        sampler, client = await start(config(folder, ServerConfig()), api_key="whatever")
        async with client:
            greedy = {"model": "policy", "prompt": PROMPT, "max_tokens": 2, "temperature": 0}
            assert (
                await client.post("/completions", body=greedy, cast_to=httpx.Response)
            ).is_success
            asking = asyncio.create_task(
                client.completions.create(
                    model="policy",
                    prompt=PROMPT,
                    n=2,
                    max_tokens=250,
                    extra_body={"ignore_eos": True},
                )
            )
            await running(sampler, 1)
            await sampler.close()
            with pytest.raises(openai.InternalServerError, match="the sampler was closed"):
                await asking
            with pytest.raises(openai.APIConnectionError):
                await client.models.list()

    asyncio.run(body())


def test_a_parser_that_vllm_does_not_know_is_refused(folder: Path) -> None:
    """With those that it knows; the engine is ended and the port free."""
    settings = config(folder, ServerConfig(tool_call_parser="hermit"))
    with pytest.raises(ValueError, match=r"tool_call_parser to be one of \[.*'hermes'.*got 'herm"):
        asyncio.run(start(settings, api_key=""))


def engine_without_process(*, tokenizers_end: int, models_ends: int | list[int]) -> VllmEngine:
    """As much of vLLM as is asked of it before a request."""
    model = SimpleNamespace(
        get_vocab_size=lambda: VOCAB_SIZE,
        try_get_generation_config=lambda: {"eos_token_id": models_ends},
        generation_config="auto",
    )
    renderer = SimpleNamespace(get_eos_token_id=lambda: tokenizers_end)
    vllm: Any = SimpleNamespace(
        model_config=model, renderer=renderer, vllm_config=None, input_processor=None
    )
    return VllmEngine(vllm, routed=False, adapted=False, serves=True)


def test_a_tokenizer_that_ends_completions_elsewhere_is_refused() -> None:
    """vLLM would end the sampler's own completions there too."""
    engine_without_process(tokenizers_end=7, models_ends=[3, 7]).check_end_of_sequence()
    with pytest.raises(
        ValueError, match=r"end of sequence is token 7, and that of the model .* 3;"
    ):
        engine_without_process(tokenizers_end=7, models_ends=3).check_end_of_sequence()


def test_a_sleeping_sampler_answers_at_once() -> None:
    """With 503, as nobody would draw tokens before it is woken."""
    engine = engine_without_process(tokenizers_end=3, models_ends=3)
    lifetime = Lifetime(engine)
    settings = VllmConfig(model="m", max_model_len=64, kv_cache_gib=1.0)
    weights = WeightUpdates(
        engine, lifetime, config=settings, policy_version=PolicyVersion(0), tensors={}
    )
    weights.sleep_state.slept(keep_weights=True)
    served = ServedEngine(engine, Admission(lifetime, weights))
    prompt: Any = {"type": "token", "prompt_token_ids": PROMPT}
    params: Any = None
    with pytest.raises(HTTPException, match="of the sampler sleep; wake them first") as raised:
        asyncio.run(anext(served.generate(prompt, params, "any")))
    assert raised.value.status_code == 503


def test_attrs_are_frozen() -> None:
    """Nothing rewrites where a server listens."""
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        ServerConfig().port = 1  # type: ignore[misc]
