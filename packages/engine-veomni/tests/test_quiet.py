"""Log records are held back for a while only."""

import logging

import pytest

from engine_veomni.quiet import quiet


def test_records_are_held_back_inside_only(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the level, not above it, and no longer than the block."""
    monkeypatch.delenv("VEOMNI_VERBOSITY", raising=False)
    logger = logging.getLogger("some.vendor")
    with caplog.at_level(logging.INFO):
        with quiet(logging.INFO):
            logger.info("inside")
            logger.warning("louder")
        logger.info("outside")
    assert [record.message for record in caplog.records] == ["louder", "outside"]


def test_whoever_asks_to_see_it_sees_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """VeOmni's own variable is not overruled."""
    monkeypatch.setenv("VEOMNI_VERBOSITY", "DEBUG")
    with caplog.at_level(logging.INFO), quiet(logging.WARNING):
        logging.getLogger("some.vendor").info("inside")
    assert [record.message for record in caplog.records] == ["inside"]
