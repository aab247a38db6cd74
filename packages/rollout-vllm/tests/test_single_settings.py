"""Speculative decoding, pipelines and quantisation in the config; no vLLM runs."""

from pathlib import Path

import pytest

from rl_contracts.config import load_config
from rollout_vllm import Speculation, StartError, VllmConfig
from rollout_vllm.device_rules import check_device_rules
from rollout_vllm.environment import check_environment, engine_environment
from rollout_vllm.model_checks import check_model
from rollout_vllm.readback import check_settings

PLAIN: dict[str, object] = {
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
    "return_routed_experts": False,
}
GUESSES = Speculation(num_speculative_tokens=3, prompt_lookup_min=1, prompt_lookup_max=4)


def config(**changes: object) -> VllmConfig:
    """A small valid config with changes."""
    valid: dict[str, object] = {"model": "m", "max_model_len": 64, "kv_cache_gib": 1.0}
    return VllmConfig(**(valid | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"num_speculative_tokens": 0}, r"'num_speculative_tokens' must be >= 1: 0"),
        ({"num_speculative_tokens": 129}, r"'num_speculative_tokens' must be <= 128: 129"),
        ({"method": "eagle"}, r"'method' must be in \('ngram',\) \(got 'eagle'\)"),
        ({"prompt_lookup_min": 0}, r"'prompt_lookup_min' must be >= 1: 0"),
        (
            {"prompt_lookup_min": 4, "prompt_lookup_max": 3},
            r"prompt_lookup_min of at most prompt_lookup_max = 3, got 4",
        ),
    ],
)
def test_bounds_of_guesses(settings: dict[str, object], text: str) -> None:
    """No bound that vLLM would refuse late, or change."""
    with pytest.raises(ValueError, match=text):
        Speculation(**({"num_speculative_tokens": 3} | settings))  # type: ignore[arg-type]


def test_guesses_reach_vllm_and_are_read_back() -> None:
    """The argument is whole, its origin is named, and what the engine resolved is compared."""
    asked = config(speculation=GUESSES).effective_engine_args()
    argument = asked["speculative_config"]
    assert argument.origin == "VllmConfig.speculation"
    assert argument.value == {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 4,
    }
    assert "speculative_config" not in config().effective_engine_args()
    only = {"speculative_config": argument}
    resolved = dict(argument.value, draft_tensor_parallel_size=1)
    check_settings(only, {"speculative": resolved})
    with pytest.raises(StartError, match=r"reports prompt_lookup_max = 5$"):
        check_settings(only, {"speculative": resolved | {"prompt_lookup_max": 5}})
    # an entry of the same name is not the engine's own
    model = {"model": asked["model"]} | only
    check_settings(model, {"speculative": resolved | {"model": "ngram"}, "model": {"model": "m"}})
    with pytest.raises(StartError, match=r"speculative_config = .* cannot be verified"):
        check_settings(only, {"engine": {"speculative_config": None}})


def test_guesses_on_the_cpu_need_a_version_that_was_tried() -> None:
    """Unmended, every CPU build checks guesses with memory that nobody has written."""
    for version in ("0.32.0", None):
        check_device_rules("cpu", PLAIN | {"speculation": GUESSES}, version=version)
    with pytest.raises(
        ValueError, match=r"vLLM 0.25.1 has not been shown to draw guessed tokens .*; use 0.32, or"
    ):
        check_device_rules("cpu", PLAIN | {"speculation": GUESSES}, version="0.25.1")
    check_device_rules("cpu", PLAIN, version="0.28.0")


def test_stages_on_the_cpu_need_a_version_that_was_tried() -> None:
    """Not every CPU build does its first run, without which a second stage fails."""
    staged = PLAIN | {"pipeline_parallel_size": 2}
    check_device_rules("cpu", staged, version="0.32.0")
    with pytest.raises(ValueError, match=r"vLLM 0.30.0 has not been shown to run stages there; us"):
        check_device_rules("cpu", staged, version="0.30.0")


def test_quantisation_on_the_cpu_needs_kernels_and_a_version_that_was_tried() -> None:
    """Only one kind can be made there, and only one version's updates were compared."""
    quantised = PLAIN | {"quantization": "fp8_per_channel"}
    check_device_rules("cpu", quantised, version="0.32.0")
    with pytest.raises(ValueError, match=r"vLLM 0.25.1 has not been shown to quantise updates as"):
        check_device_rules("cpu", quantised, version="0.25.1")
    for kind in ("fp8_per_tensor", "fp8_per_block"):
        with pytest.raises(ValueError, match=r"no kernel that scales weights .* 'fp8_per_channel'"):
            check_device_rules("cpu", quantised | {"quantization": kind}, version="0.32.0")


def test_what_is_quantised_is_read_back(tmp_path: Path) -> None:
    """The wish is not enough: the methods of the layers count; files must not be quantised."""
    quantised = config(quantization="fp8_per_channel", model=str(tmp_path))
    asked = {"quantization": quantised.effective_engine_args()["quantization"]}
    assert asked["quantization"].value == "fp8_per_channel"
    wish = {"model": {"quantization": "fp8_per_channel"}}
    check_settings(asked, wish | {"worker": {"quantization": "fp8_per_channel"}})
    with pytest.raises(StartError, match=r"\(VllmConfig.quantization\), the engine reports None$"):
        check_settings(asked, wish | {"worker": {"quantization": None}})
    with pytest.raises(ValueError, match=r"needs dtype bfloat16 or float16, .* got float32"):
        config(quantization="fp8_per_channel", dtype="float32")
    with pytest.raises(ValueError, match=r"'quantization' must be in"):
        config(quantization="fp8")
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    with pytest.raises(ValueError, match=r"says that its weights are quantised \(quantization_con"):
        check_model(quantised)
    (tmp_path / "config.json").write_text('{"num_experts": 8}')
    with pytest.raises(ValueError, match=r"cannot run on the CPU with a mixture of experts \(8 in"):
        check_model(quantised)
    (tmp_path / "config.json").write_text("{}")
    check_model(quantised)


@pytest.mark.parametrize(
    ("name", "value"),
    [("pipeline_parallel_size", 2), ("quantization", "fp8_per_channel"), ("speculation", GUESSES)],
)
def test_what_has_not_run_on_a_gpu_is_refused_there(name: str, value: object) -> None:
    """Until a run shows logprobs and updates to be right."""
    with pytest.raises(
        ValueError, match=rf"{name} = .* cannot run on a GPU .*: it has not run the"
    ):
        config(device="cuda", **{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [("pipeline_parallel_size", 2), ("return_routed_experts", True), ("images_per_prompt", 1)],
)
def test_guesses_do_not_go_with_everything(name: str, value: object) -> None:
    """What nobody has tried together is refused, with both settings."""
    with pytest.raises(
        ValueError, match=rf"speculation = Spec.* and {name} = {value} have not been .*; leave one"
    ):
        config(speculation=GUESSES, **{name: value})


@pytest.mark.parametrize(
    ("name", "value"), [("return_routed_experts", True), ("images_per_prompt", 1)]
)
def test_stages_do_not_go_with_everything(name: str, value: object) -> None:
    """Nor these; a single stage is not a setting."""
    with pytest.raises(ValueError, match=rf"pipeline_parallel_size = 2 and {name} = {value} have"):
        config(pipeline_parallel_size=2, **{name: value})


def test_stages_have_processes_and_free_threads() -> None:
    """Two stages: two processes, whose threads nothing binds, and twice the devices."""
    staged = config(pipeline_parallel_size=2)
    arguments = staged.effective_engine_args()
    assert arguments["pipeline_parallel_size"].value == staged.num_devices == 2
    assert arguments["distributed_executor_backend"].value == "mp"
    assert arguments["distributed_executor_backend"].origin.startswith(
        "derived from VllmConfig.tensor_parallel_size and pipeline_parallel_size"
    )
    assert engine_environment(staged)["VLLM_CPU_OMP_THREADS_BIND"].value == "nobind"
    with pytest.raises(ValueError, match=r"VLLM_CPU_OMP_THREADS_BIND is '0\|1', .* to be 'nobind'"):
        check_environment(staged, {"VLLM_CPU_OMP_THREADS_BIND": "0|1"})


def test_a_stage_shares_its_own_experts_only() -> None:
    """Stages do not count: tensor 2 x pipeline 2 x data 1 may spread experts over 2 devices."""
    with pytest.raises(
        ValueError,
        match=r"must be 1 or equal tensor_parallel_size x data_parallel_size = 1 .*got 2",
    ):
        config(pipeline_parallel_size=2, expert_parallel_size=2)


def test_guesses_are_read_from_a_file(tmp_path: Path) -> None:
    """The strict loader builds the nested table, and names what it does not know."""
    file = tmp_path / "sampler.toml"
    lines = 'model = "m"\nmax_model_len = 64\nkv_cache_gib = 1\n[speculation]\n'
    file.write_text(
        lines + "num_speculative_tokens = 3\nprompt_lookup_min = 1\nprompt_lookup_max = 4\n"
        "[hf_overrides.rope_parameters]\n"
        'rope_type = "yarn"\nrope_theta = 1e4\nfactor = 2.0\n'
    )
    loaded = load_config(VllmConfig, file=file).value
    assert loaded.speculation == GUESSES
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}
    assert loaded.hf_overrides == {"rope_parameters": rope}
    file.write_text(lines + "num_tokens = 3\n")
    with pytest.raises(ValueError, match=r"num_tokens"):
        load_config(VllmConfig, file=file)
