"""What a check has to say about one variable."""

from typing import Literal, final

import attrs

Level = Literal["error", "warning", "note"]
"""`error`: what is set is not what runs; `warning`: it has no effect or may not be taken as
meant; `note`: it could not be judged, or is legal and easily misread."""

LEVELS: tuple[Level, ...] = ("error", "warning", "note")
"""Gravest first."""


@final
@attrs.frozen(kw_only=True)
class Finding:
    """One remark, with what to do about it."""

    level: Level
    """How grave it is."""

    variable: str
    """The environment variable; in the doctor's report also a package or a path."""

    message: str
    """What is the case, with the values."""

    fix: str
    """The next step."""


def gravest_first(findings: list[Finding]) -> list[Finding]:
    """Sort by level, then by variable."""
    return sorted(findings, key=lambda found: (LEVELS.index(found.level), found.variable))
