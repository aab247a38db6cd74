"""Models that see: Qwen3-VL and Qwen3-VL-MoE, their images and three-part positions.

Where a prompt shows an image is read from the batch and never from the token ids: a policy may draw
the placeholder's id itself, and VeOmni would look for one more image there. Each image goes through
the vision tower once, and what comes out is laid to every place that shows it.
"""

from dataclasses import dataclass
from typing import Any, Final, final

import torch
from jaxtyping import Int
from torch import Tensor

from rl_contracts.packed_images import PackedImages
from rl_contracts.train import TokenBatch, images_of

SEEING_TYPES: Final = ("qwen3_vl", "qwen3_vl_moe")
"""`model_type` of the configurations with a vision tower."""

TOWER: Final = "model.visual"
"""Name of the vision tower in these models, merger included."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionShape:
    """What a model wants of an image."""

    image_token_id: int
    """Placeholder of images in the token ids."""

    merge_size: int
    """Patches along height, and along width, that become one token."""

    patch_values: int
    """Numbers in a patch."""


def vision_shape(model_config: object) -> VisionShape | None:
    """How a model sees, or None if it does not."""
    if getattr(model_config, "model_type", None) not in SEEING_TYPES:
        return None
    found: Any = model_config
    vision = found.vision_config
    return VisionShape(
        image_token_id=found.image_token_id,
        merge_size=vision.spatial_merge_size,
        patch_values=vision.in_channels * vision.temporal_patch_size * vision.patch_size**2,
    )


@final
class Vision:
    """Brings the images of a batch to one model of VeOmni's."""

    def __init__(self, model: torch.nn.Module, shape: VisionShape, *, device: torch.device) -> None:
        """Hang on to the vision tower of `model`."""
        self._shape = shape
        self._device = device
        self._rows: Tensor | None = None
        model.get_submodule(TOWER).register_forward_hook(self._lay_out)

    def problem_of(self, batch: TokenBatch, images: PackedImages | None) -> str:
        """What this model cannot do with a micro-batch and its well-formed images, or nothing."""
        found = "" if images is None else self._problem_of_images(batch, images)
        return found or self._problem_of_lost(batch, images)

    def _problem_of_images(self, batch: TokenBatch, images: PackedImages) -> str:
        shape = self._shape
        if images.patches.shape[1] != shape.patch_values:
            return (
                f"expected images.patches with {shape.patch_values} values each, as the model's "
                f"config.json says, got {images.patches.shape[1]}; encode the prompts with the "
                "processor of the same folder"
            )
        grids = images.grids.cpu()
        if bool((grids[:, 1:] % shape.merge_size).any()):
            return (
                f"expected images.grids whose height and width {shape.merge_size} divides, got "
                f"{grids.tolist()}"
            )
        wanted = self._tokens_of(grids)[images.image_of_place.cpu()]
        if not torch.equal(wanted, images.num_tokens.cpu()):
            return (
                f"expected {wanted.tolist()} placeholders at the places of its images, by their "
                f"grids, got {images.num_tokens.tolist()}"
            )
        places = _placeholders(images)
        found = batch.token_ids.cpu()[places]
        if bool((found != shape.image_token_id).any()):
            return (
                f"expected the placeholder {shape.image_token_id} at the places of its images, got "
                f"the token ids {sorted(set(found.tolist()))}"
            )
        if bool(batch.loss_mask.cpu()[places].any()):
            return "loss_mask is True on a placeholder of an image, which no policy has drawn"
        return ""

    def _problem_of_lost(self, batch: TokenBatch, images: PackedImages | None) -> str:
        """A placeholder in a prompt whose image did not come along would be trained as a word.

        The prompt of a row ends at the first True of its loss mask: behind it the policy may have
        drawn the id. Of a row without a True nobody knows where it ends, and nothing is trained.
        """
        mask, starts = batch.loss_mask.cpu(), batch.cu_seqlens.cpu().long()
        lengths = starts.diff()
        drawn = mask.long().cumsum(0)
        before = drawn[starts[:-1]]  # the mask is False on the first token of a row
        trained = (drawn[starts[1:] - 1] > before).repeat_interleave(lengths)
        in_prompt = drawn == before.repeat_interleave(lengths)
        lost = (batch.token_ids.cpu() == self._shape.image_token_id) & in_prompt & trained
        if images is not None:
            lost[_placeholders(images)] = False
        if not bool(lost.any()):
            return ""
        places = lost.nonzero().flatten().tolist()
        return (
            f"expected an image at every placeholder {self._shape.image_token_id} of a prompt, got "
            f"{len(places)} without one, the first at token {places[0]}; give the images of the "
            "prompt to its Trajectory"
        )

    def inputs(self, batch: TokenBatch) -> dict[str, object]:
        """Further arguments of the model's forward pass: what it sees, and where each token is.

        Call it before every pass, whatever the batch shows.

        Args:
            batch: as it should be, on the CPU, see `problem_of`.
        """
        images = images_of(batch)
        device = self._device
        self._rows = None
        mask = torch.zeros(1, batch.token_ids.shape[0], dtype=torch.bool)
        given: dict[str, object] = {}
        if images is not None:
            grids = images.grids.cpu()
            mask[0, _placeholders(images)] = True
            self._rows = self._rows_of_places(images, grids)
            given = {
                "pixel_values": images.patches.to(device),
                "image_grid_thw": grids.to(device),
                "multimodal_metadata": _metadata(grids),
            }
        positions = rope_positions(
            batch.positions.cpu(), batch.cu_seqlens.cpu(), images, merge_size=self._shape.merge_size
        )
        return {
            **given,
            "image_mask": mask.to(device),
            "position_ids": positions.to(device).unsqueeze(1),
        }

    def _tokens_of(self, grids: Int[Tensor, "images 3"]) -> Int[Tensor, " images"]:
        return grids.prod(dim=1) // self._shape.merge_size**2

    def _rows_of_places(
        self, images: PackedImages, grids: Int[Tensor, "images 3"]
    ) -> Tensor | None:
        """Rows of the tower's output for each placeholder, in order; None if they are just so."""
        shown = images.image_of_place.cpu()
        if torch.equal(shown, torch.arange(grids.shape[0])):
            return None
        lengths = self._tokens_of(grids)
        first = lengths.cumsum(0) - lengths
        ranges = [
            torch.arange(start, start + length)
            for start, length in zip(first[shown].tolist(), lengths[shown].tolist(), strict=True)
        ]
        return torch.cat(ranges).to(self._device)

    def _lay_out(self, _module: object, _args: object, output: Any) -> Any:  # noqa: ANN401 - VeOmni's
        """Repeat what the tower made of each image for every place that shows it.

        Once for each call of `inputs`: VeOmni calls the tower again, for videos that are not there.
        """
        rows, self._rows = self._rows, None
        if rows is not None:
            output.pooler_output = output.pooler_output[rows]
            output.deepstack_features = [each[rows] for each in output.deepstack_features]
        return output


def rope_positions(
    positions: Int[Tensor, " tokens"],
    cu_seqlens: Int[Tensor, " sequences_plus_1"],
    images: PackedImages | None,
    *,
    merge_size: int,
) -> Int[Tensor, "3 tokens"]:
    """Time, height and width of each token in its own sequence, as Qwen3-VL turns them.

    A text token has the same position in all three. The placeholders of an image share the time at
    which it begins (plus that of their frame) and count height and width from there; the text goes
    on after the longer of the two (transformers 5.19, `Qwen3VLModel.get_rope_index`).

    Args:
        positions: of each token in its sequence, from 0.
        cu_seqlens: where each sequence begins, and the number of tokens last.
        images: of the sequences; None if they show none.
        merge_size: patches along height, and along width, that become one token.
    """
    found = positions.repeat(3, 1)
    if images is None:
        return found
    ends = cu_seqlens.long()[1:]
    grids = images.grids.cpu()[images.image_of_place.cpu()].tolist()
    places = zip(images.first_tokens.tolist(), images.num_tokens.tolist(), grids, strict=True)
    for first, length, (frames, height, width) in places:
        end = int(ends[torch.searchsorted(ends, first, right=True)])
        rows, columns = height // merge_size, width // merge_size
        start = found[0, first].clone()
        axes = torch.meshgrid(
            torch.arange(frames), torch.arange(rows), torch.arange(columns), indexing="ij"
        )
        found[:, first : first + length] = torch.stack(axes).reshape(3, -1) + start
        found[:, first + length : end] += max(rows, columns) - length
    return found


def _placeholders(images: PackedImages) -> Int[Tensor, " placeholders"]:
    """Places of all placeholders in the packed tokens, in order."""
    return torch.cat(
        [
            torch.arange(first, first + length)
            for first, length in zip(
                images.first_tokens.tolist(), images.num_tokens.tolist(), strict=True
            )
        ]
    )


def _metadata(grids: Int[Tensor, "images 3"]) -> dict[str, object]:
    """What VeOmni's tower would else read back from the device (0.1.12)."""
    frames = grids[:, 1:].prod(dim=1).repeat_interleave(grids[:, 0])
    return {
        "image_grid_thw_list": grids.tolist(),
        "vit_image_cu_seqlens": torch.nn.functional.pad(frames.cumsum(0), (1, 0)).int(),
        "vit_image_max_seqlen": int(frames.max()),
    }
