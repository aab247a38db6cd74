"""The end of a cluster's processes: by the driver, or by the guard beside it."""

import os
import secrets
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from async_policy import cluster_processes
from async_policy.cluster_processes import CLUSTER_MARK, despite_interrupts, guarded


@contextmanager
def marked_process(mark: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that belongs to the cluster of this mark."""
    environment = {**os.environ, CLUSTER_MARK: mark}
    with subprocess.Popen(["sleep", "600"], env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


def test_guard_cleans_up_what_the_driver_did_not(tmp_path: Path) -> None:
    """Nobody said that all is done: the guard ends the processes, and spares the driver.

    The driver has a file of the cluster's folder open for writing, as with ray's logs.
    """
    mark = secrets.token_hex(8)
    folder = tmp_path / "cluster"
    folder.mkdir()
    with (
        (folder / "driver.log").open("w") as log,
        marked_process(mark) as process,
    ):
        with guarded(mark, folder):
            log.write("here")
        assert process.wait(30) < 0
        assert not folder.exists()


def test_guard_leaves_alone_what_is_done(tmp_path: Path) -> None:
    """The driver said that all is done: nothing is killed or removed."""
    mark = secrets.token_hex(8)
    with marked_process(mark) as process:
        with guarded(mark, tmp_path) as all_done:
            all_done()
        assert process.poll() is None
        assert tmp_path.exists()


@pytest.mark.parametrize("moment", ["before", "after"])
def test_second_interrupt_at_the_worst_moment_cleans_up_once(
    monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """A Ctrl-C just before it is ignored, or just after: cleaned up once, and still raised."""
    done: list[str] = []
    interrupts = iter([KeyboardInterrupt])
    ignored = cluster_processes.interrupts_ignored

    @contextmanager
    def interrupted() -> Iterator[None]:
        if moment == "before":
            raise_next(interrupts)
        with ignored():
            yield
        raise_next(interrupts)

    def raise_next(left: Iterator[type[KeyboardInterrupt]]) -> None:
        error = next(left, None)
        if error is not None:
            raise error

    monkeypatch.setattr(cluster_processes, "interrupts_ignored", interrupted)
    with pytest.raises(KeyboardInterrupt):
        despite_interrupts(lambda: done.append("cleaned up"))
    assert done == ["cleaned up"]
