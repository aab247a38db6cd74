"""Ctrl-C: the first one finishes the step, the second one ends at once."""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(slots=True)
class Stop:
    """What Ctrl-C asked for."""

    requested: bool = False
    """The loop ends after its present step, with a checkpoint if the run keeps any."""

    say: Callable[[str], None] | None = None
    """How to tell the user; None while there is no step to finish."""

    keeps: bool = True
    """Whether there will be a checkpoint."""

    def prepare(self, say: Callable[[str], None], *, keeps: bool) -> None:
        """From now on there is a step to finish."""
        self.say, self.keeps = say, keeps


@contextlib.contextmanager
def interruptible() -> Iterator[Stop]:
    """Let the first Ctrl-C (or SIGTERM) finish the step, and the second end the run at once."""
    stop = Stop()
    running = asyncio.get_running_loop()
    main_task = asyncio.current_task()
    assert main_task is not None  # noqa: S101  # called from a coroutine

    def interrupted() -> None:
        if stop.say is None or stop.requested:
            main_task.cancel()
            return
        stop.requested = True
        checkpoint = ", then a checkpoint" if stop.keeps else ""
        stop.say(f"finishing this step{checkpoint}; Ctrl-C again ends at once")

    for number in (signal.SIGINT, signal.SIGTERM):
        running.add_signal_handler(number, interrupted)
    try:
        yield stop
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            running.remove_signal_handler(number)
