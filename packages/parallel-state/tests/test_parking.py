"""Memory that is given away and taken back, and who is refused meanwhile."""

from itertools import pairwise

import pytest
import torch

from parallel_state import parking
from parallel_state.parking import (
    Parked,
    held_by,
    park,
    require_on_device,
    require_parkable,
    unpark,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_memory_goes_and_comes_back_under_the_views_of_it() -> None:
    """Two views of one storage and a tensor of its own: freed, then the same bits in both views."""
    flat = torch.arange(6.0)
    view, other = flat.view(2, 3), torch.arange(4, dtype=torch.bfloat16)
    parked = park([flat, view, other], CPU)
    assert parked.nbytes == 6 * 4 + 4 * 2
    assert flat.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 0
    unpark("to_device", parked)
    assert flat.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert view.data_ptr() == flat.data_ptr()
    assert other.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert parked.nbytes == 0


def test_copies_cross_the_borders_of_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes below, at and above a slab, in bytes of no alignment: the same bits come back."""
    monkeypatch.setattr(parking, "_LARGEST_SLAB", 1024)
    monkeypatch.setattr(parking, "_SMALLEST_SLAB", 512)
    generator = torch.Generator().manual_seed(0)
    sizes = [1, 255, 256, 257, 1023, 1024, 1025, 7, 5000, *range(300, 700, 37)]
    tensors = [
        torch.randint(256, (size,), dtype=torch.uint8, generator=generator) for size in sizes
    ]
    wanted = [tensor.clone() for tensor in tensors]
    rooms = parking._room_for(sizes, pinned=False)
    assert [sum(piece.numel() for piece in pieces) for pieces in rooms] == sizes
    assert max(len(pieces) for pieces in rooms) > 2
    ranges = sorted(
        (piece.data_ptr(), piece.data_ptr() + piece.numel()) for room in rooms for piece in room
    )
    assert all(end <= start for (_, end), (start, _) in pairwise(ranges))  # none lies on another
    parked = Parked(tensors)
    assert parked.nbytes == sum(sizes)
    assert {tensor.untyped_storage().nbytes() for tensor in tensors} == {0}
    parked.restore()
    assert all(map(torch.equal, tensors, wanted))
    with pytest.raises(ValueError, match="zip"):
        parked.restore()


@pytest.mark.parametrize("num_bytes", [1, 2**20, 3 * 2**29 + 5, 2**30, 45_811_335_168])
def test_slabs_are_powers_of_two_and_waste_little(num_bytes: int) -> None:
    """What torch rounds a block of pinned memory up to; the last is 30B-A3B on 8 ranks."""
    sizes = list(parking._slab_sizes(num_bytes))
    assert all(size.bit_count() == 1 and size <= 2**30 for size in sizes)
    assert 0 <= sum(sizes) - num_bytes < 2**20


def test_tensors_without_memory_are_left_alone() -> None:
    """A shard without elements, as of experts that another rank holds."""
    parked = Parked([torch.empty(0)])
    assert parked.nbytes == 0
    parked.restore()


def test_weights_and_moments_are_held_and_counts_of_steps_are_not() -> None:
    """12 bytes per weight, as AdamW keeps them in float32."""
    model = torch.nn.Linear(3, 5, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    assert [tuple(tensor.shape) for tensor in held_by(model, [optimizer])] == [(5, 3)]
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert [tuple(tensor.shape) for tensor in held_by(model, [optimizer])] == [(5, 3)] * 3
    assert Parked(held_by(model, [optimizer])).nbytes == 15 * 12


def test_what_is_refused_says_what_to_do() -> None:
    """Away twice, back twice, away where there is nothing to free, and computing meanwhile."""
    parked = Parked([])
    with pytest.raises(
        RuntimeError, match=r"^to_host: .* host memory already; call to_device first"
    ):
        require_parkable("to_host", parked, CUDA, offload="none")
    with pytest.raises(
        ValueError, match=r"^to_host: .* any case, since the device is cpu: .* leave"
    ):
        require_parkable("to_host", None, CPU, offload="none")
    with pytest.raises(ValueError, match=r"in any case, since offload = 'parameters'"):
        require_parkable("to_host", None, CUDA, offload="parameters")
    require_parkable("to_host", None, CUDA, offload="none")
    with pytest.raises(RuntimeError, match=r"^to_device: the weights are on the device; to_host"):
        unpark("to_device", None)
    with pytest.raises(RuntimeError, match=r"^logprobs: .* in host memory; call to_device first"):
        require_on_device("logprobs", parked)
    require_on_device("logprobs", None)
