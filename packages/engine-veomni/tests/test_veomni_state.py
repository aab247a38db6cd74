"""From our parallel state to the keywords of VeOmni's, without VeOmni."""

import inspect

import pytest

from engine_veomni.veomni_state import to_veomni_kwargs
from parallel_state import ExtraParallelSizes, ParallelState

STATE = ParallelState(
    dp_size=8, dp_replicate_size=2, extra_parallel_sizes=ExtraParallelSizes.of(ep=4)
)


def shape_of_0_1_12(  # noqa: PLR0917
    dp_size: int = 1,
    dp_replicate_size: int = 1,
    dp_shard_size: int = 1,
    tp_size: int = 1,
    pp_size: int = 1,
    cp_size: int = 1,
    ulysses_size: int = 1,
    dp_mode: str = "fsdp2",
    device_type: str | None = None,
    include_sp_in_fsdp: bool = True,  # noqa: FBT001, FBT002
    extra_parallel_sizes: tuple[int, ...] = (1,),
    extra_parallel_placement_innermost: tuple[bool, ...] = (False,),
    extra_parallel_names: tuple[str, ...] = ("ep",),
    async_enabled: bool = False,  # noqa: FBT001, FBT002
    name: str | None = "base",
) -> None:
    raise NotImplementedError


def shape_of_0_1_7(
    dp_size: int = 1, ep_size: int = 1, ulysses_size: int = 1, **kwargs: object
) -> None:
    raise NotImplementedError


def test_sizes_are_handed_over_as_a_tuple() -> None:
    """VeOmni's function takes a tuple and stores a dict (verl#6323)."""
    kwargs = to_veomni_kwargs(
        STATE, device_type="cpu", signature=inspect.signature(shape_of_0_1_12)
    )
    assert kwargs["extra_parallel_sizes"] == (4,)
    assert kwargs["extra_parallel_names"] == ("ep",)
    assert kwargs["extra_parallel_placement_innermost"] == (False,)
    assert (kwargs["dp_size"], kwargs["dp_replicate_size"], kwargs["dp_shard_size"]) == (8, 2, 4)
    assert kwargs["device_type"] == "cpu"


def test_no_name_is_claimed() -> None:
    """A named state is handed to whoever asks next, whatever they ask for."""
    kwargs = to_veomni_kwargs(
        STATE, device_type="cpu", signature=inspect.signature(shape_of_0_1_12)
    )
    assert kwargs["name"] is None


def test_a_keyword_that_would_be_swallowed_is_refused() -> None:
    """An older shape takes anything, and would leave expert parallelism off without a word."""
    with pytest.raises(TypeError, match=r"does not know .*extra_parallel_sizes.*ep_size"):
        to_veomni_kwargs(STATE, device_type="cpu", signature=inspect.signature(shape_of_0_1_7))
