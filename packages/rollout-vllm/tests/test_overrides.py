"""What of a model's config.json the sampler may replace, and what the engine must then report."""

import json
from pathlib import Path

import pytest

from rollout_vllm import StartError, VllmConfig
from rollout_vllm.arguments import EffectiveArgument
from rollout_vllm.model_checks import check_model
from rollout_vllm.overrides import check_overridden_model
from rollout_vllm.plain import flattened
from rollout_vllm.readback import check_settings

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 2.0,
    "original_max_position_embeddings": 512,
}


def config(**changes: object) -> VllmConfig:
    """A small valid config with changes."""
    valid: dict[str, object] = {"model": "m", "max_model_len": 64, "kv_cache_gib": 1.0}
    return VllmConfig(**(valid | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ({"hidden_size": 8}, r"'hidden_size' cannot be replaced: it changes which weights there"),
        ({"num_hidden_layers": 1}, r"'num_hidden_layers' .* neither the model's files nor an upd"),
        (
            {"tie_word_embeddings": True},
            r"'tie_word_embeddings' .* changes which weights there are",
        ),
        ({"text_config": {"vocab_size": 8}}, r"'text_config.vocab_size' cannot be replaced"),
        ({"architectures": ["A"]}, r"'architectures' .* it makes another model of it"),
        (
            {"rope_scaling": YARN},
            r"'rope_scaling' .* computes with rope_parameters alone; give all",
        ),
        ({"rope_theta": 1e6}, r"'rope_theta' cannot .* rope_parameters alone; give all of it"),
        ({"quantization_config": {}}, r"'quantization_config' .* use VllmConfig.quantization"),
        ({"eos_token_id": 3}, r"'eos_token_id' .* use SamplingParams.stop_token_ids"),
        (
            {"sliding_window": 8},
            r"'sliding_window' .* only rope_parameters and max_position_embedd",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
            r"'rope_parameters' lacks 'rope_theta': what is given replaces all of the model's own",
        ),
        (
            {"rope_parameters": {"full_attention": YARN, "sliding_attention": {"factor": 2.0}}},
            r"'rope_parameters' lacks 'rope_type', 'rope_theta'",
        ),
        ({"rope_parameters": YARN | {"factor": "2"}}, r"'rope_parameters' holds no number at 'fac"),
        ({"rope_parameters": {}}, r"'rope_parameters' must be a table, got \{\}"),
        ({"text_config": 3}, r"'text_config' must be a table with what it replaces, got 3"),
        ({"max_position_embeddings": 0}, r"must be a number of tokens, 1 or more, got 0"),
        ({"max_position_embeddings": True}, r"must be a number of tokens, 1 or more, got True"),
        ({"head_dim": 8, "model_type": "x"}, r"'head_dim' cannot .*; 'model_type' cannot"),
    ],
)
def test_what_would_break_updates_or_not_arrive_is_refused(
    overrides: dict[str, object], text: str
) -> None:
    """Each entry is named with the reason, when the config is made."""
    with pytest.raises(ValueError, match=rf"VllmConfig: hf_overrides: .*{text}"):
        config(hf_overrides=overrides)


def test_overrides_reach_vllm_as_they_are() -> None:
    """The argument holds the whole table, and a later change of the caller's does not arrive."""
    rope: dict[str, object] = dict(YARN)
    made = config(hf_overrides={"rope_parameters": rope, "max_position_embeddings": 1024})
    rope["factor"] = 8.0
    argument = made.effective_engine_args()["hf_overrides"]
    assert argument.value == {"rope_parameters": YARN, "max_position_embeddings": 1024}
    assert argument.origin == "VllmConfig.hf_overrides"
    assert "hf_overrides" not in config().effective_engine_args()


ROTARY = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}


def test_overrides_stand_where_the_model_reads_them() -> None:
    """vLLM sets an attribute that nothing reads without a word; some models have two places."""
    inside: dict[str, object] = {"text_config": {"rope_parameters": YARN}}
    outside: dict[str, object] = {"rope_parameters": YARN}
    check_overridden_model(outside, ROTARY)
    check_overridden_model(inside, {"text_config": ROTARY})
    with pytest.raises(ValueError, match=r"'text_config' would have no effect, .* has no 'text_c"):
        check_overridden_model(inside, ROTARY)
    with pytest.raises(
        ValueError, match=r"'rope_parameters' would .* own 'text_config': give them"
    ):
        check_overridden_model(outside, {"text_config": ROTARY})


def test_positions_with_weights_are_not_replaced(tmp_path: Path) -> None:
    """A model without rotary embedding may learn one vector for each position."""
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 512}))
    longer = config(model=str(tmp_path), hf_overrides={"max_position_embeddings": 1024})
    with pytest.raises(
        ValueError, match=r"names no rotary embedding .* positions may have weights"
    ):
        check_model(longer)
    (tmp_path / "config.json").write_text(json.dumps(ROTARY))
    check_model(longer)


def test_flattened_names_every_plain_value() -> None:
    """Tables and lists by dots; an empty one is an entry, what is not plain is given as text."""
    nested = {"a": {"b": [1, {"c": None}]}, "d": {}, "e": 2.5}
    assert dict(flattened(nested)) == {"a.b.0": 1, "a.b.1.c": None, "d": "{}", "e": 2.5}


OVERRIDES = {
    "hf_overrides": EffectiveArgument(
        value={"text_config": {"rope_parameters": YARN}}, origin="VllmConfig.hf_overrides"
    )
}


def reported(**changes: object) -> dict[str, dict[str, object]]:
    """What an engine with these overrides reports, with changes."""
    rope = {f"text_config.rope_parameters.{key}": value for key, value in YARN.items()}
    return {"hf_config": {"text_config.hidden_size": 64, **rope, **changes}}


def test_overrides_are_compared_entry_by_entry() -> None:
    """A value that differs, is missing, or was left over from the model is named."""
    check_settings(OVERRIDES, reported())
    with pytest.raises(StartError, match=r"reports text_config.rope_parameters.factor = 4.0$"):
        check_settings(OVERRIDES, reported(**{"text_config.rope_parameters.factor": 4.0}))
    with pytest.raises(StartError, match=r"reports text_config.rope_parameters.mscale = 1 beside"):
        check_settings(OVERRIDES, reported(**{"text_config.rope_parameters.mscale": 1}))
    with pytest.raises(StartError, match=r"reports no text_config.rope_parameters.rope_type"):
        check_settings(OVERRIDES, {"hf_config": {}})
    with pytest.raises(StartError, match=r"hf_overrides = .* cannot be verified"):
        check_settings(OVERRIDES, {"model": {}})


def test_every_worker_is_compared() -> None:
    """One stage that runs another model is enough."""
    parts = reported() | {"hf_config@1": reported()["hf_config"]}
    check_settings(OVERRIDES, parts)
    parts["hf_config@1"]["text_config.rope_parameters.factor"] = 1.0
    with pytest.raises(StartError, match=r"rope_parameters.factor = 1.0$"):
        check_settings(OVERRIDES, parts)
