"""Plans against transformers' models, against measured runs, and against themselves."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
)

from engine_fsdp import FsdpConfig, LoraConfig, MuonConfig, OptimConfig, plan
from engine_veomni import VeomniConfig
from parallel_state import ExtraParallelSizes, ParallelState
from rollout_vllm import VllmConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import plan as plan_command
from plan_assess import Assessment, Setting, assess
from plan_device import DEVICES, GIB, MEASURED_PRODUCT, DeviceFacts, find_device
from plan_layout import Candidate
from plan_memory import sampler_memory, trainer_memory
from plan_model import ModelFacts, facts_of, published_models, read_model
from plan_time import Seconds, Workload, communication_seconds, training_seconds, update_of
from run_plan import RunPlan, plan_run

ROOT = Path(__file__).resolve().parents[2]
OPTIM = OptimConfig(learning_rate=1e-6)
H200 = DEVICES["h200"]


def measured(name: str) -> Any:  # noqa: ANN401  # what a benchmark wrote
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def fsdp(**settings: Any) -> FsdpConfig:  # noqa: ANN401
    return FsdpConfig(model_path="model", optim=OPTIM, **settings)


def veomni(*, dp_size: int, ep: int = 1, **settings: Any) -> VeomniConfig:  # noqa: ANN401
    parallel = ParallelState(dp_size=dp_size, extra_parallel_sizes=ExtraParallelSizes.of(ep=ep))
    return VeomniConfig(model_path="model", optim=OPTIM, parallel=parallel, **settings)


def vllm(**settings: Any) -> VllmConfig:  # noqa: ANN401
    given = {"max_model_len": 4096, "device": "cuda", "gpu_memory_utilization": 0.8, **settings}
    return VllmConfig(model="model", **given)


def planned(engine: FsdpConfig | VeomniConfig, model: ModelFacts, **settings: Any) -> RunPlan:  # noqa: ANN401
    given: dict[str, Any] = {
        "sampler": vllm(enable_sleep=True),
        "sampler_replicas": engine.parallel.world_size,
        "device": H200,
        "colocated": True,
        "micro_batch_tokens": 16384,
        "sequences_in_flight": 512,
        "mean_prompt_tokens": 256.0,
        "mean_completion_tokens": 1024.0,
        "groups_per_step": 64,
        "group_size": 8,
        **settings,
    }
    return plan_run(engine=engine, model=model, **given)


def with_layers(model: ModelFacts, num_layers: int) -> ModelFacts:
    config = {**model.config, "num_hidden_layers": num_layers}
    return facts_of(config, name=model.name, where="test")


# --- the model ------------------------------------------------------------------------------------

TINY = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MIXTURE = {
    **TINY,
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}


EYES = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 64,
    "num_position_embeddings": 9,
    "deepstack_visual_indexes": [0, 1],
}


TINY_MODELS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig.from_dict({**TINY, "tie_word_embeddings": False}),
    "llama with biases": LlamaConfig.from_dict(
        {**TINY, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
    ),
    "qwen2": Qwen2Config.from_dict({**TINY, "tie_word_embeddings": True}),
    "qwen3 with biases": Qwen3Config.from_dict({**TINY, "head_dim": 16, "attention_bias": True}),
    "mixture, first layer dense": Qwen3MoeConfig.from_dict({**MIXTURE, "mlp_only_layers": [0]}),
    "mixture, every second layer": Qwen3MoeConfig.from_dict({**MIXTURE, "decoder_sparse_step": 2}),
    "mixture that sees": Qwen3VLMoeConfig(text_config=MIXTURE, vision_config=EYES),
    "dense model that sees": Qwen3VLConfig(
        text_config={**TINY, "head_dim": 16}, vision_config=EYES, tie_word_embeddings=True
    ),
}


@pytest.mark.parametrize("name", [*TINY_MODELS, *published_models()])
def test_weights_are_those_of_transformers(name: str) -> None:
    """Exactly, by kind, for every kind of model that is known."""
    if name in TINY_MODELS:
        config = TINY_MODELS[name]
        facts = facts_of(config.to_dict(), name="tiny", where="test")
    else:
        facts = read_model(name)
        given: dict[str, Any] = dict(facts.config)
        config = AutoConfig.for_model(**given)
    with torch.device("meta"):
        sees = hasattr(config, "vision_config")
        kind: Any = AutoModelForImageTextToText if sees else AutoModelForCausalLM
        model = kind.from_config(config)
    found = dict.fromkeys(attrs.asdict(facts.counts), 0)
    for path, parameter in model.named_parameters():
        kinds = {
            "vision": ".visual.",
            "embedding": "embed_tokens",
            "head": "lm_head",
            "norms": "norm",
            "attention": "self_attn",
            "router": "mlp.gate.",
            "experts": "experts",
            "dense_mlp": "mlp",
        }
        kind = next(kind for kind, part in kinds.items() if part in path)
        found[kind] += parameter.numel()
    assert attrs.asdict(facts.counts) == found


def test_published_models_have_the_published_number_of_weights() -> None:
    """1.7, 8.2, 32.8, 30.5 and 31.1 billion, 3.3 of the mixtures for a token: the model cards."""
    seen = 0
    for name in published_models():
        published = json.loads((ROOT / "examples/model_facts" / f"{name}.json").read_text())
        facts = read_model(f"Qwen/{name}")
        assert f"{facts.counts.total / 1e9:.1f}B" == published["published"]["total_parameters"]
        active = published["published"].get("active_parameters")
        # the card's 3.3 leaves the fifth hundredth out: 3.353
        assert active is None or abs(facts.active / 1e9 - float(active[:-1])) < 0.06
        seen += 1
    assert seen == 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "expected JSON"),
        ("[]", "expected a table of settings, got list"),
        ('{"model_type": "gpt2"}', "model_type 'gpt2' cannot be counted here; known: llama, qwen2"),
        ('{"model_type": "qwen3"}', "expected num_hidden_layers, a whole number of at least 1"),
        (
            json.dumps({**MIXTURE, "model_type": "qwen3_moe", "num_experts_per_tok": 7}),
            "num_experts_per_tok 7 is more than num_experts 6",
        ),
        (
            json.dumps({**TINY, "model_type": "qwen2", "vocab_size": "many"}),
            "expected vocab_size, a whole number of at least 1, got 'many'",
        ),
    ],
)
def test_a_file_that_is_no_known_model_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json: ") as caught:
        read_model(str(tmp_path))
    assert message in str(caught.value)


def test_a_model_that_is_not_there_is_named() -> None:
    with pytest.raises(FileNotFoundError, match=r"no-such: expected a folder .*, qwen3-8b"):
        read_model("no-such")


# --- memory, against measured runs ----------------------------------------------------------------


def test_memory_of_a_dense_model_is_that_of_a_measured_run() -> None:
    """Qwen3-1.7B, 16384 tokens, two micro-batches on an H200: within 2 %."""
    (run,) = measured("fsdp_memory")
    found = trainer_memory(fsdp(), read_model("qwen3-1.7b"), tokens=16384, num_micro_batches=2)
    assert found.peak == pytest.approx(run["forward_backward"]["peak"], rel=0.02)
    assert sum(found.rows().values()) == found.peak
    # after a step what stays are weights and moments
    assert found.between_steps == pytest.approx(run["logprobs"]["after"], rel=0.01)


@pytest.mark.parametrize(("name", "ranks"), [("fsdp_train", 1), ("fsdp_train_two_ranks", 2)])
def test_memory_of_compiled_blocks_is_that_of_measured_runs(name: str, ranks: int) -> None:
    """Qwen3-1.7B, one micro-batch of 32768 tokens, on one and two H200: within 3 %."""
    engine = fsdp(compile_blocks=True, kept_logits_gib=6.0, parallel=ParallelState(dp_size=ranks))
    found = trainer_memory(engine, read_model("qwen3-1.7b"), tokens=32768, num_micro_batches=1)
    assert found.peak / 1e9 == pytest.approx(measured(name)["engine peak GB"], rel=0.03)


VARIANTS = [(name, variant) for name, variant in measured("veomni_step")["variants"].items()]


def mixture_of(name: str) -> tuple[VeomniConfig, ModelFacts]:
    """Configuration and model of a run in veomni_step.json, by its name."""
    degree, kernel, memory = name.split(", ")
    engine = veomni(
        dp_size=2,
        ep=int(degree.removeprefix("ep ")),
        expert_kernel=kernel,
        activation_checkpointing=memory == "checkpointed",
    )
    return engine, with_layers(read_model("qwen3-30b-a3b"), 12)


@pytest.mark.parametrize(("name", "run"), VARIANTS)
def test_memory_of_experts_is_that_of_measured_runs(name: str, run: dict[str, float]) -> None:
    """12 layers of Qwen3-30B-A3B, 16384 tokens a rank, one micro-batch, two H200: within 8 %."""
    engine, model = mixture_of(name)
    found = trainer_memory(engine, model, tokens=16384, num_micro_batches=1)
    assert found.peak / GIB == pytest.approx(run["peak_gib"], rel=0.08)


def test_two_layers_say_what_many_take(tmp_path: Path) -> None:
    """Of 8B weights that are checkpointed: within 2 % of engine_fsdp.plan on all 36 layers."""
    model = read_model("qwen3-8b")
    model.write_config(tmp_path)
    engine = fsdp(activation_checkpointing="full", parallel=ParallelState(dp_size=8))
    whole = plan(attrs.evolve(engine, model_path=str(tmp_path)), tokens=16384)
    found = trainer_memory(engine, model, tokens=16384, num_micro_batches=2)
    assert found.activations == whole.activations
    assert found.peak == pytest.approx(whole.peak, rel=0.02)


def test_state_of_the_trainer_by_hand() -> None:
    """16 bytes a weight over the shards; adapters and Muon take less; the host what is parked."""
    model = read_model("qwen3-8b")
    total = 8_190_735_360
    sharded = fsdp(parallel=ParallelState(dp_size=8, dp_replicate_size=2))
    found = trainer_memory(sharded, model, tokens=1024, num_micro_batches=2)
    assert found.weights == found.gradient == 4 * total // 4
    assert found.moments == found.host - found.weights == 8 * total // 4
    # rank 16: per layer q 2 x 4096, k and v 4096 + 1024, o 2 x 4096, three of 4096 + 12288
    adapters = 16 * 36 * (2 * 8192 + 2 * 5120 + 3 * 16384)
    lora = trainer_memory(fsdp(lora=LoraConfig()), model, tokens=1024, num_micro_batches=2)
    assert (lora.gradient, lora.moments) == (4 * adapters, 8 * adapters)
    muon = trainer_memory(fsdp(muon=MuonConfig()), model, tokens=1024, num_micro_batches=2)
    matrices = 36 * (2 * 4096 * (4096 + 1024) + 3 * 4096 * 12288)
    assert muon.moments == 4 * (2 * total - matrices)
    offloaded = fsdp(offload="parameters")
    away = trainer_memory(offloaded, model, tokens=1024, num_micro_batches=2)
    assert (away.weights, away.gradient, away.moments, away.host) == (0, 0, 0, 16 * total)


@pytest.mark.parametrize("kept_logits_gib", [0.25, 6.0])
@pytest.mark.parametrize("num_layers", [1, 36])
def test_inputs_on_the_host_are_not_on_the_device(
    tmp_path: Path, num_layers: int, kept_logits_gib: float
) -> None:
    """Of many blocks what `engine_fsdp.plan` says of two; of the host a buffer for each block.

    20000 tokens of 4096 numbers in bfloat16 are 156.25 MiB, for which torch pins 256.
    """
    model = with_layers(read_model("qwen3-8b"), num_layers)
    model.write_config(tmp_path)
    engine = fsdp(
        activation_checkpointing="full",
        offload_activations=True,
        kept_logits_gib=kept_logits_gib,
        parallel=ParallelState(dp_size=8),
    )
    whole = plan(attrs.evolve(engine, model_path=str(tmp_path)), tokens=20000)
    found = trainer_memory(engine, model, tokens=20000, num_micro_batches=2)
    assert (found.activations, found.head, found.working) == (
        *(whole.activations, whole.head, whole.working),
    )
    assert found.inputs_on_host == num_layers * 256 * 2**20
    there = attrs.evolve(engine, offload_activations=False)
    assert trainer_memory(there, model, tokens=20000, num_micro_batches=2).inputs_on_host == 0


def test_inputs_of_experts_on_the_host() -> None:
    """By formula: of 48 layers one input stays, of 16384 tokens of 2048 numbers in bfloat16."""
    engine = fsdp(activation_checkpointing="full", parallel=ParallelState(dp_size=8))
    model = read_model("qwen3-30b-a3b")
    there, away = (
        trainer_memory(each, model, tokens=16384, num_micro_batches=2)
        for each in (engine, attrs.evolve(engine, offload_activations=True))
    )
    assert away.activations == 16384 * 2048 * 2
    assert there.activations == 48 * away.activations
    assert there.peak - away.peak == 47 * away.activations
    assert away.inputs_on_host == there.activations  # 64 MiB each, a power of two


@pytest.mark.parametrize(
    ("name", "matrices"),
    [
        ("qwen3-8b", 36 * (2 * 4096 * (4096 + 1024) + 3 * 4096 * 12288)),
        # queries of 4096, keys and values of 512, 128 experts of 768 and their router
        ("qwen3-30b-a3b", 48 * (2 * 2048 * (4096 + 512) + 128 * (3 * 2048 * 768 + 2048))),
    ],
)
def test_moments_in_8_bits_by_hand(name: str, matrices: int) -> None:
    """Two bytes and two shares of 256 of a float32 for each weight of the blocks' matrices.

    Embedding, head and norms keep 8; the host gets what is parked.
    """
    model, parallel = read_model(name), ParallelState(dp_size=8)
    engine = fsdp(eight_bit_moments=True, activation_checkpointing="full", parallel=parallel)
    found = trainer_memory(engine, model, tokens=1024, num_micro_batches=2)
    others = model.counts.total - matrices
    assert found.moments == (8 * others + 2 * matrices + 2 * 4 * matrices // 256) // 8
    assert found.host == found.weights + found.moments
    assert found.weights == found.gradient == 4 * model.counts.total // 8


def test_moments_in_8_bits_are_those_of_the_engine(tmp_path: Path) -> None:
    """`engine_fsdp.plan` has as many, also where some rows do not divide: 384 = 256 + 128."""
    rows = {"hidden_size": 256, "intermediate_size": 384, "model_type": "qwen2"}
    model = facts_of({**TINY, **rows}, name="tiny", where="test")
    model.write_config(tmp_path)
    engine = fsdp(eight_bit_moments=True)
    whole = plan(attrs.evolve(engine, model_path=str(tmp_path)), tokens=64)
    found = trainer_memory(engine, model, tokens=64, num_micro_batches=1)
    assert found.moments == whole.moments < 8 * model.counts.total


def test_cache_of_a_token_by_hand() -> None:
    """Qwen3-8B: keys and values of 36 layers of 8 heads of 128 in bfloat16, 144 KiB."""
    model = read_model("qwen3-8b")
    one = sampler_memory(vllm(), model, memory_bytes=H200.memory_bytes)
    assert one.cache_bytes_per_token == 2 * 36 * 8 * 128 * 2 == 144 * 1024
    assert one.weights == 2 * 8_190_735_360
    assert one.total == int(0.8 * H200.memory_bytes)
    # 16 devices and 8 heads: each head is there twice
    wide = vllm(tensor_parallel_size=16, gpu_memory_utilization=None, kv_cache_gib=9.0)
    sixteen = sampler_memory(wide, model, memory_bytes=H200.memory_bytes)
    assert sixteen.cache_bytes_per_token == 18 * 1024
    assert sixteen.num_sequences(1024.0) == 9 * 2**30 // (18 * 2**20)


def test_experts_of_a_sampler_are_spread() -> None:
    """Qwen3-30B-A3B over four devices: a quarter of its experts on each, with either axis."""
    model = read_model("qwen3-30b-a3b")
    whole = sampler_memory(vllm(), model, memory_bytes=H200.memory_bytes).weights
    assert whole == 61_064_245_248
    by_tensor = vllm(tensor_parallel_size=4)
    by_expert = vllm(tensor_parallel_size=2, data_parallel_size=2, expert_parallel_size=4)
    found = [
        sampler_memory(sampler, model, memory_bytes=H200.memory_bytes).weights
        for sampler in (by_tensor, by_expert)
    ]
    small = 2 * (model.counts.router + model.counts.norms)
    assert found[0] == (whole - small) // 4 + small
    assert found[1] - found[0] == 2 * (whole - 2 * model.counts.experts - small) // 8


# --- bytes and seconds, against measured runs -----------------------------------------------------


def work_of(*, tokens: int, length: int, micro_batch_tokens: int) -> Workload:
    return Workload(
        num_sequences=tokens // length,
        prompt_tokens=1.0,
        completion_tokens=length - 1.0,
        max_tokens=length,
        in_flight=1,
        group_size=1,
        logprob_passes=0,
        micro_batch_tokens=micro_batch_tokens,
    )


def middle(seconds: Seconds) -> float:
    return (seconds.low + seconds.high) / 2


@pytest.mark.parametrize(
    ("name", "ranks", "tolerance"), [("fsdp_train", 1, 0.03), ("fsdp_train_two_ranks", 2, 0.08)]
)
def test_seconds_of_a_dense_step_are_measured_ones(name: str, ranks: int, tolerance: float) -> None:
    """The share is that of one H200; two of them follow from it."""
    engine = fsdp(compile_blocks=True, kept_logits_gib=6.0, parallel=ParallelState(dp_size=ranks))
    work = work_of(tokens=ranks * 32768, length=2048, micro_batch_tokens=32768)
    found = training_seconds(engine, read_model("qwen3-1.7b"), H200, work)
    run = measured(name)
    assert middle(found) == pytest.approx(run["engine step s"], rel=tolerance)
    assert found.low < run["engine step s"] < found.high


@pytest.mark.parametrize(("name", "run"), VARIANTS)
def test_seconds_of_a_step_with_experts_are_measured_ones(name: str, run: dict[str, float]) -> None:
    engine, model = mixture_of(name)
    work = work_of(tokens=2 * 16384, length=2048, micro_batch_tokens=16384)
    found = training_seconds(engine, model, H200, work)
    assert middle(found) == pytest.approx(run["step_s"], rel=0.05)
    assert found.low < run["step_s"] < found.high


def test_the_product_that_shares_are_of_is_the_measured_one() -> None:
    ceiling = measured("fsdp_train")["ceiling TFLOP per s"]
    assert ceiling * 1e12 == pytest.approx(MEASURED_PRODUCT, rel=1e-3)
    machine = measured("veomni_step")["machine"]
    assert H200.gather_bytes_per_s / 1e9 == pytest.approx(machine["gather_gbs"], rel=1e-2)
    (run,) = measured("fsdp_memory")
    moved = run["logprobs"]["after"] / run["to_device_seconds"]
    assert H200.host_bytes_per_s == pytest.approx(moved, rel=1e-2)


def test_communication_by_hand() -> None:
    """Per micro-batch: two gathers in bfloat16 and a reduction in float32 of what others hold."""
    model, total = read_model("qwen3-8b"), 8_190_735_360
    work = work_of(tokens=8 * 32768, length=2048, micro_batch_tokens=16384)
    sharded = fsdp(parallel=ParallelState(dp_size=8))
    seconds = communication_seconds(sharded, model, H200, work)
    assert seconds == pytest.approx(2 * (7 / 8 * total * (2 + 2 + 4)) / 208e9)
    # two copies: each gathers among four, and half of the gradients come and go between them
    copies = fsdp(parallel=ParallelState(dp_size=8, dp_replicate_size=2))
    seconds = communication_seconds(copies, model, H200, work)
    assert seconds == pytest.approx(2 * (3 / 4 * total * 8 + 2 * 4 * total / 4 / 2) / 208e9)
    # two nodes: all of it goes over the network
    nodes = fsdp(parallel=ParallelState(dp_size=16))
    seconds = communication_seconds(nodes, model, H200, work)
    assert seconds == pytest.approx(15 / 16 * total * 8 / 50e9)
    # experts over two ranks, nothing to gather of them; their tokens travel four times
    mixture = with_layers(read_model("qwen3-30b-a3b"), 12)
    work = work_of(tokens=32768, length=2048, micro_batch_tokens=16384)
    seconds = communication_seconds(veomni(dp_size=2, ep=2), mixture, H200, work)
    gathered = (mixture.counts.total - mixture.counts.experts) / 2 * 8
    travelled = 4 * 16384 * 8 * 12 * 2048 * 2 / 2
    assert seconds == pytest.approx((gathered + travelled) / 208e9)


def test_an_update_sends_what_measured_updates_sent() -> None:
    """57 GiB within an H200 in 0.60 to 0.83 s, 16.4 GB from one to another in 0.06 s."""
    run = measured("weight_update_30b_a3b_h200")
    update = update_of(
        veomni(dp_size=1), read_model("qwen3-30b-a3b"), H200, colocated=True, num_devices=1
    )
    assert update.num_bytes == run["rounds"][0]["gib"] * GIB
    assert update.seconds.low == pytest.approx(run["median_total_s"], rel=0.01)
    assert max(each["total_s"] for each in run["rounds"]) < update.seconds.high
    run = measured("weight_stream_8b_2xh200")
    update = update_of(fsdp(), read_model("qwen3-8b"), H200, colocated=False, num_devices=2)
    assert update.num_bytes == run["gb"] * 1e9
    assert update.seconds.low == pytest.approx(sorted(run["seconds"])[2], rel=0.01)


def test_an_export_takes_what_measured_exports_took() -> None:
    """15 GiB of two ranks."""
    for _, run in VARIANTS:
        engine, model = mixture_of("ep 2, grouped_mm, checkpointed")
        update = update_of(engine, model, H200, colocated=True, num_devices=2)
        export = update.seconds.high - 0.3 - update.num_bytes / update.bytes_per_s
        assert update.num_bytes / GIB == pytest.approx(run["export_gib"], rel=1e-6)
        assert run["export_s"] < export * 1.01


# --- the plan -------------------------------------------------------------------------------------


def test_a_run_that_fits_is_not_refused() -> None:
    """Its figures add up, and nothing slower is recommended."""
    run = planned(fsdp(compile_blocks=True), read_model("qwen3-1.7b"))
    assert run.fits
    assert run.refusals == ()
    given = run.given
    step = given.training.plus(given.sampling.seconds).plus(given.update.seconds)
    assert given.step == pytest.approx(step.plus(given.parking))
    assert run.recommended is not None
    assert run.recommended.assessment.step.middle <= given.step.middle


@pytest.mark.parametrize(
    ("engine", "name", "device"),
    [
        (fsdp(parallel=ParallelState(dp_size=8)), "qwen3-8b", "h200"),
        (fsdp(parallel=ParallelState(dp_size=8)), "qwen3-8b", "a100-80g"),
        (veomni(dp_size=8, ep=8), "qwen3-30b-a3b", "h200"),
        (fsdp(parallel=ParallelState(dp_size=16)), "qwen3-32b", "ascend-910c"),
    ],
)
def test_what_does_not_fit_says_what_would(
    engine: FsdpConfig | VeomniConfig, name: str, device: str
) -> None:
    """The refusal has the gap; the layout that is recommended has none."""
    run = planned(engine, read_model(name), device=find_device(device))
    assert not run.fits
    (refusal,) = run.refusals
    fullest = max(run.given.phases, key=lambda phase: phase.missing)
    missing = run.given.missing / GIB
    assert f"does not fit by {missing:.1f} GiB ({fullest.name}: " in refusal.problem
    assert fullest.total - fullest.usable == run.given.missing > 0
    assert "engine.activation_checkpointing = " in refusal.remedy or "layout" in refusal.remedy
    assert run.recommended is not None
    assert run.recommended.assessment.fits


def test_the_remedy_is_enough() -> None:
    """And the one before it, which costs less, is not."""
    model = read_model("qwen3-8b")
    engine = fsdp(parallel=ParallelState(dp_size=8))
    (refusal,) = planned(engine, model).refusals
    assert refusal.remedy == 'engine.activation_checkpointing = "selective"'
    assert planned(attrs.evolve(engine, activation_checkpointing="selective"), model).fits
    # half of the memory: what is enough there is not enough here
    h100 = find_device("h100-80g")
    (refusal,) = planned(engine, model, device=h100).refusals
    assert refusal.remedy == 'engine.activation_checkpointing = "selective"'
    mended = attrs.evolve(engine, activation_checkpointing="selective")
    assert planned(mended, model, device=h100).fits


def test_a_model_that_no_layout_holds_says_how_many_devices() -> None:
    run = planned(veomni(dp_size=1), read_model("qwen3-30b-a3b"), device=find_device("h100-80g"))
    assert run.recommended is None
    (refusal,) = run.refusals
    assert "2 devices: engine-veomni dp 2 checkpointed parameters on the host" in refusal.remedy
    assert "nothing: no layout of these devices fits" in str(run)


def test_weights_on_the_host_make_one_device_enough() -> None:
    """A step is slow then; without it a device of 131 GiB is 400 too small."""
    run = planned(veomni(dp_size=1), read_model("qwen3-30b-a3b"))
    assert run.recommended is not None
    assert run.recommended.assessment.candidate.engine.offload == "parameters"


def test_all_refusals_are_listed() -> None:
    """Settings that go wrong each by itself, each with its numbers."""
    run = planned(
        veomni(dp_size=4, ep=3 + 1),
        read_model("qwen3-1.7b"),
        sampler=vllm(max_model_len=65536, tensor_parallel_size=3),
        sampler_replicas=2,
        micro_batch_tokens=32768,
    )
    problems = "\n".join(refusal.problem for refusal in run.refusals)
    assert "extra_parallel_sizes['ep'] = 4 has no effect on a model without experts" in problems
    assert "a micro-batch of 32768 tokens holds no sequence of max_model_len = 65536" in problems
    assert "sampler.tensor_parallel_size = 3 must divide the model's 16 heads" in problems
    assert "max_position_embeddings = 40960" in problems
    assert "the trainer has 4 devices and the samplers 6" in problems


def test_engine_veomni_refuses_in_its_own_words() -> None:
    run = planned(veomni(dp_size=4), read_model("qwen3-1.7b"))
    assert "expected tie_word_embeddings False" in run.refusals[0].problem


def test_engine_fsdp_refuses_moments_in_8_bits_in_its_own_words() -> None:
    """A model whose rows are all shorter than the elements that share a scale."""
    model = facts_of({**TINY, "model_type": "qwen2"}, name="tiny", where="test")
    sampler = vllm(max_model_len=2048, enable_sleep=True)
    run = planned(fsdp(eight_bit_moments=True), model, sampler=sampler)
    assert "multiples of the 256 elements that share a scale, got rows of" in "".join(
        refusal.problem for refusal in run.refusals
    )


def test_the_host_is_shown_what_waits_there() -> None:
    """Beside what is parked while a sampler has the device; without turns nothing else is there."""
    model = read_model("qwen3-1.7b")
    engine = fsdp(activation_checkpointing="full", offload_activations=True)
    turns, apart = (planned(engine, model, colocated=colocated) for colocated in (True, False))
    # 28 blocks of 16384 x 2048 x 2 bytes: 1.75 GiB; 12 bytes of each of 1.72 billion weights: 19.2
    assert "on the host         21.0 GiB of pinned memory" in str(turns)
    assert "on the host         1.8 GiB of pinned memory" in str(apart)
    assert "checkpointing full inputs on the host" in str(apart)
    assert "copies to the host are taken to be hidden" in str(
        planned(attrs.evolve(engine, compile_blocks=True), model)
    )


def test_a_cache_without_room_for_one_sequence_is_refused() -> None:
    """vLLM does not start without; 4096 tokens of 144 KiB are 0.56 GiB."""
    sampler = vllm(gpu_memory_utilization=None, kv_cache_gib=0.25, enable_sleep=True)
    run = planned(fsdp(), read_model("qwen3-8b"), sampler=sampler, colocated=False)
    assert run.given.shortfall == 4096 * 144 * 1024 - 2**28
    assert not run.fits
    # the trainer of all 8B weights does not fit on one device either
    assert "does not fit by" in run.refusals[0].problem
    small = planned(
        fsdp(activation_checkpointing="full"),
        read_model("qwen3-1.7b"),
        sampler=vllm(gpu_memory_utilization=None, kv_cache_gib=0.25),
        colocated=False,
    )
    (refusal,) = small.refusals
    # 28 layers of 8 heads: 112 KiB a token, 0.4375 GiB
    assert "the key-value cache is 0.2 GiB too small for one sequence" in refusal.problem
    assert refusal.remedy == "sampler.kv_cache_gib = 0.5"


def test_turns_and_overlap_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="cannot work at the same time; choose one of the two"):
        planned(fsdp(), read_model("qwen3-1.7b"), overlapped=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mean_completion_tokens": float("nan")}, "mean_completion_tokens: expected at least 1"),
        ({"groups_per_step": 0}, "groups_per_step: expected at least 1, got 0"),
        ({"mean_completion_tokens": 4000.0}, "are longer than the sampler's max_model_len = 4096"),
    ],
)
def test_numbers_that_make_no_run_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        planned(fsdp(), read_model("qwen3-1.7b"), **settings)


def weigh(engine: FsdpConfig | VeomniConfig, model: ModelFacts, *, colocated: bool) -> Assessment:
    work = work_of(tokens=512 * 1024, length=1024, micro_batch_tokens=16384)
    setting = Setting(
        model=model,
        device=H200,
        work=attrs.evolve(work, in_flight=512),
        colocated=colocated,
        overlapped=False,
        reference=True,
    )
    candidate = Candidate(
        engine=engine, sampler=vllm(), sampler_replicas=8, micro_batch_tokens=16384
    )
    return assess(candidate, setting)


def test_who_has_the_device_when() -> None:
    """Asleep or not, parked or not: what stays is counted in the other's phase."""
    model = read_model("qwen3-8b")
    engine = fsdp(parallel=ParallelState(dp_size=8))
    training, sampling, update = weigh(engine, model, colocated=True).phases
    # a sampler that does not sleep keeps its weights and its cache while the trainer trains
    assert training.parts["key-value cache"] == sampling.parts["key-value cache"] > 0
    # a trainer that is parked keeps nothing but its library's workspace
    assert {"weights", "moments", "reference"}.isdisjoint(sampling.parts)
    assert update.parts["moments"] == 8 * model.counts.total // 8
    assert training.parts["reference"] == 4 * model.counts.total // 8
    assert update.parts["reference"] == 4 * model.counts.total // 8
    apart = weigh(engine, model, colocated=False).phases
    assert [phase.name for phase in apart] == ["trainer", "sampler"]
    assert "key-value cache" not in apart[0].parts


@pytest.mark.parametrize("device", [*DEVICES, "cpu"])
def test_a_plan_is_a_table_of_100_columns(device: str) -> None:
    """On every device; it says what was not checked, and where nothing was measured at all."""
    facts: DeviceFacts = find_device(device)
    sampler = vllm(
        device="cpu" if device == "cpu" else "cuda",
        tensor_parallel_size=1 if device == "cpu" else 2,
    )
    run = planned(
        fsdp(parallel=ParallelState(dp_size=2)),
        read_model("qwen3-1.7b"),
        device=facts,
        sampler=sampler,
        sampler_replicas=1,
        reference=True,
    )
    text = str(run)
    assert max(map(len, text.splitlines())) <= 100
    assert "not checked" in text
    assert (f"nothing was measured on {device}" in text) == (device not in ("h200", "cpu"))
    assert facts.source
    assert "training (with 1 more pass)" in text


# --- the command ----------------------------------------------------------------------------------


def test_the_command_prints_a_plan_and_says_whether_it_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a folder's config.json; a setting that does not exist is named."""
    config = {**TINY, "model_type": "qwen2", "max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(json.dumps(config))
    given = ["--model", str(tmp_path), "--engine", "fsdp", "--device", "h200", "--devices", "2"]
    done = plan_command.main([*given, "engine.activation_checkpointing=full", "work.group_size=4"])
    printed = capsys.readouterr().out
    assert done == 0, printed
    assert f"{tmp_path.name}: 0.00B weights" in printed
    assert "checkpointing full" in printed
    assert "256 sequences" in printed
    assert plan_command.main([*given, "sampler.max_model_len=8192"]) == 1
    assert "more than the model's max_position_embeddings = 4096" in capsys.readouterr().out
    assert plan_command.main([*given, "engine.activation_checkpointin=full"]) == 2
    assert "did you mean activation_checkpointing?" in capsys.readouterr().err
    assert plan_command.main([*given[:-1], "0"]) == 2
    assert "--devices: expected a whole number of at least 1, got 0" in capsys.readouterr().err
    assert plan_command.main([*given, "engine.parallel.dp_size=3"]) == 2
    assert "but engine.parallel makes 3 ranks" in capsys.readouterr().err
    assert plan_command.main([*given, "sampler.tensor_parallel_size=5"]) == 2
    assert "devices for samplers of 5 devices each" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_runs_by_itself() -> None:
    """It finds the examples, wherever it is called from."""
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "plan.py", "--help"],
        cwd="/",
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "engine.kept_logits_gib" in done.stdout
    assert "work.groups_per_step" in done.stdout


def row(name: str, peak: float, memory: int, step: float, seconds: Seconds) -> str:
    """A line of the page's table."""
    predicted = f"{seconds.low:.2f} to {seconds.high:.2f}"
    return f"| {name} | {peak / GIB:.1f} | {memory / GIB:.1f} | {step:.2f} | {predicted} |"


def test_the_page_about_memory_shows_what_is_predicted() -> None:
    """docs/memory.md holds measured and predicted figures of every run, as they are now."""
    dense, text = read_model("qwen3-1.7b"), (ROOT / "docs" / "memory.md").read_text()
    (run,) = measured("fsdp_memory")
    memory = trainer_memory(fsdp(), dense, tokens=16384, num_micro_batches=2).peak
    peak = run["forward_backward"]["peak"]
    first = f"| Qwen3-1.7B, 2 x 16384 tokens | {peak / GIB:.1f} | {memory / GIB:.1f} | | |"
    rows = [first]
    for name, ranks in (("fsdp_train", 1), ("fsdp_train_two_ranks", 2)):
        parallel = ParallelState(dp_size=ranks)
        engine = fsdp(compile_blocks=True, kept_logits_gib=6.0, parallel=parallel)
        work = work_of(tokens=ranks * 32768, length=2048, micro_batch_tokens=32768)
        seconds = training_seconds(engine, dense, H200, work)
        memory = trainer_memory(engine, dense, tokens=32768, num_micro_batches=1).peak
        run = measured(name)
        shown = f"Qwen3-1.7B, 32768 tokens, compiled, {ranks} GPU{'s' if ranks > 1 else ''}"
        rows.append(row(shown, 1e9 * run["engine peak GB"], memory, run["engine step s"], seconds))
    for name, run in VARIANTS:
        mixture, model = mixture_of(name)
        work = work_of(tokens=2 * 16384, length=2048, micro_batch_tokens=16384)
        seconds = training_seconds(mixture, model, H200, work)
        memory = trainer_memory(mixture, model, tokens=16384, num_micro_batches=1).peak
        shown = f"12 layers of 30B-A3B, {name}"
        rows.append(row(shown, GIB * run["peak_gib"], memory, run["step_s"], seconds))
    assert [line for line in rows if line not in text] == []
