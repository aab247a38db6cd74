"""Values of the model's config.json that the sampler replaces, and those that it must not."""

from collections.abc import Mapping

from rollout_vllm.plain import flattened

TEXT = "text_config"
"""Where models that also see keep the part that holds what may be replaced."""

_ROPE = "rope_parameters"
_LENGTH = "max_position_embeddings"
_NEEDED = ("rope_type", "rope_theta")

_SIZE = (
    "it changes which weights there are or their sizes, and neither the model's files nor an "
    "update would fit"
)
_OLD_NAME = f"vLLM computes with {_ROPE} alone; give all of it"
# named for their reasons; whatever else is not listed is refused too
_REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "head_dim",
            "hidden_size",
            "intermediate_size",
            "kv_lora_rank",
            "layer_types",
            "moe_intermediate_size",
            "n_routed_experts",
            "n_shared_experts",
            "num_attention_heads",
            "num_experts",
            "num_hidden_layers",
            "num_key_value_heads",
            "num_local_experts",
            "q_lora_rank",
            "tie_word_embeddings",
            "vocab_size",
        ),
        _SIZE,
    ),
    **dict.fromkeys(("architectures", "auto_map", "model_type"), "it makes another model of it"),
    **dict.fromkeys(("rope_scaling", "rope_theta", "partial_rotary_factor"), _OLD_NAME),
    "quantization_config": "use VllmConfig.quantization",
    "eos_token_id": (
        "use SamplingParams.stop_token_ids to end completions at further tokens; which tokens end "
        "them anyway stands in the model's files"
    ),
}


def check_overrides(overrides: Mapping[str, object]) -> None:
    """Refuse what would break an update of the weights, or would not reach the model.

    Args:
        overrides: `VllmConfig.hf_overrides`.

    Raises:
        ValueError: names every entry that is refused, with the reason.
    """
    problems = _problems(overrides, "")
    if problems:
        raise ValueError("VllmConfig: hf_overrides: " + "; ".join(problems))


def check_overridden_model(overrides: Mapping[str, object], model: Mapping[str, object]) -> None:
    """Refuse what this model would not read, or what holds weights in it.

    Args:
        overrides: `VllmConfig.hf_overrides`.
        model: the model's config.json.

    Raises:
        ValueError: names the entry, and where it must stand.
    """
    if not overrides:
        return
    # vLLM sets whatever it is given, and a model that also sees reads its text part's values
    misplaced = [key for key in overrides if (TEXT in model) != (key == TEXT)]
    if misplaced:
        where = f"has its own {TEXT!r}: give them in there" if TEXT in model else f"has no {TEXT!r}"
        raise ValueError(
            f"VllmConfig: hf_overrides: {', '.join(map(repr, misplaced))} would have no effect, as "
            f"the model's config.json {where}"
        )
    text = model.get(TEXT, model)
    if isinstance(text, Mapping) and not any(
        name in text for name in (_ROPE, "rope_theta", "rope_scaling")
    ):
        raise ValueError(
            "VllmConfig: hf_overrides: the model's config.json names no rotary embedding "
            f"({_ROPE}, rope_theta): its positions may have weights, which an override would not "
            "fit; change config.json instead"
        )


def _problems(overrides: Mapping[str, object], inside: str) -> list[str]:
    found: list[str] = []
    for key, value in overrides.items():
        name = inside + key
        if key == TEXT and not inside:
            found += (
                _problems(value, f"{TEXT}.")
                if isinstance(value, Mapping) and value
                else [f"{name!r} must be a table with what it replaces, got {value!r}"]
            )
        elif key == _LENGTH:
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                found.append(f"{name!r} must be a number of tokens, 1 or more, got {value!r}")
        elif key == _ROPE:
            found += _rope_problems(name, value)
        else:
            reason = _REFUSED.get(
                key,
                f"only {_ROPE} and {_LENGTH} have been shown to reach the model; change "
                "config.json in the folder VllmConfig.model instead",
            )
            found.append(f"{name!r} cannot be replaced: {reason}")
    return found


def _rope_problems(name: str, value: object) -> list[str]:
    if not isinstance(value, Mapping) or not value:
        return [f"{name!r} must be a table, got {value!r}"]
    # models with two kinds of layers have one table for each kind
    nested = [inner for inner in value.values() if isinstance(inner, Mapping)]
    tables = nested if len(nested) == len(value) else [value]
    missing = [key for key in _NEEDED if any(key not in table for table in tables)]
    if missing:
        lacking = ", ".join(map(repr, missing))
        reason = "what is given replaces all of the model's own, so give each value"
        return [f"{name!r} lacks {lacking}: {reason}"]
    odd = [
        key for key, plain in flattened(value) if isinstance(plain, str) and "rope_type" not in key
    ]
    return [f"{name!r} holds no number at {', '.join(map(repr, odd))}"] if odd else []
