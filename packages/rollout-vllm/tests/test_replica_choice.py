"""Prompts with one beginning go to one replica, until it has a quarter more than its share."""

from collections import Counter

from rollout_vllm.replica_choice import PREFIX_TOKENS, choose_replica

# of the prompts [0] to [7] and four idle replicas
CHOSEN = [2, 2, 1, 2, 0, 1, 3, 2]


def choose(prompt_ids: list[int], loads: dict[int, int], num_samples: int = 1) -> int:
    return choose_replica(prompt_ids, loads, num_samples=num_samples)


def test_one_beginning_goes_to_one_replica() -> None:
    """Only the first 64 tokens count, and the choice does not depend on the process."""
    beginning = list(range(PREFIX_TOKENS))
    first = choose(beginning, dict.fromkeys(range(4), 0))
    assert all(choose([*beginning, i], dict.fromkeys(range(4), 0)) == first for i in range(50))
    # written down once: a change would send every running system's prompts elsewhere
    assert [choose([i], dict.fromkeys(range(4), 0)) for i in range(8)] == CHOSEN


def test_different_beginnings_spread() -> None:
    """Of 4000 prompts each of 4 replicas gets about 1000; 4 standard deviations are 110."""
    counts = Counter(choose([i, i + 1], dict.fromkeys(range(4), 0)) for i in range(4000))
    assert all(890 <= counts[replica] <= 1110 for replica in range(4))


def test_a_lost_replica_moves_its_own_prompts_only() -> None:
    """The other replicas keep the prefixes that their caches know."""
    for i in range(200):
        before = choose([i], dict.fromkeys(range(4), 0))
        after = choose([i], {0: 0, 1: 0, 3: 0})
        assert before in {after, 2}


def test_a_busy_replica_is_passed_over() -> None:
    """Room is a quarter above the mean: of 16 + 4 samples, 13 = ceil(1.25 x 20 / 2)."""
    prompt = next([i] for i in range(100) if choose([i], {0: 0, 1: 0}) == 0)
    assert choose(prompt, {0: 9, 1: 7}, num_samples=4) == 0
    assert choose(prompt, {0: 10, 1: 6}, num_samples=4) == 1


def test_a_group_larger_than_any_room_goes_where_there_is_least() -> None:
    """Of 10 + 8 + 64, the room is 52."""
    assert choose([1], {0: 10, 1: 8}, num_samples=64) == 1
