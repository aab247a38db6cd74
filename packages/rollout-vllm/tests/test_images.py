"""Images of a prompt: what is refused before vLLM hears of it, and how they travel there."""

import json
from pathlib import Path

import numpy as np
import pytest

from rl_contracts.images import PromptImage
from rollout_vllm import ServerConfig, StartError, VllmConfig
from rollout_vllm.arguments import EffectiveArgument
from rollout_vllm.model_checks import check_model
from rollout_vllm.readback import check_settings
from rollout_vllm.request_checks import check_images

IMAGE = 9


def image(first_token: int, num_tokens: int = 1) -> PromptImage:
    rgb = np.full((2, 2, 3), first_token, dtype=np.uint8)
    return PromptImage(rgb=rgb, first_token=first_token, num_tokens=num_tokens)


def config(**changes: object) -> VllmConfig:
    valid: dict[str, object] = {"model": "m", "max_model_len": 64, "kv_cache_gib": 1.0}
    return VllmConfig(**(valid | changes))  # type: ignore[arg-type]


def folder(tmp_path: Path, *files: str, sees: bool) -> str:
    described: dict[str, object] = {"vision_config": {}, "text_config": {}} if sees else {}
    (tmp_path / "config.json").write_text(json.dumps(described))
    for name in files:
        (tmp_path / name).write_text("{}")
    return str(tmp_path)


@pytest.mark.parametrize(
    ("images", "text"),
    [
        (
            [image(1), image(3), image(5)],
            r"at most 2 images \(VllmConfig.images_per_prompt\), got 3",
        ),
        ([image(6, 2)], r"image 0 has its placeholders at 6 to 7, expected them from 0 to 6"),
        ([image(3), image(1)], "image 1 has its placeholders at 1 to 1, expected them from 4 to 6"),
        ([image(1, 2)], r"image 0 stands at the tokens 1 to 2 .* got the ids \[6, 9\]"),
    ],
)
def test_images_that_would_stand_elsewhere_are_refused(
    images: list[PromptImage], text: str
) -> None:
    """Too many, past the end, out of order, or on tokens that are no placeholders."""
    with pytest.raises(ValueError, match=text):
        check_images([5, IMAGE, 6, IMAGE, 6, IMAGE, 7], images, most=2)


def test_images_at_their_placeholders_are_taken() -> None:
    """Neighbouring images may have the same placeholder."""
    check_images([5, IMAGE, IMAGE, IMAGE], [image(1, 2), image(3)], most=2)


def test_images_bring_the_tokenizer_and_a_limit() -> None:
    """Without images vLLM loads no tokenizer; with some it does, and is told how many."""
    without = config().effective_engine_args()
    assert without["skip_tokenizer_init"].value is True
    assert "limit_mm_per_prompt" not in without
    arguments = config(images_per_prompt=3).effective_engine_args()
    assert arguments["skip_tokenizer_init"].value is False
    assert "VllmConfig.images_per_prompt" in arguments["skip_tokenizer_init"].origin
    assert arguments["limit_mm_per_prompt"].value == {"image": 3, "video": 0}
    served = config(images_per_prompt=3, server=ServerConfig()).effective_engine_args()
    assert "VllmConfig.server" in served["skip_tokenizer_init"].origin
    with pytest.raises(ValueError, match=r"'limit_mm_per_prompt' .* use VllmConfig.images_per_pro"):
        config(engine_args={"limit_mm_per_prompt": {"image": 2}})


def test_the_limit_is_read_back() -> None:
    """An engine that takes another number of images than configured is refused."""
    asked = {
        "limit_mm_per_prompt": EffectiveArgument(
            value={"image": 2, "video": 0}, origin="VllmConfig.images_per_prompt"
        )
    }
    check_settings(asked, {"multimodal": {"image": 2, "video": 0}})
    with pytest.raises(StartError, match=r"images_per_prompt\), the engine reports image = 999"):
        check_settings(asked, {"multimodal": {"image": 999, "video": 0}})
    with pytest.raises(StartError, match="cannot be verified"):
        check_settings(asked, {})


def test_sight_is_compared_with_the_model(tmp_path: Path) -> None:
    """Images for a model without eyes, eyes without images, and no image processor."""
    blind = folder(tmp_path, sees=False)
    with pytest.raises(ValueError, match=r"images_per_prompt = 2 has no effect: .* no vision_conf"):
        check_model(config(model=blind, images_per_prompt=2))
    seeing = folder(tmp_path, sees=True)
    with pytest.raises(ValueError, match=r"is a model that sees, .* set images_per_prompt to 1"):
        check_model(config(model=seeing))
    with pytest.raises(ValueError, match=r"holds none \(preprocessor_config.json, processor_conf"):
        check_model(config(model=seeing, images_per_prompt=1))
    for name in ("preprocessor_config.json", "processor_config.json"):
        check_model(config(model=folder(tmp_path, name, sees=True), images_per_prompt=1))
        (tmp_path / name).unlink()
