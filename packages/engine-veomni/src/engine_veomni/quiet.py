"""Holds back what VeOmni logs while it builds: every layer, on every rank."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet(level: int) -> Iterator[None]:
    """Drop log records up to `level` in this block, and leave every logger as it was.

    All loggers of the process are meant: VeOmni sets its own level at import, so there is nothing
    to lower before. Whoever sets VEOMNI_VERBOSITY, which VeOmni reads, wants to see it all.
    """
    if "VEOMNI_VERBOSITY" in os.environ:
        yield
        return
    before = logging.root.manager.disable
    logging.disable(max(level, before))
    try:
        yield
    finally:
        logging.disable(before)
