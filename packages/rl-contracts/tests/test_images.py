"""What holds of images on their way from a prompt to a packed batch."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from rl_contracts import Completion, PolicyVersion, Trajectory
from rl_contracts.batch_checks import inspect_batches
from rl_contracts.images import ImagePatches, PromptImage, check_places
from rl_contracts.packed_images import PackedImages
from rl_contracts.packing import pack, unpack
from rl_contracts.train import PackedBatch, TokenBatch

V0 = PolicyVersion(0)
IMAGE = 9


def patches(count: int, value: float) -> "npt.NDArray[np.float32]":
    return np.full((count, 6), value, dtype=np.float32)


def image(value: float, *, first_token: int = 1, rows: int = 2, columns: int = 2) -> ImagePatches:
    """Four patches behind one placeholder."""
    return ImagePatches(
        patches=patches(rows * columns, value),
        grid=(1, rows, columns),
        first_token=first_token,
        num_tokens=rows * columns // 4,
    )


def row(name: str, prompt: list[int], *images: ImagePatches, num_new: int = 2) -> Trajectory:
    completion = Completion(
        token_ids=(7,) * num_new,
        rollout_logprobs=(-0.5,) * num_new,
        policy_versions=(V0,) * num_new,
        finish_reason="stop",
    )
    return Trajectory.from_completion(
        prompt, completion, trajectory_id=name, group_id="g", images=images
    )


def test_a_group_shares_its_image() -> None:
    """Two completions of one prompt: one copy of the patches, two places, by hand."""
    seen = image(0.25)
    rows = [row("a", [5, IMAGE, 6], seen), row("b", [5, IMAGE, 6], seen, num_new=3)]
    assert rows[0].images[0] is rows[1].images[0]
    [[batch]] = pack(rows, [1.0, -1.0], max_tokens=11)
    assert batch.images is not None
    assert batch.images.patches.tolist() == [[0.25] * 6] * 4
    assert batch.images.grids.tolist() == [[1, 2, 2]]
    assert batch.images.image_of_place.tolist() == [0, 0]
    assert batch.images.first_tokens.tolist() == [1, 6]
    assert batch.images.num_tokens.tolist() == [1, 1]
    assert batch.token_ids[batch.images.first_tokens].tolist() == [IMAGE, IMAGE]


def test_no_image_is_lost_or_split() -> None:
    """Rows with 0 to 3 images over 2 ranks and several micro-batches: each place has its own."""
    rows = []
    for number in range(9):
        count = number % 4
        prompt = [5, *[IMAGE, 6] * count]
        shown = [image(10.0 * number + k, first_token=1 + 2 * k) for k in range(count)]
        rows.append(row(str(number), prompt, *shown, num_new=1 + number % 3))
    ranks = pack(rows, [0.0] * 9, max_tokens=12, num_ranks=2)
    found: dict[str, list[float]] = {}
    for batch in (each for rank in ranks for each in rank):
        assert inspect_batches([batch], vocab_size=10, check_images=lambda *_: "").problem == ""
        starts = batch.cu_seqlens.tolist()
        found |= {name: [] for name in batch.trajectory_ids}
        if batch.images is None:
            continue
        first_patch = torch.cat([torch.zeros(1, dtype=torch.int64), batch.images.grids.prod(1)])
        values = batch.images.patches[first_patch.cumsum(0)[:-1], 0].tolist()
        for place, number in zip(
            batch.images.first_tokens.tolist(), batch.images.image_of_place.tolist(), strict=True
        ):
            sequence = next(k for k, end in enumerate(starts[1:]) if place < end)
            assert batch.token_ids[place] == IMAGE
            found[batch.trajectory_ids[sequence]].append(values[number])
    wanted = {each.trajectory_id: [float(i.patches[0, 0]) for i in each.images] for each in rows}
    assert {name: found[name] for name in wanted} == wanted


def test_text_alone_packs_as_before() -> None:
    """Without an image nothing is there, and a batch beside one with images is the same as ever."""
    [[plain]] = pack([row("a", [5, 6])], [1.0], max_tokens=4)
    assert plain.images is None
    assert plain.to(torch.device("cpu")).images is None
    ranks = pack([row("a", [5, 6]), row("b", [5, IMAGE], image(1.0))], [1.0, 2.0], max_tokens=4)
    alone = next(each for each in ranks[0] if each.trajectory_ids == ("a",))
    for name in ("token_ids", "positions", "cu_seqlens", "loss_mask", "rollout_logprobs"):
        assert torch.equal(getattr(alone, name), getattr(plain, name)), name
    assert alone.images is None


def test_values_come_back_in_order_with_images() -> None:
    """`unpack` cuts as it does without images."""
    rows = [row("a", [5, IMAGE], image(1.0)), row("b", [5, 6, 6])]
    [[batch]] = pack(rows, [0.0, 0.0], max_tokens=9)
    values = unpack([batch.token_ids], [batch], trajectory_ids=["b", "a"])
    assert [value.tolist() for value in values] == [[5, 6, 6, 7, 7], [5, IMAGE, 7, 7]]


def test_arrays_cannot_be_written_to() -> None:
    """What many completions share stays as it is; the caller's own array may be written to."""
    rgb = np.zeros((2, 3, 3), dtype=np.uint8)
    shown = PromptImage(rgb=rgb, first_token=0, num_tokens=1)
    with pytest.raises(ValueError, match="read-only"):
        shown.rgb[0, 0, 0] = 1
    with pytest.raises(ValueError, match="read-only"):
        image(0.0).patches[0, 0] = 1.0
    rgb[0, 0, 0] = 1
    assert np.shares_memory(shown.rgb, rgb)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grid": (1, 2, 3)}, r"product is the number of patches, 4, got \(1, 2, 3\)"),
        ({"grid": (-1, -2, 2)}, "expected a grid whose product"),
        ({"num_tokens": 3}, "expected num_tokens to divide the 4 patches, got 3"),
        ({"num_tokens": 0}, "num_tokens of at least 1, got 1 and 0"),
        ({"first_token": -1}, "expected first_token of at least 0"),
        ({"patches": np.zeros((4, 6))}, "expected patches of type float32, got float64"),
        ({"patches": patches(4, 0.0)[0]}, r"of shape \(patches, values\), got \(6,\)"),
    ],
)
def test_patches_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    """Shape, type and place are checked where the value is made, with both numbers."""
    with pytest.raises(ValueError, match=message):
        replace(image(0.0), **changes)


def test_pictures_that_do_not_fit_are_refused() -> None:
    """A picture has three colours of one byte each."""
    with pytest.raises(ValueError, match=r"of shape \(height, width, 3\), got \(2, 2, 4\)"):
        PromptImage(rgb=np.zeros((2, 2, 4), dtype=np.uint8), first_token=0, num_tokens=1)
    with pytest.raises(ValueError, match="expected rgb of type uint8, got float64"):
        PromptImage(rgb=np.zeros((2, 2, 3)), first_token=0, num_tokens=1)  # type: ignore[arg-type]


def test_images_lie_in_the_prompt() -> None:
    """An image on a sampled token, past the end, or on another image is refused by name."""
    with pytest.raises(ValueError, match=r"Trajectory a: image 0 .* at 2 to 2, expected .* 0 to 1"):
        row("a", [5, IMAGE], image(0.0, first_token=2))
    one, two = image(0.0, first_token=1), image(0.0, first_token=1)
    with pytest.raises(ValueError, match="here: image 1 has its placeholders at 1 to 1"):
        check_places("here", [one, two], num_tokens=4)


def packed() -> PackedBatch:
    [[batch]] = pack(
        [row("a", [5, IMAGE], image(0.0)), row("b", [5, IMAGE], image(1.0))],
        [0.0, 0.0],
        max_tokens=8,
    )
    return batch


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grids": torch.tensor([[1, 2, 2], [1, 2, 4]])}, "add up to the 8 patches, got 12"),
        ({"image_of_place": torch.tensor([0, 0])}, "every one of its 2 images at some place"),
        ({"image_of_place": torch.tensor([0, 2])}, "every one of its 2 images at some place"),
        ({"first_tokens": torch.tensor([5, 1])}, "one after the other, each within one sequence"),
        ({"first_tokens": torch.tensor([1, 8])}, r"got them from \[1, 8\] with \[1, 1\] tokens"),
        ({"num_tokens": torch.tensor([4, 1])}, r"from \[1, 5\] with \[4, 1\] tokens"),
        ({"num_tokens": torch.tensor([0, 1])}, "each within one sequence"),
    ],
)
def test_malformed_images_of_a_batch_are_refused(
    changes: dict[str, torch.Tensor], message: str
) -> None:
    """An engine is told before its ranks meet; the trajectories are named."""
    batch = packed()
    assert batch.images is not None
    bad = replace(batch, images=replace(batch.images, **changes))
    problem = inspect_batches([bad], vocab_size=10, check_images=lambda *_: "").problem
    assert problem.startswith("micro-batch 0 (trajectories a, b): ")
    assert re.search(message, problem), problem


def test_an_engine_without_eyes_refuses_images() -> None:
    """The default: pixels are never ignored."""
    problem = inspect_batches([packed()], vocab_size=10).problem
    assert "it shows 2 images, which this engine would not look at" in problem


def test_packed_shapes_are_checked() -> None:
    """A grid has three numbers."""
    batch = packed()
    assert batch.images is not None
    with pytest.raises(ValueError, match=r"expected grids of shape \(images, 3\), got \(2, 2\)"):
        replace(batch.images, grids=batch.images.grids[:, :2])
    moved = batch.to(torch.device("meta")).images
    assert isinstance(moved, PackedImages)
    assert moved.patches.is_meta
    assert moved.num_tokens.is_meta


@pytest.mark.parametrize(
    ("name", "dtype", "wanted"),
    [
        ("patches", torch.uint8, "float32"),
        ("patches", torch.bfloat16, "float32"),
        ("grids", torch.int32, "int64"),
        ("image_of_place", torch.bool, "int64"),
        ("first_tokens", torch.float32, "int64"),
        ("num_tokens", torch.int32, "int64"),
    ],
)
def test_packed_types_are_checked(name: str, dtype: torch.dtype, wanted: str) -> None:
    """Where they are made, and not on one rank while the others wait for it."""
    images = packed().images
    assert images is not None
    changes: Any = {name: getattr(images, name).to(dtype)}
    with pytest.raises(ValueError, match=rf"expected {name} of type torch\.{wanted}, got {dtype}"):
        replace(images, **changes)


def test_packed_places_lie_along_one_axis() -> None:
    """A single number is no list of places."""
    images = packed().images
    assert images is not None
    with pytest.raises(ValueError, match=r"first_tokens of shape \(places,\), got \(\)"):
        replace(images, first_tokens=torch.tensor(1))


def test_an_engine_is_asked_about_text_too() -> None:
    """It may look for images that were lost on the way."""
    [[text]] = pack([row("a", [5, IMAGE])], [0.0], max_tokens=8)
    asked: list[PackedImages | None] = []

    def check(_: TokenBatch, images: PackedImages | None) -> str:
        asked.append(images)
        return "lost"

    problem = inspect_batches([text], vocab_size=10, check_images=check).problem
    assert asked == [None]
    assert problem == "micro-batch 0 (trajectories a): lost"
    assert inspect_batches([text], vocab_size=10).problem == ""


def test_images_of_two_models_are_refused() -> None:
    """Patches with other numbers of values cannot lie in one tensor."""
    other = replace(image(0.0), patches=np.zeros((4, 5), dtype=np.float32))
    with pytest.raises(ValueError, match=r"as many values in each patch, got \[5, 6\]"):
        pack(
            [row("a", [5, IMAGE], image(0.0)), row("b", [5, IMAGE], other)],
            [0.0, 0.0],
            max_tokens=8,
        )
