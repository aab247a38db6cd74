"""Changes between two publications: small, lossless, and refused on any other base."""

from pathlib import Path

import attrs
import pytest
import torch
from torch import Tensor

from rl_contracts.rollout import PolicyVersion
from rollout_vllm import Dtype, PublishedWeights, publish_weights
from rollout_vllm.weights_delta import apply_changes, publish_changes


def publish(
    folder: Path, weights: dict[str, Tensor], version: int, dtype: Dtype = "bfloat16"
) -> PublishedWeights:
    """Two tensors of 4096 weights a file."""
    return publish_weights(
        weights.items(),
        version=PolicyVersion(version),
        folder=folder,
        dtype=dtype,
        bucket_bytes=2 * 4096 * 2,
    )


def make_weights() -> dict[str, Tensor]:
    """Four of them."""
    torch.manual_seed(0)
    return {f"w{i}": torch.randn(64, 64) for i in range(4)}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_changes_bring_the_same_bytes(tmp_path: Path, dtype: Dtype) -> None:
    """Three changed weights of 16,384 cost three places and values, not the model."""
    weights = make_weights()
    before = publish(tmp_path / "trainer", weights, 7, dtype)
    for place, value in enumerate((0.0, -0.0, float("inf"))):
        weights["w0"][place, 5] = value
    after = publish(tmp_path / "trainer", weights, 8, dtype)
    changes = publish_changes(before, after, folder=tmp_path / "sent")
    assert changes.num_bytes == 3 * (4 + {"bfloat16": 2, "float32": 4}[dtype])
    kinds = [file.kind for file in changes.files]
    assert kinds == ["changes"] + ["same"] * (len(after.files) - 1)
    made = apply_changes(before, changes, folder=tmp_path / "sampler")
    assert (made.version, made.files) == (8, after.files)
    for left, right in zip(made.paths(), after.paths(), strict=True):
        assert left.read_bytes() == right.read_bytes()
    assert made.tensors() == after.tensors()


def test_a_file_that_changed_much_is_sent_whole(tmp_path: Path) -> None:
    """A place and a value are 6 bytes, a weight is 2: from a third on, changes are no gain."""
    weights = make_weights()
    before = publish(tmp_path, weights, 1)
    weights["w0"] += 1.0
    weights["w1"][:21] += 1.0  # with w0 more than a third of the first file
    weights["w2"][:20] += 1.0  # 1280 of 8192 in the second
    after = publish(tmp_path, weights, 2)
    changes = publish_changes(before, after, folder=tmp_path / "sent")
    assert [file.kind for file in changes.files] == ["whole", "changes"]
    made = apply_changes(before, changes, folder=tmp_path / "made")
    assert made.files == after.files


def test_another_base_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    """By its version, and by its bytes: nothing is patched onto what it was not made for."""
    weights = make_weights()
    before = publish(tmp_path / "a", weights, 1)
    weights["w0"][0, 0] = 3.0
    after = publish(tmp_path / "b", weights, 2)
    changes = publish_changes(before, after, folder=tmp_path / "sent")
    made = tmp_path / "made"
    with pytest.raises(ValueError, match="expected version 1, on which the changes to version 2"):
        apply_changes(after, changes, folder=made)
    pretended = attrs.evolve(after, version=PolicyVersion(1))
    with pytest.raises(ValueError, match=r"00000.safetensors is not the file that they are based"):
        apply_changes(pretended, changes, folder=made)
    (sent,) = (file.sent for file in changes.files if file.sent is not None)
    path = changes.folder / sent.name
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"is not there, or changed since it was written"):
        apply_changes(before, changes, folder=made)
    assert not list(made.iterdir())


def test_two_types_are_refused(tmp_path: Path) -> None:
    weights = make_weights()
    left = publish(tmp_path, weights, 1)
    right = publish(tmp_path, weights, 2, "float32")
    with pytest.raises(ValueError, match="of one type, got version 1 in bfloat16 and 2 in float32"):
        publish_changes(left, right, folder=tmp_path)
