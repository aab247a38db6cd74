"""The images of a packed batch: each once, however many of its sequences show it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from rl_contracts.images import ImagePatches
from rl_contracts.rollout import Trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedImages:
    """Images, and the places in the packed tokens where each of them is shown."""

    patches: Float[Tensor, "patches values"]
    """float32: those of all images, one image after the other."""

    grids: Int[Tensor, "images 3"]
    """int64: patches of each image along time, height and width."""

    image_of_place: Int[Tensor, " places"]
    """int64: which image is shown at each place. The completions of one prompt share it."""

    first_tokens: Int[Tensor, " places"]
    """int64, rising: where the placeholders of each place begin in `PackedBatch.token_ids`."""

    num_tokens: Int[Tensor, " places"]
    """int64: placeholders of each place, one after the other."""

    def __post_init__(self) -> None:
        """Check shapes and types where data is made. Reads no tensor value: never synchronises."""
        num_places = self.first_tokens.numel()
        for name, shape, fits in (
            ("first_tokens", "(places,)", self.first_tokens.ndim == 1),
            ("patches", "(patches, values)", self.patches.ndim == 2),  # noqa: PLR2004 - axes
            ("grids", "(images, 3)", self.grids.ndim == 2 and self.grids.shape[1] == 3),  # noqa: PLR2004 - axes
            ("image_of_place", f"({num_places},)", self.image_of_place.shape == (num_places,)),
            ("num_tokens", f"({num_places},)", self.num_tokens.shape == (num_places,)),
        ):
            if not fits:
                found = tuple(getattr(self, name).shape)
                message = f"PackedImages: expected {name} of shape {shape}, got {found}"
                raise ValueError(message)
            wanted = torch.float32 if name == "patches" else torch.int64
            dtype = getattr(self, name).dtype
            if dtype != wanted:
                message = f"PackedImages: expected {name} of type {wanted}, got {dtype}"
                raise ValueError(message)

    def to(self, device: torch.device) -> "PackedImages":
        """The same images with their tensors on `device`."""
        return PackedImages(
            patches=self.patches.to(device),
            grids=self.grids.to(device),
            image_of_place=self.image_of_place.to(device),
            first_tokens=self.first_tokens.to(device),
            num_tokens=self.num_tokens.to(device),
        )


def pack_images(trajectories: Sequence[Trajectory]) -> PackedImages | None:
    """The images of sequences that lie end to end; None if they show none.

    One image value that several trajectories share is packed once.

    Raises:
        ValueError: for images with different numbers of values per patch: of two models.
    """
    if not any(row.images for row in trajectories):
        return None
    images: dict[int, ImagePatches] = {}
    shown: list[int] = []
    first_tokens: list[int] = []
    starts = accumulate((len(row.token_ids) for row in trajectories), initial=0)
    for start, row in zip(starts, trajectories, strict=False):
        for image in row.images:
            shown.append(id(image))
            images.setdefault(id(image), image)
            first_tokens.append(start + image.first_token)
    widths = sorted({image.patches.shape[1] for image in images.values()})
    if len(widths) > 1:
        message = f"pack: expected images with as many values in each patch, got {widths}"
        raise ValueError(message)
    numbers = {key: number for number, key in enumerate(images)}
    return PackedImages(
        patches=torch.from_numpy(np.concatenate([image.patches for image in images.values()])),
        grids=torch.tensor([image.grid for image in images.values()]),
        image_of_place=torch.tensor([numbers[key] for key in shown]),
        first_tokens=torch.tensor(first_tokens),
        num_tokens=torch.tensor([images[key].num_tokens for key in shown]),
    )


def problem_of_images(images: PackedImages, cu_seqlens: Int[Tensor, " sequences_plus_1"]) -> str:
    """What is wrong with the images of a micro-batch, or nothing; reads their values.

    Args:
        images: of the micro-batch.
        cu_seqlens: of the micro-batch, as they should be.
    """
    grids, image_of_place = images.grids.cpu(), images.image_of_place.cpu()
    first, lengths = images.first_tokens.cpu(), images.num_tokens.cpu()
    num_patches = int(grids.prod(dim=1).sum())
    if num_patches != images.patches.shape[0] or bool((grids < 1).any()):
        return (
            f"expected images.grids whose products add up to the {images.patches.shape[0]} "
            f"patches, got {num_patches}"
        )
    if not image_of_place.numel() or set(image_of_place.tolist()) != set(range(len(grids))):
        return (
            f"expected every one of its {len(grids)} images at some place, got "
            f"images.image_of_place {image_of_place.tolist()}"
        )
    last = first + lengths - 1
    ends = cu_seqlens.cpu().long()[1:]
    after = torch.cat([first.new_full((1,), -1), last[:-1]])
    if (
        bool((lengths < 1).any() or (first <= after).any() or last[-1] >= ends[-1])
        # the first end above a token is that of its sequence
        or not torch.equal(*(torch.searchsorted(ends, each, right=True) for each in (first, last)))
    ):
        return (
            "expected places of images one after the other, each within one sequence, got them "
            f"from {first.tolist()} with {lengths.tolist()} tokens"
        )
    return ""
