"""Image files to pixels."""

import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFile

from rl_tasks import ChatMessage, Problem, RowError, load_problems, pictures, write_parquet
from rl_tasks.pictures import PictureError, decode_picture, read_picture


def encoded(picture: Image.Image, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    picture.save(file, format=kind)
    return file.getvalue()


def test_pixels_come_as_they_are() -> None:
    """Height first, three colours; grey becomes three equal ones."""
    picture = Image.new("RGB", (3, 2), (10, 20, 30))
    picture.putpixel((2, 1), (1, 2, 3))
    found = decode_picture(encoded(picture))
    assert found.shape == (2, 3, 3)
    assert found.dtype == np.uint8
    assert found[0, 0].tolist() == [10, 20, 30]
    assert found[1, 2].tolist() == [1, 2, 3]
    assert decode_picture(encoded(Image.new("L", (1, 1), 7))).tolist() == [[[7, 7, 7]]]
    assert decode_picture(encoded(picture, "JPEG")).shape == (2, 3, 3)


def test_what_is_transparent_becomes_white() -> None:
    """Fully, half, and in pictures that name their colours in a table."""
    picture = Image.new("RGBA", (3, 1), (0, 0, 0, 0))
    picture.putpixel((1, 0), (0, 0, 0, 255))
    picture.putpixel((2, 0), (0, 0, 0, 51))  # a fifth
    assert decode_picture(encoded(picture)).tolist() == [[[255] * 3, [0] * 3, [204] * 3]]
    table = Image.new("P", (1, 1), 0)
    table.putpalette([9, 9, 9])
    table.info["transparency"] = 0
    file = io.BytesIO()
    table.save(file, format="PNG", transparency=0)
    assert decode_picture(file.getvalue()).tolist() == [[[255] * 3]]


def test_what_is_no_picture_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other bytes, half a file, and one that is too large when unpacked."""
    expected = r"expected an image file, got 3 bytes that are none \(PNG, .*are read\)"
    with pytest.raises(PictureError, match=expected):
        decode_picture(b"GIF")
    whole = encoded(Image.effect_noise((64, 64), 50.0))
    with pytest.raises(PictureError, match="expected an image file"):
        decode_picture(whole[: len(whole) // 2])
    monkeypatch.setattr(pictures, "MAX_PIXELS", 64 * 63)
    with pytest.raises(PictureError, match="expected at most 4032 pixels, got 64 x 64"):
        decode_picture(whole)


def test_grey_of_16_bits_keeps_its_upper_8() -> None:
    """Pillow's own conversion makes everything above 255 white."""
    deep = np.array([[0, 255, 256, 0x8000, 0xFFFF]], dtype=np.uint16)
    for kind in ("PNG", "TIFF"):
        found = decode_picture(encoded(Image.fromarray(deep), kind))
        assert found.dtype == np.uint8
        assert found.tolist() == [[[0] * 3, [0] * 3, [1] * 3, [128] * 3, [255] * 3]]
    file = io.BytesIO()
    Image.fromarray(deep).save(file, format="PNG", transparency=256)
    assert decode_picture(file.getvalue())[0, :, 0].tolist() == [0, 0, 255, 128, 255]


@pytest.mark.parametrize("kind", [np.int32, np.float32])
def test_pixels_of_unknown_range_are_refused(kind: type) -> None:
    """Some files mean 0 to 1, and others anything."""
    data = encoded(Image.fromarray(np.ones((2, 2), dtype=kind)), "TIFF")
    with pytest.raises(PictureError, match="expected pixels of 8 or 16 bits, got 32"):
        decode_picture(data)


@pytest.mark.parametrize("kind", ["EPS", "PPM", "ICO"])
def test_other_formats_are_not_opened(kind: str) -> None:
    """To show an EPS file is to run it, in Ghostscript."""
    data = encoded(Image.new("RGB", (16, 16)), kind)
    Image.open(io.BytesIO(data)).close()  # pillow knows it
    with pytest.raises(PictureError, match=r"bytes that are none .*: cannot identify image file"):
        decode_picture(data)


@pytest.mark.parametrize("error", [IndexError, NotImplementedError, TypeError])
def test_whatever_a_decoder_raises_is_said(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """Damaged files make pillow's decoders stumble in many ways."""

    def load(_: object) -> None:
        raise error("stumbled")

    data = encoded(Image.new("RGB", (2, 2)))
    monkeypatch.setattr(ImageFile.ImageFile, "load", load)
    with pytest.raises(PictureError, match=r"bytes that are none .*: stumbled"):
        decode_picture(data)


@pytest.mark.parametrize("deep", [False, True])
def test_a_cameras_orientation_is_applied(deep: bool) -> None:  # noqa: FBT001
    """Orientation 6: the camera was held on its side, and the first row is the right column."""
    grey = np.array([[10, 20, 30], [40, 50, 60]], dtype=np.uint8)
    picture = Image.fromarray(grey.astype(np.uint16) << 8 if deep else grey)
    exif = Image.Exif()
    exif[0x0112] = 6
    file = io.BytesIO()
    picture.save(file, format="PNG", exif=exif)
    assert decode_picture(file.getvalue())[:, :, 0].tolist() == [[40, 10], [50, 20], [60, 30]]


def test_bytes_come_first_and_paths_begin_beside_the_file(tmp_path: Path) -> None:
    """As Hugging Face writes them: bytes, and the path where they once were."""
    (tmp_path / "one.png").write_bytes(b"file")
    assert read_picture({"bytes": b"here", "path": "gone.png"}, folder=tmp_path) == b"here"
    assert read_picture({"bytes": None, "path": "one.png"}, folder=tmp_path) == b"file"
    assert read_picture({"path": str(tmp_path / "one.png")}, folder=Path("/")) == b"file"
    with pytest.raises(PictureError, match=r"expected \{bytes, path\}, got \{'image'"):
        read_picture({"image": b"x"}, folder=tmp_path)


def problem(text: str, *images: bytes) -> Problem:
    return Problem(
        problem_id="p",
        messages=(ChatMessage(role="user", content=text),),
        images=images,
        ground_truth="3",
        data_source="shapes",
    )


def test_problems_with_images_are_written_and_read(tmp_path: Path) -> None:
    """Through parquet, beside one without; a repeated prompt with another image is another."""
    red, blue = (encoded(Image.new("RGB", (4, 4), each), "BMP") for each in ("red", "blue"))
    assert len(red) == len(blue)
    given = [problem("<image>?", red), problem("<image>?", blue), problem("of <b>?")]
    file = tmp_path / "data.parquet"
    write_parquet(given, file)
    loaded = load_problems([file], known_sources=None, repeated="drop")
    assert [each.images for each in loaded.problems] == [(red,), (blue,), ()]
    assert loaded.num_repeated == 0
    assert loaded.ignored_columns == ()
    again = load_problems([file], known_sources=None)
    assert again.problems == loaded.problems


def test_placeholders_and_images_agree(tmp_path: Path) -> None:
    """By a row's name in a file; by the problem's in a program; text alone may say anything."""
    red = encoded(Image.new("RGB", (4, 4), "red"))
    with pytest.raises(ValueError, match=r"'p': expected one <image> .* its 1 images, got 2"):
        problem("<image><image>", red)
    assert problem("What does <image> mean in HTML?").images == ()
    (tmp_path / "red.png").write_bytes(red)
    file = tmp_path / "data.jsonl"
    row = (
        '{"data_source": "s", "prompt": [{"role": "user", "content": "%s"}], "images": %s, '
        '"reward_model": {"ground_truth": "3"}}\n'
    )
    one = '[{"path": "red.png"}]'
    file.write_text(row % ("<image>?", one) + row % ("<image><image>", one))
    with pytest.raises(RowError) as caught:
        load_problems([file], known_sources=None)
    assert str(caught.value) == (
        f"{file}, line 2, images: expected one <image> in the prompt for each of 1 images, got 2"
    )
    file.write_text(row % ("<image>?", "[]") + row % ("<image>?", "null"))
    assert [each.images for each in load_problems([file], known_sources=None).problems] == [(), ()]
    file.write_text(row % ("<image>?", one))
    assert load_problems([file], known_sources=None).problems[0].images == (red,)


def test_import_loads_no_pillow() -> None:
    """Text alone needs neither pillow nor numpy."""
    code = "import sys, rl_tasks; print(sorted({'PIL', 'numpy'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
