"""Starting torch.distributed."""

import pytest

from engine_veomni import init_process_group


def test_several_processes_need_a_place_to_meet() -> None:
    """No port is opened by default."""
    with pytest.raises(ValueError, match="2 processes need an init_method to meet at"):
        init_process_group(rank=0, world_size=2)


def test_a_rank_is_one_of_the_world() -> None:
    """Ranks count from 0."""
    with pytest.raises(ValueError, match="expected a rank from 0 to 1, got 2"):
        init_process_group(rank=2, world_size=2, init_method="file:///tmp/never")
