"""What the config accepts, what it refuses, and what vLLM is given."""

import subprocess
import sys
from pathlib import Path

import attrs
import pytest

from rl_contracts.config import load_config
from rollout_vllm import VllmConfig
from rollout_vllm.arguments import _NOT_UPDATABLE, _OWNED, _REFUSED, known_arguments
from rollout_vllm.versions import ARGUMENT_NAMES, argument_names


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
        ({"load_format": "pt"}, r"pickled weights can run code"),
        ({"blok_size": 16}, r"'blok_size' is not an argument of the installed vLLM; nearest: 'bl"),
        ({"max_num_seq": 4}, r"nearest: 'max_num_seqs' \(use VllmConfig.max_num_seqs\)"),
        ({"disable_log_requests": True}, r"'disable_log_requests' is not an argument of the inst"),
        ({"enable_lora": True}, r"'enable_lora' is not supported yet: weight updates have not"),
        (
            {"max_lora_rank": 8},
            r"'max_lora_rank' cannot be given here: .*: enable_lora is not supported yet",
        ),
        ({"enable_dbo": True}, r"'enable_dbo' cannot be given here: it has no effect: .*one dev"),
        ({"all2all_backend": "naive"}, r"'all2all_backend' cannot be .*no effect: .* one device"),
        ({"data_parallel_backend": "ray"}, r"'data_parallel_backend' cannot .* one device"),
        ({"decode_context_parallel_size": 2}, r"'decode_context_parallel_size' .* one device"),
        (
            {"compilation_config": {"level": 3}},
            r"'compilation_config' .* VllmConfig.enforce_eager leaves no graph to compile",
        ),
        ({"hf_overrides": {"rope_theta": 1e6}}, r"'hf_overrides' .* another model than the one t"),
        ({"logits_processors": ["m.P"]}, r"'logits_processors' .* from another distribution"),
        ({"generation_config": "vllm"}, r"'generation_config' .* use SamplingParams.stop_token_i"),
        (
            {"kv_cache_dtype_skip_layers": ["0"]},
            r"'kv_cache_dtype_skip_layers' is \['0'\] \(list\), which cannot be read back",
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
        ({"expert_parallel_size": 2}, r"must be 1 or equal tensor_parallel_size = 1, got 2"),
        ({"enforce_eager": False}, r"enforce_eager = False is not supported on the CPU"),
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


def test_table_of_names_fits_the_installed_vllm() -> None:
    """Every name of the table, and every name that is refused, is an argument of this vLLM."""
    known = known_arguments()
    assert known is not None
    assert set(ARGUMENT_NAMES["0.32"].values()) <= known
    assert set(_OWNED) <= known
    assert known >= _NOT_UPDATABLE
    assert set(_REFUSED) <= known
    assert not set(_REFUSED) & (set(_OWNED) | _NOT_UPDATABLE)
    fields = {field.name for field in attrs.fields(VllmConfig)}
    assert set(ARGUMENT_NAMES["0.32"]) <= fields
    assert {field for field in fields if field in known} <= set(ARGUMENT_NAMES["0.32"])


def test_unknown_version_is_refused() -> None:
    """A version that was never run is named beside the supported ones."""
    with pytest.raises(ValueError, match=r"vLLM 0.99.1 is not supported .* supported: 0.32.x"):
        argument_names("0.99.1")


def test_config_is_read_from_a_file(tmp_path: Path) -> None:
    """The strict loader builds it from TOML, free arguments included."""
    file = tmp_path / "sampler.toml"
    file.write_text(
        'model = "m"\nmax_model_len = 64\nkv_cache_gib = 1\nenable_prefix_caching = false\n'
        "[engine_args]\nblock_size = 64\n"
    )
    loaded = load_config(VllmConfig, file=file).value
    assert loaded == config(enable_prefix_caching=False, engine_args={"block_size": 64})
