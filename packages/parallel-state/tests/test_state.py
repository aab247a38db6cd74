"""ParallelState: derived sizes by hand, and the words of every rule."""

from typing import Any, cast

import attrs
import pytest

from parallel_state import ExtraParallelSizes, ParallelState


def test_the_default_is_one_rank() -> None:
    """Nothing configured means nothing parallel."""
    state = ParallelState()
    assert state.world_size == 1
    assert state.extra_parallel_sizes == ExtraParallelSizes.of(ep=1)


def test_derived_sizes() -> None:
    """dp 8 in 2 replicas, Ulysses 2, tensor 2, 3 stages, ep 4, by hand."""
    state = ParallelState(
        dp_size=8,
        dp_replicate_size=2,
        ulysses_size=2,
        tensor_size=2,
        pipeline_size=3,
        extra_parallel_sizes=ExtraParallelSizes.of(ep=4),
    )
    assert state.dp_shard_size == 4
    assert state.fsdp_size == 8
    assert state.data_size == 16
    assert state.world_size == 96
    assert state.extra_fsdp_size("ep") == 2


def test_it_is_a_frozen_hashable_value() -> None:
    """Equal degrees are one dictionary key, and no degree can be set."""
    assert {ParallelState(dp_size=2): "found"}[ParallelState(dp_size=2)] == "found"
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        ParallelState().dp_size = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    "name",
    ["dp_size", "dp_replicate_size", "ulysses_size", "tensor_size", "pipeline_size"],
)
def test_degrees_are_ints_of_at_least_one(name: str) -> None:
    """0, a bool and a string are refused by name, whichever degree it is."""

    def build(value: object) -> ParallelState:
        return ParallelState(**{name: value})  # type: ignore[arg-type]

    with pytest.raises(ValueError, match=rf"ParallelState\.{name}: .* at least 1, got 0$"):
        build(0)
    with pytest.raises(TypeError, match=rf"ParallelState\.{name}: expected an int .*True \(bool\)"):
        build(True)
    with pytest.raises(TypeError, match=rf"ParallelState\.{name}: expected an int .*'8' \(str\)"):
        build("8")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            (8,),
            (
                "ParallelState.extra_parallel_sizes: expected ExtraParallelSizes, "
                "got (8,) (tuple); write ExtraParallelSizes.of(ep=8)"
            ),
        ),
        (
            {"ep": 8},
            (
                "ParallelState.extra_parallel_sizes: expected ExtraParallelSizes, "
                "got {'ep': 8} (dict); write ExtraParallelSizes({'ep': 8})"
            ),
        ),
        (8, "ParallelState.extra_parallel_sizes: expected ExtraParallelSizes, got 8 (int)"),
    ],
)
def test_other_shapes_of_extra_sizes_are_refused(value: object, message: str) -> None:
    """The tuple and the dict of other programs get the line that is right here."""
    with pytest.raises(TypeError) as caught:
        ParallelState(extra_parallel_sizes=cast("ExtraParallelSizes", value))
    assert str(caught.value) == message


def test_replicas_divide_the_data_parallel_ranks() -> None:
    """4 replicas cannot be made of 6 ranks."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # the text is compared below
        ParallelState(dp_size=6, dp_replicate_size=4)
    assert str(caught.value) == "dp_replicate_size 4 must divide dp_size 6; use 1, 2, 3 or 6"


def test_an_extra_axis_divides_the_ranks_it_spans() -> None:
    """ep 3 does not cut 4 shards x 2 Ulysses ranks."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # the text is compared below
        ParallelState(
            dp_size=8,
            dp_replicate_size=2,
            ulysses_size=2,
            extra_parallel_sizes=ExtraParallelSizes.of(ep=3),
        )
    assert str(caught.value) == (
        "extra_parallel_sizes['ep'] = 3 must divide dp_shard_size * ulysses_size = 4 * 2 = 8; "
        "use 1, 2, 4 or 8"
    )
    with pytest.raises(ValueError, match=r"= 2 must divide .* = 1 \* 1 = 1; use 1$"):
        ParallelState(extra_parallel_sizes=ExtraParallelSizes.of(ep=2))


@pytest.mark.parametrize(
    ("sizes", "taken"),
    [
        ({"tensor": 1}, "'tensor'"),
        ({"fsdp": 1}, "'fsdp'"),
        ({"ep": 1, "ep_fsdp": 1}, "'ep_fsdp'"),
        ({"ep_fsdp": 1, "ep": 1}, "'ep_fsdp'"),
    ],
)
def test_an_extra_axis_needs_a_name_of_its_own(sizes: dict[str, int], taken: str) -> None:
    """A group is found by its name, so no two axes may share one."""
    with pytest.raises(ValueError, match=rf"of which {taken} is taken; choose another name"):
        ParallelState(extra_parallel_sizes=ExtraParallelSizes(sizes))


def test_for_world_fills_the_data_parallel_ranks() -> None:
    """16 ranks, Ulysses 2 and tensor 2 leave dp 4."""
    state = ParallelState.for_world(
        16,
        dp_replicate_size=2,
        ulysses_size=2,
        tensor_size=2,
        extra_parallel_sizes=ExtraParallelSizes.of(ep=4),
    )
    assert state == ParallelState(
        dp_size=4,
        dp_replicate_size=2,
        ulysses_size=2,
        tensor_size=2,
        extra_parallel_sizes=ExtraParallelSizes.of(ep=4),
    )
    assert ParallelState.for_world(3) == ParallelState(dp_size=3)


def test_for_world_refuses_what_does_not_fit() -> None:
    """World 3 in groups of 2 names both numbers (A37), as does a world that is no number."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # the text is compared below
        ParallelState.for_world(3, ulysses_size=2)
    assert str(caught.value) == (
        "ulysses_size * tensor_size * pipeline_size = 2 * 1 * 1 = 2 must divide world_size 3"
    )
    with pytest.raises(ValueError, match="dp_replicate_size 2 must divide dp_size 3; use 1 or 3"):
        ParallelState.for_world(3, dp_replicate_size=2)
    with pytest.raises(ValueError, match=r"for_world: world_size: expected .* at least 1, got 0"):
        ParallelState.for_world(0)
    with pytest.raises(TypeError, match=r"for_world: tensor_size: expected an int .*'2' \(str\)"):
        ParallelState.for_world(2, tensor_size="2")  # type: ignore[call-overload]


def test_check_world_names_both_numbers() -> None:
    """A state of 2 ranks does not run on 3 (A37), and runs on 2."""
    ParallelState(dp_size=2).check_world(2)
    with pytest.raises(ValueError, match=r"needs 2 ranks \(.*dp_shard 2.*\), got a world of 3"):
        ParallelState(dp_size=2).check_world(3)


@pytest.mark.parametrize("world_size", [True, 2.0, "2"])
def test_a_world_is_an_int(world_size: Any) -> None:  # noqa: ANN401  # of any wrong type
    """A message that needs 2 ranks and got a world of 2 would help nobody."""
    with pytest.raises(TypeError, match=r"check_world: world_size: expected an int of at least 1"):
        ParallelState(dp_size=2).check_world(world_size)


@pytest.mark.parametrize(
    ("ep", "use"),
    [
        (11, "use such as 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 15, 16, 18, 20, 21 or 24"),
        (
            999,
            (
                "use such as 252, 280, 315, 336, 360, 420, 504, 560, 630, 720, 840, 1008, 1260, "
                "1680, 2520 or 5040"
            ),
        ),
    ],
)
def test_many_divisors_are_cut_to_the_nearest(ep: int, use: str) -> None:
    """5040 has 60 divisors."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # the text is compared below
        ParallelState(dp_size=5040, extra_parallel_sizes=ExtraParallelSizes.of(ep=ep))
    assert str(caught.value).endswith(use)


def test_a_number_too_large_to_take_apart_is_refused_at_once() -> None:
    """10**30 has divisors, and nobody waits for them."""
    with pytest.raises(ValueError, match=r"must divide dp_size 10{30}; use a divisor of 10{30}$"):
        ParallelState(dp_size=10**30, dp_replicate_size=7)


def test_heads_against_ulysses() -> None:
    """32 heads go over 4 ranks, 2 key-value heads are repeated, 3 of them cannot be."""
    state = ParallelState(ulysses_size=4)
    state.check_model(num_attention_heads=32, num_key_value_heads=8)
    state.check_model(num_attention_heads=32, num_key_value_heads=2)
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # the text is compared below
        state.check_model(num_attention_heads=30, num_key_value_heads=8)
    assert str(caught.value) == (
        "ulysses_size * tensor_size = 4 * 1 = 4 must divide the 30 attention heads"
    )
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # the text is compared below
        state.check_model(num_attention_heads=12, num_key_value_heads=3)
    assert str(caught.value) == (
        "ulysses_size * tensor_size = 4 * 1 = 4 must divide the 3 key-value heads, "
        "or be a multiple of them"
    )
    with pytest.raises(ValueError, match=r"num_key_value_heads: expected .* at least 1, got 0"):
        state.check_model(num_attention_heads=12, num_key_value_heads=0)


def test_experts_against_ep() -> None:
    """ep 4 takes 8 experts, not 6; on a model without experts it would do nothing."""
    state = ParallelState(dp_size=4, extra_parallel_sizes=ExtraParallelSizes.of(ep=4))
    state.check_model(num_attention_heads=4, num_key_value_heads=4, num_experts=8)
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # the text is compared below
        state.check_model(num_attention_heads=4, num_key_value_heads=4, num_experts=6)
    assert str(caught.value) == (
        "extra_parallel_sizes['ep'] = 4 must divide the 6 experts; use 1, 2, 3 or 6"
    )
    with pytest.raises(ValueError, match=r"\['ep'\] = 4 has no effect on a model without experts"):
        state.check_model(num_attention_heads=4, num_key_value_heads=4)
    ParallelState(dp_size=4).check_model(num_attention_heads=4, num_key_value_heads=4)
