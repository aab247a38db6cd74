"""Memory that is given away and taken back, and who is refused meanwhile."""

import pytest
import torch

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
