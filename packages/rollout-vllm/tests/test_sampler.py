"""Real vLLM on the CPU with tiny random models in float32: tokens, logprobs, weights, versions."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import (
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from rl_contracts.rollout import Completion, PolicyVersion, Sampler, SamplingParams
from rl_contracts.train import WeightSink
from rollout_vllm import (
    InFlight,
    SamplerClosedError,
    SamplerDiedError,
    VllmConfig,
    VllmSampler,
    publish_weights,
)
from rollout_vllm.in_flight import ResumingEngine
from rollout_vllm.torch_headers import tensor_headers
from rollout_vllm.vllm_engine import VllmEngine
from rollout_vllm.weights_stream import Carriage, StreamReport, WeightStream

pytestmark = pytest.mark.slow

VOCAB_SIZE = 96
EOS = 3


def dense_model(*, tied: bool, seed: int) -> PreTrainedModel:
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
        tie_word_embeddings=tied,
        initializer_range=0.15,
        bos_token_id=1,
        eos_token_id=EOS,
        pad_token_id=0,
    )
    model: PreTrainedModel = Qwen3ForCausalLM(config)
    model.requires_grad_(requires_grad=False)
    return model


def moe_model(*, seed: int) -> PreTrainedModel:
    """Eight experts, two of them active."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.15,
        bos_token_id=1,
        eos_token_id=EOS,
        pad_token_id=0,
    )
    model: PreTrainedModel = Qwen3MoeForCausalLM(config)
    model.requires_grad_(requires_grad=False)
    return model


def checkpoint_weights(model: PreTrainedModel) -> list[tuple[str, torch.Tensor]]:
    """Weights under the names of the checkpoint: experts one by one, the tied head left out."""
    weights: list[tuple[str, torch.Tensor]] = []
    for name, tensor in model.named_parameters():
        value = tensor.detach().clone()
        if name.endswith("experts.gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            for expert, stacked in enumerate(value):
                gate, up = stacked.chunk(2)
                weights.append((f"{stem}{expert}.gate_proj.weight", gate))
                weights.append((f"{stem}{expert}.up_proj.weight", up))
        elif name.endswith("experts.down_proj"):
            stem = name.removesuffix("down_proj")
            weights += [(f"{stem}{expert}.down_proj.weight", w) for expert, w in enumerate(value)]
        else:
            weights.append((name, value))
    return weights


def reference_logprobs(
    model: PreTrainedModel,
    prompt_ids: Sequence[int],
    completion: Completion,
    *,
    temperature: float = 1.0,
) -> list[float]:
    """Logprobs of the sampled ids by plain transformers."""
    ids = torch.tensor([[*prompt_ids, *completion.token_ids]])
    with torch.no_grad():
        logits = model(ids).logits[0].float() / temperature
    logprobs = logits.log_softmax(dim=-1)
    first = len(prompt_ids) - 1
    return [logprobs[first + i, token].item() for i, token in enumerate(completion.token_ids)]


def largest_difference(left: Sequence[float], right: Sequence[float]) -> float:
    """Largest absolute difference, in nats."""
    assert len(left) == len(right) > 0
    return max(abs(a - b) for a, b in zip(left, right, strict=True))


class Running(NamedTuple):
    """A sampler that runs, and the loop it runs in."""

    sampler: VllmSampler
    runner: asyncio.Runner
    folder: Path


def tiny_config(folder: Path, *, max_num_seqs: int = 8) -> VllmConfig:
    """Small, exact and quick to start."""
    return VllmConfig(
        model=str(folder),
        max_model_len=256,
        dtype="float32",
        max_num_seqs=max_num_seqs,
        kv_cache_gib=0.125,
        cpu_threads=1,
    )


@pytest.fixture(scope="module")
def start_sampler(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[PreTrainedModel], Running]]:
    """Starts samplers of a model and closes them after the module's last test."""
    started: list[Running] = []
    with asyncio.Runner() as runner:

        def start(model: PreTrainedModel) -> Running:
            folder = tmp_path_factory.mktemp("model")
            model.save_pretrained(folder)
            sampler = runner.run(
                VllmSampler.start(tiny_config(folder), policy_version=PolicyVersion(0))
            )
            started.append(Running(sampler, runner, folder))
            return started[-1]

        yield start
        for running in started:
            runner.run(running.sampler.close())


@pytest.fixture(scope="module")
def tied(start_sampler: Callable[[PreTrainedModel], Running]) -> Running:
    """A tied dense model, its sampler at version 0 when the first test gets it."""
    return start_sampler(dense_model(tied=True, seed=0))


def sample(
    running: Running,
    prompt_ids: Sequence[int],
    *,
    num_samples: int = 4,
    max_new_tokens: int = 24,
    temperature: float = 1.0,
    top_p: float = 1.0,
    stop_token_ids: tuple[int, ...] = (),
    seed: int | None = None,
) -> list[Completion]:
    """One call of `sample`."""
    params = SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        stop_token_ids=stop_token_ids,
        seed=seed,
    )
    return running.runner.run(
        running.sampler.sample(prompt_ids, num_samples=num_samples, params=params)
    )


def load(running: Running, model: PreTrainedModel, version: int) -> None:
    """Give the sampler another model's weights."""
    running.runner.run(
        running.sampler.load_weights(checkpoint_weights(model), version=PolicyVersion(version))
    )


def assert_logprobs_match(
    model: PreTrainedModel, completions: Sequence[Completion], prompt_ids: Sequence[int]
) -> None:
    """Every completion's logprobs are those of plain transformers."""
    for completion in completions:
        expected = reference_logprobs(model, prompt_ids, completion)
        assert largest_difference(completion.rollout_logprobs, expected) < 1e-4


PROMPT = [5, 6, 7, 8, 9]


def test_contracts(tied: Running) -> None:
    """The sampler has what the two Protocols ask for."""
    sampler: Sampler = tied.sampler
    sink: WeightSink = tied.sampler
    assert sampler.policy_version == 0
    assert sink is tied.sampler


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_equal_transformers(tied: Running, temperature: float) -> None:
    """A22: logprobs are those of the tempered distribution that the tokens were drawn from."""
    model = dense_model(tied=True, seed=0)
    completions = sample(tied, PROMPT, temperature=temperature)
    assert len({completion.token_ids for completion in completions}) == 4
    for completion in completions:
        assert completion.policy_versions == (0,) * len(completion.token_ids)
        expected = reference_logprobs(model, PROMPT, completion, temperature=temperature)
        assert largest_difference(completion.rollout_logprobs, expected) < 1e-4


def test_logprobs_of_a_nucleus_are_off_by_the_mass_kept(tied: Running) -> None:
    """A23: with top_p below 1, rollout less plain logprob is -log(kept mass), 0.8 or more."""
    model = dense_model(tied=True, seed=0)
    most = 0.0
    for completion in sample(tied, PROMPT, top_p=0.8):
        ids = torch.tensor([[*PROMPT, *completion.token_ids]])
        logprobs = model(ids).logits[0, len(PROMPT) - 1 : -1].float().log_softmax(dim=-1)
        plain = logprobs.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        probabilities = logprobs.exp().sort(dim=-1, descending=True).values
        # the likeliest tokens, up to and with the one that reaches 0.8
        reached_before = probabilities.cumsum(dim=-1) - probabilities
        kept = (probabilities * (reached_before < 0.8)).sum(dim=-1)
        assert bool((kept >= 0.8 - 1e-6).all())
        off = torch.tensor(completion.rollout_logprobs) - plain
        assert largest_difference(off.tolist(), (-kept.log()).tolist()) < 1e-4
        most = max(most, off.max().item())
    assert most > 0.1  # of at most -log(0.8) = 0.223


def test_greedy_tokens_are_the_likeliest(tied: Running) -> None:
    """Temperature 0 takes the largest logit, with the logprob of temperature 1."""
    model = dense_model(tied=True, seed=0)
    (completion,) = sample(tied, PROMPT, num_samples=1, temperature=0.0)
    with torch.no_grad():
        logits = model(torch.tensor([[*PROMPT, *completion.token_ids]])).logits[0]
    likeliest = logits[len(PROMPT) - 1 : -1].argmax(dim=-1).tolist()
    assert list(completion.token_ids) == likeliest
    assert_logprobs_match(model, [completion], PROMPT)


def test_same_seed_draws_the_same_tokens(tied: Running) -> None:
    """A seed makes a request repeatable, and the samples of one group still differ."""
    first = sample(tied, PROMPT, seed=11)
    again = sample(tied, PROMPT, seed=11)
    assert [c.token_ids for c in first] == [c.token_ids for c in again]
    assert len({c.token_ids for c in first}) == 4


def test_stop_token_ends_a_completion_and_is_part_of_it(tied: Running) -> None:
    """A request's own stop ids end it beside the model's end of sequence."""
    (whole,) = sample(tied, PROMPT, num_samples=1, temperature=0.0, max_new_tokens=8)
    stop = whole.token_ids[3]
    place = whole.token_ids.index(stop)
    (cut,) = sample(tied, PROMPT, num_samples=1, temperature=0.0, stop_token_ids=(stop,))
    assert cut.token_ids == whole.token_ids[: place + 1]
    assert cut.finish_reason == "stop"
    assert whole.finish_reason == "length"


def test_end_of_sequence_of_the_model_ends_a_completion(tied: Running) -> None:
    """Over many samples some draw the model's own end of sequence, and none goes on after it."""
    completions = sample(tied, PROMPT, num_samples=48, max_new_tokens=64)
    stopped = [c for c in completions if c.finish_reason == "stop"]
    assert stopped
    for completion in completions:
        assert EOS not in completion.token_ids[:-1]
    assert all(completion.token_ids[-1] == EOS for completion in stopped)


def test_full_context_ends_a_completion(tied: Running) -> None:
    """Prompt and completion together fill max_model_len at most."""
    prompt = [7] * 250
    completions = sample(tied, prompt, max_new_tokens=100)
    longest = max(completions, key=lambda completion: len(completion.token_ids))
    assert len(longest.token_ids) == 6
    assert longest.finish_reason == "length"


def test_engine_runs_what_was_configured(tied: Running) -> None:
    """The engine's process reports the configured values, and the processes are few."""
    settings = tied.runner.run(tied.sampler._engine.settings())
    assert settings["model"]["dtype"] == "float32"
    assert settings["model"]["max_model_len"] == 256
    assert settings["model"]["logprobs_mode"] == "processed_logprobs"
    assert settings["cache"]["kv_cache_memory_bytes"] == 2**27
    assert settings["parallel"]["distributed_executor_backend"] == "uni"
    environment = tied.runner.run(tied.sampler._engine.environment())
    assert environment["OMP_NUM_THREADS"] == "1"
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in os.environ


def test_wrong_requests_are_refused_with_their_numbers(tied: Running) -> None:
    """Bad input is named before it reaches vLLM."""
    with pytest.raises(ValueError, match=r"prompt of 1 to 255 tokens .* got 0"):
        sample(tied, [])
    with pytest.raises(ValueError, match=r"prompt of 1 to 255 tokens .* got 256"):
        sample(tied, [5] * 256)
    with pytest.raises(ValueError, match=r"prompt_ids\[1\] is 96, .* token ids 0 to 95"):
        sample(tied, [5, VOCAB_SIZE])
    with pytest.raises(ValueError, match=r"num_samples of 1 or more, got 0"):
        sample(tied, PROMPT, num_samples=0)
    with pytest.raises(ValueError, match=r"stop_token_ids\[0\] is 96"):
        sample(tied, PROMPT, stop_token_ids=(VOCAB_SIZE,))
    with pytest.raises(ValueError, match=r"raises temperature 0.001 to 0.01; give 0 for greedy"):
        sample(tied, PROMPT, temperature=0.001)
    assert tied.sampler.num_running == 0


def test_cancelling_frees_the_places(tied: Running) -> None:
    """After cancelling more long requests than fit, a new one is answered at once."""

    async def cancel_and_sample() -> Completion:
        params = SamplingParams(max_new_tokens=250)
        tasks = [
            asyncio.create_task(tied.sampler.sample([5], num_samples=64, params=params))
            for _ in range(8)
        ]
        await asyncio.sleep(0.2)
        assert tied.sampler.num_running == 8
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in ended)
        assert tied.sampler.num_running == 0
        greedy = SamplingParams(max_new_tokens=2, temperature=0.0)
        (completion,) = await tied.sampler.sample(PROMPT, num_samples=1, params=greedy)
        resuming = tied.sampler._engine
        assert isinstance(resuming, ResumingEngine)
        assert isinstance(resuming._engine, VllmEngine)
        assert resuming._engine._engine.get_num_unfinished_requests() == 0
        return completion

    assert tied.runner.run(cancel_and_sample()).token_ids


def test_new_weights_of_a_tied_model(tied: Running) -> None:
    """A43: after an update head, layers and caches are new, for a prompt sampled before too."""
    before = sample(tied, PROMPT * 30)
    model = dense_model(tied=True, seed=1)
    load(tied, model, 1)
    assert tied.sampler.policy_version == 1
    completions = sample(tied, PROMPT * 30)
    assert_logprobs_match(model, completions, PROMPT * 30)
    assert all(set(c.policy_versions) == {1} for c in completions)
    assert all(set(c.policy_versions) == {0} for c in before)


def test_one_changed_weight_moves_the_logprobs(tied: Running) -> None:
    """The smallest change of one norm weight arrives."""
    model = dense_model(tied=True, seed=2)
    load(tied, model, 2)
    (before,) = sample(tied, PROMPT, num_samples=1, temperature=0.0, max_new_tokens=1)
    with torch.no_grad():
        model.get_parameter("model.norm.weight")[0] += 0.5
    load(tied, model, 3)
    (after,) = sample(tied, PROMPT, num_samples=1, temperature=0.0, max_new_tokens=1)
    assert before.rollout_logprobs != after.rollout_logprobs
    assert_logprobs_match(model, [after], PROMPT)


@pytest.mark.parametrize("in_flight", ["keep", "abort", "wait"])
def test_update_while_requests_run(tied: Running, in_flight: InFlight) -> None:
    """Early tokens are the old weights', later ones the new weights', each with its own logprob.

    Waited for, a request has one version, and those without a place yet have the new one.
    """
    before = tied.sampler.policy_version
    old, new = dense_model(tied=True, seed=3), dense_model(tied=True, seed=4)
    load(tied, old, before + 1)
    params = SamplingParams(max_new_tokens=240 if in_flight != "wait" else 60)

    async def update_in_flight() -> list[Completion]:
        tasks = [
            asyncio.create_task(tied.sampler.sample(PROMPT, num_samples=4, params=params))
            for _ in range(24)  # twelve times what fits at once: some run, some wait
        ]
        await asyncio.sleep(0.3)
        await tied.sampler.load_weights(
            checkpoint_weights(new), version=PolicyVersion(before + 2), in_flight=in_flight
        )
        return [completion for task in tasks for completion in await task]

    completions = tied.runner.run(update_in_flight())
    mixed = [c for c in completions if len(set(c.policy_versions)) == 2]
    assert bool(mixed) == (in_flight != "wait"), "no request was caught in flight"
    assert {version for c in completions for version in c.policy_versions} == {
        before + 1,
        before + 2,
    }
    for completion in completions:
        expected = {
            before + 1: reference_logprobs(old, PROMPT, completion),
            before + 2: reference_logprobs(new, PROMPT, completion),
        }
        by_version = [
            expected[version][place] for place, version in enumerate(completion.policy_versions)
        ]
        assert completion.finish_reason in {"stop", "length"}
        assert list(completion.policy_versions) == sorted(completion.policy_versions)
        assert largest_difference(completion.rollout_logprobs, by_version) < 1e-4


def load_stream(running: Running, stream: WeightStream, model: PreTrainedModel) -> StreamReport:
    """Give the sampler another model's weights, while they are exported."""

    async def offer_and_send() -> StreamReport:
        version = PolicyVersion(running.sampler.policy_version + 1)
        _, report = await asyncio.gather(
            running.sampler.load_published(stream.offer(version)),
            asyncio.to_thread(stream.send, checkpoint_weights(model)),
        )
        return report

    return running.runner.run(offer_and_send())


def stream_to(model: PreTrainedModel, carriage: Carriage) -> WeightStream:
    """A stream whose bucket is a fraction of the model, with all checks."""
    return WeightStream(
        tensor_headers(checkpoint_weights(model), dtype="float32"),
        dtype="float32",
        device=torch.device("cpu"),
        carriage=carriage,
        bucket_bytes=2**17,
        timeout_s=60.0,
        checksums=True,
    )


@pytest.mark.parametrize("carriage", ["shared", "broadcast"])
def test_streamed_weights(tied: Running, carriage: Carriage) -> None:
    """Through a bucket of 128 KiB, 600 KiB of weights arrive: twice, by one stream."""
    with stream_to(dense_model(tied=True, seed=0), carriage) as stream:
        for seed in (11, 12):
            model = dense_model(tied=True, seed=seed)
            report = load_stream(tied, stream, model)
            assert report.num_buckets > 5
            completions = sample(tied, PROMPT * 30)
            assert_logprobs_match(model, completions, PROMPT * 30)
            version = tied.sampler.policy_version
            assert all(set(c.policy_versions) == {version} for c in completions)


def test_a_stream_that_does_not_fit_is_refused_on_both_sides(tied: Running) -> None:
    """Nothing was sent: the sender hears why, and the old weights go on."""
    model = dense_model(tied=True, seed=13)
    load(tied, model, tied.sampler.policy_version + 1)
    with (
        stream_to(moe_model(seed=0), "shared") as stream,
        pytest.raises(ValueError, match=r"do not fit the model, nothing was loaded: .*experts"),
    ):
        load_stream(tied, stream, moe_model(seed=0))
    assert_logprobs_match(model, sample(tied, PROMPT), PROMPT)


def test_a_sender_that_is_gone_leaves_the_old_weights(tied: Running) -> None:
    """Before a weight is touched an update may fail without harm, and requests go on."""
    model = dense_model(tied=True, seed=14)
    version = PolicyVersion(tied.sampler.policy_version + 1)
    load(tied, model, version)
    with stream_to(model, "shared") as stream:
        offered = stream.offer(PolicyVersion(version + 1))
    with pytest.raises(ConnectionError, match=r"nothing was loaded, .* did not reach the sender"):
        tied.runner.run(tied.sampler.load_published(offered))
    assert tied.sampler.policy_version == version
    assert_logprobs_match(model, sample(tied, PROMPT), PROMPT)


def test_wrong_weights_are_refused_and_the_old_ones_answer(
    tied: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names, shapes, missing weights and versions are checked before a weight is touched."""
    monkeypatch.setattr("rollout_vllm.sampler._SHARED_MEMORY", tmp_path)
    model = dense_model(tied=True, seed=5)
    load(tied, model, 40)
    other = checkpoint_weights(dense_model(tied=True, seed=6))
    name, tensor = other[3]

    def refused(weights: list[tuple[str, torch.Tensor]], text: str) -> None:
        with pytest.raises(ValueError, match=text):
            tied.runner.run(tied.sampler.load_weights(weights, version=PolicyVersion(41)))
        assert tied.sampler.policy_version == 40
        assert_logprobs_match(model, sample(tied, PROMPT), PROMPT)

    refused([*other[:3], *other[4:]], rf"'{name}' is missing")
    refused([*other, ("model.layers.2.mlp.up_proj.weight", tensor)], r"up_proj.weight' is not in")
    refused([*other[:3], (name, tensor[:-1]), *other[4:]], rf"'{name}' has shape .* expected")
    refused(
        [*other, ("lm_head.weight", torch.zeros(VOCAB_SIZE, 64))],
        r"ties 'lm_head.weight' to 'model.embed_tokens.weight', .* different values",
    )
    with pytest.raises(TypeError, match=r"expected a torch.Tensor"):
        tied.runner.run(tied.sampler.load_weights([(name, [1.0])], version=PolicyVersion(41)))  # type: ignore[list-item]
    assert not list(tmp_path.iterdir())


def test_older_version_is_refused_only_while_requests_run(tied: Running) -> None:
    """Versions never fall along a completion; an idle sampler may go back, as recovery does."""
    model = dense_model(tied=True, seed=7)
    load(tied, model, 49)

    async def go_back() -> None:
        task = asyncio.create_task(
            tied.sampler.sample([5], num_samples=64, params=SamplingParams(max_new_tokens=250))
        )
        await asyncio.sleep(0.1)
        with pytest.raises(ValueError, match=r"version 49 or later while 1 requests run.*got 48"):
            await tied.sampler.load_weights(checkpoint_weights(model), version=PolicyVersion(48))
        await task

    tied.runner.run(go_back())
    load(tied, model, 48)
    assert tied.sampler.policy_version == 48


def test_published_files_are_removed_once_loaded(tied: Running, tmp_path: Path) -> None:
    """`keep` leaves them for the next sampler; damaged or vanished files are refused by name."""
    model = dense_model(tied=True, seed=8)
    published = publish_weights(
        checkpoint_weights(model),
        version=PolicyVersion(60),
        folder=tmp_path,
        dtype="float32",
        bucket_bytes=100_000,
    )
    assert len(published.files) > 2
    tied.runner.run(tied.sampler.load_published(published, keep=True))
    assert_logprobs_match(model, sample(tied, PROMPT), PROMPT)
    tied.runner.run(tied.sampler.load_published(published))
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"00000.safetensors is not there; a publication is rem"):
        tied.runner.run(tied.sampler.load_published(published))


def test_head_of_its_own_and_experts_get_new_weights(
    start_sampler: Callable[[PreTrainedModel], Running],
) -> None:
    """A42: an untied head and every expert answer with the new weights; fused names are refused."""
    running = start_sampler(moe_model(seed=0))
    assert_logprobs_match(moe_model(seed=0), sample(running, PROMPT), PROMPT)
    for version in (1, 2):
        model = moe_model(seed=version)
        if version == 1:
            load(running, model, version)
        else:
            with stream_to(model, "shared") as stream:
                load_stream(running, stream, model)
        completions = sample(running, PROMPT)
        assert_logprobs_match(model, completions, PROMPT)
        assert all(set(c.policy_versions) == {version} for c in completions)
    fused = [(name, tensor.detach()) for name, tensor in moe_model(seed=3).named_parameters()]
    with pytest.raises(ValueError, match=r"experts.gate_up_proj'.* not in the checkpoint"):
        running.runner.run(running.sampler.load_weights(fused, version=PolicyVersion(3)))


def test_untied_dense_model_gets_new_weights_and_its_death_is_named(
    start_sampler: Callable[[PreTrainedModel], Running],
) -> None:
    """A dead engine ends every waiting request with an error; the sampler then stays closed."""
    running = start_sampler(dense_model(tied=False, seed=0))
    model = dense_model(tied=False, seed=1)
    load(running, model, 1)
    assert_logprobs_match(model, sample(running, PROMPT), PROMPT)

    process_id = running.runner.run(running.sampler._engine.settings())["process"]["id"]
    assert isinstance(process_id, int)

    async def kill() -> list[list[Completion] | BaseException]:
        params = SamplingParams(max_new_tokens=250)
        tasks = [
            asyncio.create_task(running.sampler.sample([5], num_samples=64, params=params))
            for _ in range(4)
        ]
        await asyncio.sleep(0.1)
        os.kill(process_id, signal.SIGKILL)
        return await asyncio.gather(*tasks, return_exceptions=True)

    results = running.runner.run(kill())
    assert all(isinstance(result, SamplerDiedError) for result in results)
    with pytest.raises(SamplerDiedError, match=r"engine process died"):
        sample(running, PROMPT)
    with pytest.raises(SamplerClosedError):
        load(running, model, 2)
