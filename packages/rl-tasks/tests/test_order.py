"""The order of the prompts."""

import json
import subprocess
import sys

import pytest
from hypothesis import given, strategies as st

from rl_tasks import PromptOrder
from rl_tasks.order import permutation


def test_the_order_is_written_down() -> None:
    """Seed 7 over five problems gives these draws on every machine, in every release."""
    draws = PromptOrder(num_problems=5, seed=7).take(10)
    assert [draw.problem for draw in draws] == [1, 2, 0, 3, 4, 3, 4, 1, 2, 0]
    assert [draw.epoch for draw in draws] == [0] * 5 + [1] * 5
    assert [draw.position for draw in draws] == list(range(10))


def test_another_process_with_another_string_hash_gives_the_same_order() -> None:
    """The order does not depend on Python's randomised hash of strings."""
    program = (
        "from rl_tasks import PromptOrder;"
        "print([d.problem for d in PromptOrder(num_problems=50, seed=3).take(120)])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    here = [draw.problem for draw in PromptOrder(num_problems=50, seed=3).take(120)]
    assert outputs == {f"{here}\n"}


@given(
    num_problems=st.integers(1, 30),
    seed=st.integers(),
    before=st.integers(0, 70),
    after=st.integers(0, 70),
)
def test_resuming_goes_on_with_the_same_draws(
    num_problems: int, seed: int, before: int, after: int
) -> None:
    """A state that went through JSON leads to the draws that an unbroken run would have made."""
    unbroken = PromptOrder(num_problems=num_problems, seed=seed).take(before + after)
    first = PromptOrder(num_problems=num_problems, seed=seed)
    first.take(before)
    resumed = PromptOrder(num_problems=num_problems, seed=seed)
    resumed.load_state(json.loads(json.dumps(first.state())))
    assert resumed.take(after) == unbroken[before:]


@given(
    num_problems=st.integers(1, 20),
    num_shards=st.integers(1, 5),
    rounds=st.integers(0, 30),
    resumed_shards=st.integers(1, 5),
)
def test_shards_share_one_sequence_even_when_their_number_changes(
    num_problems: int, num_shards: int, rounds: int, resumed_shards: int
) -> None:
    """What the shards draw, before and after a resume with another number, is the one sequence."""

    def drawn(shards: list[PromptOrder], count: int) -> list[int]:
        draws = [draw for shard in shards for draw in shard.take(count)]
        return [draw.problem for draw in sorted(draws)]

    shards = [
        PromptOrder(num_problems=num_problems, seed=1, shard=shard, num_shards=num_shards)
        for shard in range(num_shards)
    ]
    problems = drawn(shards, rounds)
    assert all(shard.state() == shards[0].state() for shard in shards)
    others = [
        PromptOrder(num_problems=num_problems, seed=1, shard=shard, num_shards=resumed_shards)
        for shard in range(resumed_shards)
    ]
    for other in others:
        other.load_state(shards[0].state())
    problems += drawn(others, rounds)
    alone = PromptOrder(num_problems=num_problems, seed=1).take(len(problems))
    assert problems == [draw.problem for draw in alone]


@given(num_problems=st.integers(1, 40), seed=st.integers(), epochs=st.integers(1, 4))
def test_every_epoch_draws_every_problem_once(num_problems: int, seed: int, epochs: int) -> None:
    """An epoch is a permutation of the data set."""
    draws = PromptOrder(num_problems=num_problems, seed=seed).take(num_problems * epochs)
    for epoch in range(epochs):
        problems = [draw.problem for draw in draws if draw.epoch == epoch]
        assert sorted(problems) == list(range(num_problems))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    """No two of them share an order, not even seed 1 at epoch 11 and seed 11 at epoch 1."""
    keys = ["1/0", "1/1", "2/0", "1/11", "11/1"]
    assert len({tuple(permutation(20, key=key)) for key in keys}) == len(keys)


def test_a_state_of_another_order_is_refused() -> None:
    """Resuming with other data or another seed names both values."""
    state = PromptOrder(num_problems=5, seed=7).state()
    with pytest.raises(ValueError, match=r"taken with num_problems 5, this order has .* 6"):
        PromptOrder(num_problems=6, seed=7).load_state(state)
    with pytest.raises(ValueError, match=r"taken with seed 7, this order has seed 8"):
        PromptOrder(num_problems=5, seed=8).load_state(state)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"index": 5}, r"0 <= index < 5, got epoch 0 and index 5"),
        ({"epoch": "0"}, r"got epoch '0' and index 0"),
        ({"epoch": True}, r"got epoch True"),
        ({"shard": 0}, r"expected the keys \['epoch', 'index', 'num_problems', 'seed'\]"),
    ],
)
def test_a_broken_state_is_refused(change: dict[str, object], text: str) -> None:
    """A state that no order can have does not load."""
    order = PromptOrder(num_problems=5, seed=7)
    with pytest.raises(ValueError, match=text):
        order.load_state({**order.state(), **change})


def test_orders_that_cannot_be_are_refused() -> None:
    """An empty data set, a shard out of range and a negative count are errors."""
    with pytest.raises(ValueError, match="at least 1 problem, got 0"):
        PromptOrder(num_problems=0, seed=0)
    with pytest.raises(ValueError, match="got shard 2 and num_shards 2"):
        PromptOrder(num_problems=3, seed=0, shard=2, num_shards=2)
    with pytest.raises(ValueError, match="count of at least 0, got -1"):
        PromptOrder(num_problems=3, seed=0).take(-1)
