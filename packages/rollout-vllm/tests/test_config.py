"""What the config accepts, what it refuses, and what vLLM is given."""

import subprocess
import sys
from pathlib import Path

import pytest

from rl_contracts.config import load_config
from rollout_vllm import VllmConfig
from rollout_vllm.device_rules import check_device_rules
from rollout_vllm.versions import argument_names


def config(**changes: object) -> VllmConfig:
    """A small valid config with changes."""
    valid: dict[str, object] = {"model": "m", "max_model_len": 64, "kv_cache_gib": 1.0}
    return VllmConfig(**(valid | changes))  # type: ignore[arg-type]


def test_import_loads_no_vendor() -> None:
    """`import rollout_vllm` loads neither vLLM nor torch."""
    code = (
        "import sys, rollout_vllm; "
        "print(sorted({'vllm', 'torch', 'transformers', 'safetensors'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("value", [False, None, True])
@pytest.mark.parametrize("name", ["enable_prefix_caching", "enable_chunked_prefill"])
def test_explicit_false_survives(name: str, value: bool | None) -> None:  # noqa: FBT001
    """A45: False and True reach vLLM as they are; None leaves the decision to vLLM."""
    arguments = config(**{name: value}).effective_engine_args()
    if value is None:
        assert name not in arguments
    else:
        assert arguments[name].value is value
        assert arguments[name].origin == f"VllmConfig.{name}"


def test_effective_arguments_name_their_origin() -> None:
    """Each argument says which field, which rule or whose free argument set it."""
    arguments = config(kv_cache_gib=0.5, engine_args={"block_size": 64}).effective_engine_args()
    assert arguments["kv_cache_memory_bytes"].value == 2**29
    assert arguments["kv_cache_memory_bytes"].origin == "VllmConfig.kv_cache_gib"
    assert arguments["block_size"].origin == "VllmConfig.engine_args"
    assert arguments["logprobs_mode"].value == "processed_logprobs"
    assert arguments["logprobs_mode"].origin.startswith("fixed: logprobs are those of the distrib")
    assert arguments["trust_remote_code"].value is False
    assert "gpu_memory_utilization" not in arguments


@pytest.mark.parametrize(
    ("engine_args", "text"),
    [
        (
            {"enable_expert_parallel": True},
            r"use VllmConfig.expert_parallel_size: a size above 1 implies enable_expert_parallel",
        ),
        ({"max_model_len": 8}, r"'max_model_len' cannot be given here: use VllmConfig.max_model"),
        ({"logprobs_mode": "raw_logprobs"}, r"'logprobs_mode' cannot be given here: it is fixed"),
        ({"load_format": "pt"}, r"use VllmConfig.load_format \(pickled weights can run code\)"),
        ({"blok_size": 16}, r"'blok_size' is not an argument of the installed vLLM; nearest: 'bl"),
        ({"max_num_seq": 4}, r"nearest: 'max_num_seqs' \(use VllmConfig.max_num_seqs\)"),
        ({"disable_log_requests": True}, r"'disable_log_requests' is not an argument of the inst"),
        ({"enable_lora": True}, r"'enable_lora' cannot be given here: use VllmConfig.lora$"),
        ({"max_loras": 2}, r"'max_loras' cannot be given here: use VllmConfig.lora$"),
        ({"lora_dtype": "float16"}, r"'lora_dtype' .* VllmConfig.lora takes one adapter for"),
        ({"offload_group_size": 2}, r"'offload_group_size' is not supported yet: weight updates"),
        ({"calculate_kv_scales": True}, r"'calculate_kv_scales' is not supported yet: weight upd"),
        ({"moe_backend": "triton"}, r"'moe_backend' is not supported yet: weight updates have not"),
        ({"override_attention_dtype": "bf16"}, r"it has no effect: vLLM reads it on AMD GPUs alo"),
        (
            {"enable_eplb": True},
            r"'enable_eplb' is not supported yet: weight updates have not been",
        ),
        ({"enable_dbo": True}, r"'enable_dbo' cannot be given here: it has no effect: .*one dev"),
        ({"all2all_backend": "naive"}, r"'all2all_backend' cannot be .*no effect: .* one device"),
        ({"data_parallel_backend": "ray"}, r"'data_parallel_backend' cannot .* one device"),
        ({"decode_context_parallel_size": 2}, r"'decode_context_parallel_size' .* one device"),
        (
            {"compilation_config": {"level": 3}},
            r"'compilation_config' .* VllmConfig.enforce_eager leaves no graph to compile",
        ),
        ({"hf_overrides": {"rope_theta": 1e6}}, r"use VllmConfig.hf_overrides"),
        ({"logits_processors": ["m.P"]}, r"'logits_processors' .* from another distribution"),
        ({"generation_config": "vllm"}, r"'generation_config' .* use SamplingParams.stop_token_i"),
        (
            {"kv_cache_dtype_skip_layers": ["0"]},
            r"'kv_cache_dtype_skip_layers' is \['0'\] \(list\), which cannot be read back",
        ),
        ({"data_parallel_size": 2}, r"'data_parallel_size' .* use VllmConfig.data_parallel_size"),
        ({"attention_backend": "FLASHINFER"}, r"use VllmConfig.attention_backend"),
        ({"enable_sleep_mode": True}, r"use VllmConfig.enable_sleep"),
        ({"pipeline_parallel_size": 2}, r"use VllmConfig.pipeline_parallel_size"),
        ({"quantization": "fp8"}, r"'quantization' cannot .* use VllmConfig.quantization$"),
        ({"quantization_config": {}}, r"which quantises every linear layer and expert; no update"),
        ({"speculative_config": {}}, r"'speculative_config' .* use VllmConfig.speculation"),
        (
            {"spec_method": "ngram"},
            r"'spec_method' cannot be given here: use VllmConfig.speculation",
        ),
        ({"seed": 1, "dtype": "auto"}, r"'seed' cannot .*; 'dtype' cannot"),
    ],
)
def test_engine_args_that_cannot_take_effect_are_refused(
    engine_args: dict[str, object], text: str
) -> None:
    """A46, verl#6066: owned, unknown and renamed arguments are named with what works."""
    with pytest.raises(ValueError, match=text):
        config(engine_args=engine_args)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"kv_cache_gib": None}, r"exactly one of kv_cache_gib and gpu_memory_utilization"),
        ({"gpu_memory_utilization": 0.5}, r"leaves the share without effect\), got 1.0 and 0.5"),
        ({"tensor_parallel_size": 2}, r"tensor_parallel_size = 2 cannot run on the CPU"),
        (
            {"data_parallel_size": 2},
            r"data_parallel_size = 2 cannot .* use 1, and several samplers",
        ),
        (
            {"expert_parallel_size": 2},
            r"must be 1 or equal tensor_parallel_size x data_parallel_size = 1 \(.*, got 2",
        ),
        (
            {
                "device": "cuda",
                "tensor_parallel_size": 2,
                "data_parallel_size": 2,
                "expert_parallel_size": 2,
            },
            r"x data_parallel_size = 4 \(vLLM spreads the experts over all of them\), got 2",
        ),
        ({"enforce_eager": False}, r"enforce_eager = False cannot run on the CPU"),
        ({"attention_backend": "FLASH_ATTN"}, r"vLLM has one kind of attention there"),
        ({"enable_sleep": True}, r"enable_sleep = True cannot .* do nothing there \(0.32\)"),
        (
            {"return_routed_experts": True},
            r"vLLM 0.32.0 returns none or wrong ones there; use 0.30, or recompute them in",
        ),
        (
            {"device": "cuda", "return_routed_experts": True},
            r"cannot run on a GPU in this release: no engine there has been shown to return them",
        ),
        ({"device": "npu"}, r"'device' must be in"),
        ({"load_format": "pt"}, r"'load_format' must be in"),
        ({"max_model_len": 1}, r"'max_model_len' must be >= 2: 1"),
        ({"dtype": "int8"}, r"'dtype' must be in"),
    ],
)
def test_settings_that_cannot_take_effect_are_refused(
    changes: dict[str, object], text: str
) -> None:
    """Each refusal holds the reason and the setting that would work."""
    with pytest.raises(ValueError, match=text):
        config(**changes)


def test_three_valued_settings_take_no_words() -> None:
    """The word "false" is not False."""
    with pytest.raises(TypeError, match=r"'enable_prefix_caching' must be <class 'bool'>"):
        config(enable_prefix_caching="false")


def test_later_changes_to_the_callers_mapping_do_not_arrive() -> None:
    """Nothing rewrites a config after construction."""
    engine_args: dict[str, object] = {"block_size": 64}
    made = config(engine_args=engine_args)
    engine_args["seed"] = 1
    assert made.engine_args == {"block_size": 64}


def test_gpu_takes_what_the_cpu_refuses() -> None:
    """The refusals of one CPU are no rule on GPUs; what follows from the device is named."""
    arguments = config(
        device="cuda",
        tensor_parallel_size=2,
        data_parallel_size=2,
        expert_parallel_size=4,
        enable_sleep=True,
        attention_backend="TRITON_ATTN",
        engine_args={"max_cudagraph_capture_size": 64},
    ).effective_engine_args()
    values = {name: argument.value for name, argument in arguments.items()}
    assert values["enable_expert_parallel"] is True
    assert values["tensor_parallel_size"] == values["data_parallel_size"] == 2
    assert values["distributed_executor_backend"] == "mp"
    assert values["enable_sleep_mode"] is True
    assert "enable_return_routed_experts" not in values
    assert values["gpu_memory_utilization"] == 0.01  # vLLM's own 0.9 leaves no room for a trainer
    assert values["attention_backend"] == "TRITON_ATTN"
    assert values["enforce_eager"] is False
    assert arguments["enforce_eager"].origin == "derived from VllmConfig.device = 'cuda'"
    assert "max_num_seqs" not in arguments  # vLLM decides by the GPU's memory
    assert config().effective_engine_args()["max_num_seqs"].value == 64
    assert config().effective_engine_args()["enforce_eager"].value is True


@pytest.mark.parametrize("name", ["compilation_config", "enable_dbo", "all2all_backend"])
def test_gpu_refuses_what_no_test_has_shown(name: str) -> None:
    """An argument that has no effect on a CPU has one on a GPU, and passes only once tried."""
    with pytest.raises(ValueError, match=rf"'{name}' cannot .* no test has shown that it does its"):
        config(device="cuda", engine_args={name: True})


@pytest.mark.parametrize("version", ["0.30.0", None])
def test_experts_are_returned_on_the_cpu_by_0_30(version: str | None) -> None:
    """0.25.1 returns wrong ones, which only a comparison shows; without a vLLM the start asks."""
    settings = {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "expert_parallel_size": 1,
        "enforce_eager": None,
        "attention_backend": None,
        "quantization": None,
        "speculation": None,
        "lora": None,
        "enable_sleep": False,
        "return_routed_experts": True,
    }
    check_device_rules("cpu", settings, version=version)
    for other in ("0.25.1", "0.31.0"):
        with pytest.raises(ValueError, match=rf"vLLM {other} returns none or wrong ones there"):
            check_device_rules("cpu", settings, version=other)


def test_unknown_version_is_refused() -> None:
    """A version that was never looked at is named beside the supported ones."""
    with pytest.raises(
        ValueError,
        match=r"vLLM 0.99.1 is not supported .* supported: 0.25.x, 0.28.x, 0.30.x, 0.32.x",
    ):
        argument_names("0.99.1")


def test_version_on_which_no_sampler_starts_is_refused() -> None:
    """The names of 0.23 are known, but its weight transfer is another one."""
    with pytest.raises(ValueError, match=r"vLLM 0.23.0 .* \(it makes and calls weight-transfer"):
        argument_names("0.23.0")


def test_config_is_read_from_a_file(tmp_path: Path) -> None:
    """The strict loader builds it from TOML, free arguments included."""
    file = tmp_path / "sampler.toml"
    file.write_text(
        'model = "m"\nmax_model_len = 64\nkv_cache_gib = 1\nenable_prefix_caching = false\n'
        "[engine_args]\nblock_size = 64\n"
    )
    loaded = load_config(VllmConfig, file=file).value
    assert loaded == config(enable_prefix_caching=False, engine_args={"block_size": 64})
