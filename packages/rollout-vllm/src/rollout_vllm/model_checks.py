"""What a config says of the model, against the model's own config.json."""

import json
from collections.abc import Mapping
from pathlib import Path

from rollout_vllm.config import VllmConfig
from rollout_vllm.overrides import check_overridden_model

# what the number of routed experts is called: Qwen-MoE, DeepSeek, Mixtral (transformers 5.19)
_EXPERT_FIELDS = ("num_experts", "n_routed_experts", "num_local_experts")

# transformers' own format, SentencePiece's, Mistral's
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tekken.json")


def check_model(config: VllmConfig) -> None:
    """Refuse settings that do not fit the model.

    Raises:
        ValueError: if the folder has no config.json, or no tokenizer for a server, if experts are
            to be shared or returned and the model has none, if they cannot be shared evenly or do
            not go with quantisation or adapters, if images are asked of a model that does not see,
            or the other way round, or if an entry of `hf_overrides` would have no effect on this
            model, or hold weights in it.
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
    described = json.loads(file.read_text(encoding="utf-8"))
    check_sight(config, sees="vision_config" in described)
    check_overridden_model(config.hf_overrides, described)
    if config.quantization is not None and "quantization_config" in described:
        message = (
            f"VllmConfig: quantization = {config.quantization!r} is for files in bfloat16 or "
            f"float16; the config.json of {config.model!r} says that its weights are quantised "
            "(quantization_config)"
        )
        raise ValueError(message)
    experts = num_experts(described)
    if experts and config.quantization is not None and config.device == "cpu":
        message = (
            f"VllmConfig: quantization = {config.quantization!r} cannot run on the CPU with a "
            f"mixture of experts ({experts} in {str(file)!r}): vLLM's CPU build has no kernel that "
            "scales them (0.32); leave it out"
        )
        raise ValueError(message)
    if experts and config.lora is not None:
        why = {
            "cpu": "beside adapters vLLM computes experts with Triton, which its CPU build does "
            "not have (0.32)",
            "cuda": "it has not run on GPUs, and nothing shows that it is right there",
        }
        message = (
            f"VllmConfig: lora cannot run with a mixture of experts ({experts} in {str(file)!r}), "
            f"whichever layers are adapted: {why[config.device]}; leave it out, and export whole "
            "weights with the adapters merged"
        )
        raise ValueError(message)
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


def check_sight(config: VllmConfig, *, sees: bool) -> None:
    """Refuse images for a model that does not see, and a model that sees without any.

    Raises:
        ValueError: with the setting that works.
    """
    if config.images_per_prompt and not sees:
        message = (
            f"VllmConfig: images_per_prompt = {config.images_per_prompt} has no effect: the "
            f"config.json of {config.model!r} names no vision_config; leave it out"
        )
        raise ValueError(message)
    if sees and not config.images_per_prompt:
        message = (
            f"VllmConfig: {config.model!r} is a model that sees, which vLLM does not start without "
            "its image processor; set images_per_prompt to 1 or more"
        )
        raise ValueError(message)
    if (
        sees
        and not (Path(config.model) / "preprocessor_config.json").is_file()
        and not (Path(config.model) / "processor_config.json").is_file()
    ):
        message = (
            f"VllmConfig: images need the model's processor, and {config.model!r} holds none "
            "(preprocessor_config.json, processor_config.json); save it there"
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
