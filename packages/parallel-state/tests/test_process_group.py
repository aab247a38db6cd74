"""Starting torch.distributed."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from parallel_state.process_group import init_process_group


def test_one_process_needs_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, it works although no socket may listen; a second start is refused."""

    def refuse(*_: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    init_process_group()
    try:
        assert (dist.get_world_size(), dist.get_backend()) == (1, "gloo")
        with pytest.raises(RuntimeError, match=r"initialised already, with 1 ranks over gloo"):
            init_process_group()
    finally:
        dist.destroy_process_group()


def test_what_cannot_start_is_refused() -> None:
    """No place to meet, no such rank, or no time to wait: errors, before anything waits."""
    with pytest.raises(ValueError, match=r"2 processes need an init_method"):
        init_process_group(world_size=2)
    with pytest.raises(ValueError, match=r"rank from 0 to 1, got 2"):
        init_process_group(rank=2, world_size=2, init_method="file:///nowhere")
    with pytest.raises(ValueError, match=r"timeout above 0 seconds, got 0"):
        init_process_group(timeout_s=0.0)
    assert not dist.is_initialized()


def test_a_rank_that_does_not_come_ends_the_wait(tmp_path: Path) -> None:
    """With one of two ranks missing, the other says for whom it waited, after the timeout."""
    code = (
        "from parallel_state.process_group import init_process_group\n"
        "init_process_group(rank=0, world_size=2, timeout_s=1.0, "
        f"init_method='file://{tmp_path}/meet')\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 1
    assert "rank 0 waited for the other 1 ranks at file://" in ended.stderr
    assert "for up to 1.0 s" in ended.stderr
