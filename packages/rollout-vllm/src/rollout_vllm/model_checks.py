"""What a config says of the model, against the model's own config.json."""

import json
from collections.abc import Mapping
from pathlib import Path

from rollout_vllm.config import VllmConfig

# what the number of routed experts is called: Qwen-MoE, DeepSeek, Mixtral (transformers 5.19)
_EXPERT_FIELDS = ("num_experts", "n_routed_experts", "num_local_experts")

# transformers' own format, SentencePiece's, Mistral's
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tekken.json")


def check_model(config: VllmConfig) -> None:
    """Refuse settings that do not fit the model.

    Raises:
        ValueError: if the folder has no config.json, or no tokenizer for a server, if experts are
            to be shared or returned and the model has none, or if they cannot be shared evenly.
    """
    file = Path(config.model) / "config.json"
    if not file.is_file():
        message = (
            f"model: expected a local Hugging Face folder with a config.json, got "
            f"{config.model!r}; download the model first and give its folder"
        )
        raise ValueError(message)
    if config.server is not None and not any(
        file.with_name(name).is_file() for name in _TOKENIZER_FILES
    ):
        message = (
            f"VllmConfig: server needs the model's tokenizer, and {config.model!r} holds none "
            f"({', '.join(_TOKENIZER_FILES)}); save it there"
        )
        raise ValueError(message)
    experts = num_experts(json.loads(file.read_text(encoding="utf-8")))
    wanted = {
        "expert_parallel_size": config.expert_parallel_size > 1,
        "return_routed_experts": config.return_routed_experts,
    }
    for name, is_set in wanted.items():
        if is_set and not experts:
            message = (
                f"VllmConfig: {name} = {getattr(config, name)} has no effect: {str(file)!r} names "
                f"no experts ({', '.join(_EXPERT_FIELDS)}); leave it out"
            )
            raise ValueError(message)
    if experts % config.expert_parallel_size:
        message = (
            f"VllmConfig: expert_parallel_size must divide the {experts} experts of the model, got "
            f"{config.expert_parallel_size}"
        )
        raise ValueError(message)


def num_experts(model: Mapping[str, object]) -> int:
    """Routed experts of each layer that has any; 0 if the model has none."""
    text = model.get("text_config", model)  # models that see keep the text part apart
    if isinstance(text, Mapping):
        for field in _EXPERT_FIELDS:
            value = text.get(field)
            if isinstance(value, int):
                return value
    return 0
