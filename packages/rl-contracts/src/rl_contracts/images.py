"""Images in a prompt: as a sampler shows them to its model, and as an engine trains on them.

Both halves of one image say where its placeholders stand in the prompt's token ids. That place is
the truth: a policy may draw the placeholder's id itself, and such a token is no image.

Made once for a prompt and shared by all completions of it: values here are never copied, and their
arrays cannot be written to. Knows nothing of torch, of an engine or of vLLM.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from rl_contracts.rollout import Trajectory

_T = TypeVar("_T", bound="np.generic[Any]")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PromptImage:
    """One image of a prompt, for a sampler."""

    rgb: "npt.NDArray[np.uint8]"
    """``[height, width, 3]``, as decoded, before any resizing; read-only."""

    first_token: int
    """Place of its first placeholder in the token ids of the prompt."""

    num_tokens: int
    """Placeholders, one after the other; at least 1."""

    def __post_init__(self) -> None:
        """Check shapes once, and close the array to writers."""
        if self.rgb.ndim != 3 or self.rgb.shape[2] != 3 or self.rgb.size == 0:  # noqa: PLR2004 - axes, and colours
            message = f"PromptImage: expected rgb of shape (height, width, 3), got {self.rgb.shape}"
            raise ValueError(message)
        if self.rgb.dtype != np.uint8:
            message = f"PromptImage: expected rgb of type uint8, got {self.rgb.dtype}"
            raise ValueError(message)
        _check_place("PromptImage", self.first_token, self.num_tokens)
        object.__setattr__(self, "rgb", _read_only(self.rgb))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ImagePatches:
    """One image of a prompt, cut into the patches that a vision tower reads."""

    patches: "npt.NDArray[np.float32]"
    """``[patches, values]``: normalised pixels, in the order of the model's processor
    (``pixel_values`` of Hugging Face's Qwen-VL processors); read-only."""

    grid: tuple[int, int, int]
    """Patches along time, height and width, whose product is their number
    (``image_grid_thw``)."""

    first_token: int
    """Place of its first placeholder in the token ids of the prompt."""

    num_tokens: int
    """Placeholders, one after the other; at least 1, and a divisor of the patches."""

    def __post_init__(self) -> None:
        """Check shapes once, and close the array to writers."""
        if self.patches.ndim != 2 or self.patches.size == 0:  # noqa: PLR2004 - axes
            message = (
                f"ImagePatches: expected patches of shape (patches, values), "
                f"got {self.patches.shape}"
            )
            raise ValueError(message)
        if self.patches.dtype != np.float32:
            message = f"ImagePatches: expected patches of type float32, got {self.patches.dtype}"
            raise ValueError(message)
        num_patches = self.patches.shape[0]
        if min(self.grid) < 1 or prod(self.grid) != num_patches:
            message = (
                f"ImagePatches: expected a grid whose product is the number of patches, "
                f"{num_patches}, got {self.grid}"
            )
            raise ValueError(message)
        _check_place("ImagePatches", self.first_token, self.num_tokens)
        if num_patches % self.num_tokens:
            message = (
                f"ImagePatches: expected num_tokens to divide the {num_patches} patches, "
                f"got {self.num_tokens}"
            )
            raise ValueError(message)
        object.__setattr__(self, "patches", _read_only(self.patches))


def check_places(
    where: str, images: "Sequence[PromptImage | ImagePatches]", *, num_tokens: int
) -> None:
    """Refuse images that lie outside of a prompt, on each other, or out of order.

    Args:
        where: begins the message.
        images: in the order of their places.
        num_tokens: of the prompt.

    Raises:
        ValueError: names the image.
    """
    end = 0
    for number, image in enumerate(images):
        if image.first_token < end or image.first_token + image.num_tokens > num_tokens:
            message = (
                f"{where}: image {number} has its placeholders at {image.first_token} to "
                f"{image.first_token + image.num_tokens - 1}, expected them from {end} to "
                f"{num_tokens - 1}, after the image before and inside of the prompt"
            )
            raise ValueError(message)
        end = image.first_token + image.num_tokens


def check_trajectory_images(trajectory: "Trajectory") -> None:
    """Refuse images that do not lie in the prompt of a trajectory.

    Raises:
        ValueError: names the trajectory and the image.
    """
    where = f"Trajectory {trajectory.trajectory_id}"
    mask = trajectory.loss_mask
    num_prompt = mask.index(True) if True in mask else len(mask)
    check_places(where, trajectory.images, num_tokens=num_prompt)


def _check_place(name: str, first_token: int, num_tokens: int) -> None:
    if first_token < 0 or num_tokens < 1:
        message = (
            f"{name}: expected first_token of at least 0 and num_tokens of at least 1, "
            f"got {first_token} and {num_tokens}"
        )
        raise ValueError(message)


def _read_only(array: "np.ndarray[Any, np.dtype[_T]]") -> "np.ndarray[Any, np.dtype[_T]]":
    """A view of the same memory that cannot be written through."""
    view = array.view()
    view.flags.writeable = False
    return view
