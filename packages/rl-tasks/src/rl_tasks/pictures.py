"""Image files to pixels. Needs the extra ``rl-tasks[images]``."""

import io
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

PLACEHOLDER: Final = "<image>"
"""Where an image stands in the text of a message, as in verl's files."""

NEEDS_PILLOW: Final = (
    "prompts with images need pillow and numpy; install the extra rl-tasks[images]"
)


class PictureError(ValueError):
    """What is wrong with an image file."""


def read_picture(value: object, *, folder: Path) -> bytes:
    """The encoded bytes of one entry of an `images` column: ``{bytes, path}``, one of them given.

    Args:
        value: the entry.
        folder: of the file that holds it; relative paths begin there.

    Raises:
        PictureError: if it names no image file that can be read.
    """
    if not isinstance(value, dict) or not set(value) <= {"bytes", "path"}:
        raise PictureError(f"expected {{bytes, path}}, got {str(value)[:60]}")
    data, path = value.get("bytes"), value.get("path")
    if isinstance(data, bytes) and data:
        return data  # a path beside them says where they once were
    if not isinstance(path, str) or not path:
        raise PictureError(f"expected bytes or a path, got {str(value)[:60]}")
    if "://" in path:
        raise PictureError(f"expected a local path, got {path!r}; fetch the file first")
    try:
        return (folder / path).read_bytes()
    except OSError as error:
        raise PictureError(f"{path!r} cannot be read: {error}") from error


def decode_picture(data: bytes) -> "npt.NDArray[np.uint8]":
    """Pixels ``[height, width, 3]`` of an encoded image; what is transparent becomes white.

    White is what Qwen's own preparation of images takes (qwen-vl-utils).

    Raises:
        PictureError: for what is no image, is damaged, or is larger than pillow takes.
        ImportError: without pillow; names the extra.
    """
    try:
        import numpy as np  # noqa: PLC0415 - an extra
        from PIL import Image  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ImportError(NEEDS_PILLOW) from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(data)) as picture:
                if picture.has_transparency_data:
                    seen = picture.convert("RGBA")
                    opaque = Image.new("RGBA", seen.size, (255, 255, 255, 255))
                    rgb = Image.alpha_composite(opaque, seen).convert("RGB")
                else:
                    rgb = picture.convert("RGB")
    # pillow's readers raise all of these for files that are not as they should be
    except (
        OSError,
        ValueError,
        SyntaxError,
        EOFError,
        Image.DecompressionBombError,
        Image.DecompressionBombWarning,
    ) as error:
        message = f"expected an image file, got {len(data)} bytes that are none: {error}"
        raise PictureError(message) from error
    return cast("npt.NDArray[np.uint8]", np.array(rgb))
