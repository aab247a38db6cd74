"""Plain transformers with images, in a process that VeOmni never enters: one row at a time."""

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from scenario_data import EPS, LEARNING_RATE
from torch import Tensor
from transformers import (
    AutoModelForImageTextToText,
    PreTrainedModel,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)
from vision_data import (
    ADVANTAGES,
    EXPERT_NAMES,
    IMAGE,
    ROWS,
    TEMPERATURE,
    TEXT_ARGS,
    VIDEO,
    VISION_ARGS,
    num_loss_tokens,
)

from rl_contracts import Trajectory

TOWER = "model.visual."


def row_inputs(row: Trajectory) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Token ids, 1 where an image of the prompt stands, and the images."""
    ids = torch.tensor([row.token_ids])
    kinds = torch.zeros_like(ids)
    for image in row.images:
        kinds[0, image.first_token : image.first_token + image.num_tokens] = 1
    if not row.images:
        return ids, kinds, {}
    return (
        ids,
        kinds,
        {
            "pixel_values": torch.cat([torch.tensor(image.patches) for image in row.images]),
            "image_grid_thw": torch.tensor([image.grid for image in row.images]),
        },
    )


def logits_in_parts(model: Any, row: Trajectory) -> Tensor:  # noqa: ANN401
    """Logits by the parts of the model, where the images stand in the prompt alone."""
    ids, kinds, shown = row_inputs(row)
    places = kinds.bool()
    embeddings = model.model.language_model.embed_tokens(ids)
    features: dict[str, Any] = {}
    positions = torch.arange(ids.shape[1]).expand(3, 1, -1)
    if shown:
        seen = model.model.get_image_features(shown["pixel_values"], shown["image_grid_thw"])
        embeddings = embeddings.masked_scatter(places[..., None], torch.cat(seen.pooler_output))
        features = {
            "visual_pos_masks": places,
            "deepstack_visual_embeds": [torch.cat(each) for each in seen.deepstack_features],
        }
        positions, _ = model.model.get_rope_index(
            ids, mm_token_type_ids=kinds, image_grid_thw=shown["image_grid_thw"]
        )
    hidden = model.model.language_model(
        inputs_embeds=embeddings, position_ids=positions, use_cache=False, **features
    ).last_hidden_state
    logits: Tensor = model.lm_head(hidden)[0]
    return logits


def row_logprobs(model: PreTrainedModel, row: Trajectory) -> Tensor:
    """Of sampled tokens that count; by the model's own forward pass, but where it cannot.

    Transformers takes every placeholder for an image, those that a policy drew too.
    """
    ids, kinds, shown = row_inputs(row)
    logits = logits_in_parts(model, row)
    if not ((ids == IMAGE) | (ids == VIDEO))[kinds == 0].any():
        whole = model(input_ids=ids, mm_token_type_ids=kinds, use_cache=False, **shown).logits[0]
        torch.testing.assert_close(logits, whole, rtol=0.0, atol=1e-6)
        logits = whole
    picked = (logits.float() / TEMPERATURE).log_softmax(-1)[:-1].gather(-1, ids[0, 1:, None])
    logprobs = torch.cat([torch.zeros(1), picked.squeeze(-1)])
    return torch.where(torch.tensor(row.loss_mask), logprobs, 0.0)


def save(model: PreTrainedModel, folder: Path) -> None:
    """As published: stacks of experts are `[experts, in, out]`."""
    model.save_pretrained(folder)
    weights = {name: value.detach() for name, value in model.named_parameters()}
    save_file(
        {
            name: (value.transpose(1, 2) if ".experts." in name else value).contiguous()
            for name, value in weights.items()
        },
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )


def write_reference(model: PreTrainedModel, folder: Path) -> None:
    """A model moved away from its first weights, what transformers make of it, and a step."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    save(model, folder / "model")
    logprobs = {row.trajectory_id: row_logprobs(model, row) for row in ROWS}
    sums = torch.stack([logprobs[row.trajectory_id].sum() for row in ROWS])
    loss = -(torch.tensor(ADVANTAGES) * sums).sum() / num_loss_tokens()
    loss.backward()
    gradients = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    text = [value for name, value in gradients.items() if not name.startswith(TOWER)]
    norms = {
        "norm": torch.nn.utils.get_total_norm(list(gradients.values())),
        "text_norm": torch.nn.utils.get_total_norm(text),
    }
    assert norms["norm"] > 1.01 * norms["text_norm"]  # so a tower that is left out shows
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=EPS, weight_decay=0.01)
    optimizer.step()
    save(model, folder / "stepped")
    save_file(
        {
            **{name: value.detach() for name, value in logprobs.items()},
            **norms,
            "loss": loss.detach(),
        },
        folder / "reference.safetensors",
    )


def make(folder: Path) -> None:
    torch.manual_seed(0)
    ids: dict[str, Any] = {"image_token_id": IMAGE, "video_token_id": VIDEO, "dtype": "float32"}
    write_reference(
        Qwen3VLMoeForConditionalGeneration(
            Qwen3VLMoeConfig(text_config=TEXT_ARGS, vision_config=VISION_ARGS, **ids)
        ),
        folder,
    )
    dense = {name: value for name, value in TEXT_ARGS.items() if name not in EXPERT_NAMES}
    write_reference(
        Qwen3VLForConditionalGeneration(
            Qwen3VLConfig(text_config=dense, vision_config=VISION_ARGS, **ids)
        ),
        folder / "dense",
    )


def reload(folder: Path) -> None:
    """The exported folder, read back by transformers."""
    loaded: Any = AutoModelForImageTextToText.from_pretrained(
        folder / "trained", output_loading_info=True
    )
    model, report = loaded
    assert not any(report.values()), report
    with torch.no_grad():
        logprobs = {row.trajectory_id: row_logprobs(model, row) for row in ROWS}
    save_file(logprobs, folder / "reloaded.safetensors")
    assert load_file(folder / "trained" / "model.safetensors")


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"make": make, "reload": reload}[sys.argv[1]](Path(sys.argv[2]))
