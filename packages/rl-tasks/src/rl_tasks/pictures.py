"""Image files to pixels. Needs the extra ``rl-tasks[images]``."""

import io
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from PIL import Image

PLACEHOLDER: Final = "<image>"
"""Where an image stands in the text of a message, as in verl's files."""

FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""What is read; some of what else pillow knows is a program (EPS) or a reader with a history."""

MAX_PIXELS: Final = (1 << 28) // 3
"""256 MiB in memory, which is where pillow begins to warn."""

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

    White is what Qwen's own preparation of images takes (qwen-vl-utils). A camera's orientation
    (EXIF) is applied, as transformers' ``load_image`` does; grey of 16 bits keeps its upper 8.

    Raises:
        PictureError: for what is none of `FORMATS`, is damaged, has more than `MAX_PIXELS`, or has
            pixels whose range is not known (32 bits).
        ImportError: without pillow; names the extra.
    """
    try:
        import numpy as np  # noqa: F401, PLC0415 - an extra
        from PIL import Image, ImageOps  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ImportError(NEEDS_PILLOW) from error
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as opened:
            _require_readable(opened)
            return _pixels(ImageOps.exif_transpose(opened))
    except PictureError:
        raise
    # Pillow's decoders raise whatever they stumble over in a file that is not as it should be:
    # OSError, SyntaxError, IndexError, NotImplementedError, TypeError, struct.error, ...
    except Exception as error:
        kinds = ", ".join(FORMATS)
        message = f"expected an image file, got {len(data)} bytes that are none ({kinds} are read)"
        raise PictureError(f"{message}: {error}") from error


def _require_readable(opened: "Image.Image") -> None:
    """Before anything of it is unpacked."""
    if opened.width * opened.height > MAX_PIXELS:
        size = f"{opened.width} x {opened.height}"
        raise PictureError(f"expected at most {MAX_PIXELS} pixels, got {size}")
    if opened.mode in {"I", "F"}:
        message = f"expected pixels of 8 or 16 bits, got 32 (mode {opened.mode})"
        raise PictureError(f"{message}; which of them is white is not known: convert the file")


def _pixels(picture: "Image.Image") -> "npt.NDArray[np.uint8]":
    import numpy as np  # noqa: PLC0415 - an extra
    from PIL import Image  # noqa: PLC0415 - an extra

    if picture.mode.startswith("I;16"):  # pillow would cut off everything above 255
        deep = np.asarray(picture)
        grey = (deep >> 8).astype(np.uint8)
        grey[deep == picture.info.get("transparency", -1)] = 255
        return np.repeat(grey[:, :, None], 3, axis=2)
    if picture.has_transparency_data:
        seen = picture.convert("RGBA")
        opaque = Image.new("RGBA", seen.size, (255, 255, 255, 255))
        picture = Image.alpha_composite(opaque, seen)
    return cast("npt.NDArray[np.uint8]", np.array(picture.convert("RGB")))
