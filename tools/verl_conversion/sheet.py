"""What is carried over, and what is not, while a configuration is gone through."""

from typing import final

import attrs

from verl_conversion.overrides import Value


@final
@attrs.frozen(kw_only=True)
class Setting:
    """One of our settings, and where its value comes from."""

    path: str
    """Dotted path in the recipe's configuration."""

    value: Value
    """Its value."""

    sources: tuple[str, ...]
    """Settings of verl that it follows from."""

    note: str = ""
    """What else there is to know."""


@final
@attrs.frozen(kw_only=True)
class Gap:
    """Something of verl's that is not carried over, with the reason."""

    keys: tuple[str, ...]
    """Settings of verl; their overrides get the reason."""

    why: str
    """The reason, and what to do."""

    decide: bool = True
    """Whether the run differs, so that somebody has to decide."""

    trap: bool = False
    """Whether it is what a reader of the script would take for something else."""

    same: bool = False
    """Whether it is so here in any case, without a setting."""


@final
class Sheet:
    """Collects settings and gaps."""

    def __init__(self) -> None:
        self.settings: dict[str, Setting] = {}
        self.gaps: list[Gap] = []

    def put(self, path: str, value: Value, *sources: str, note: str = "") -> None:
        """One of our settings gets a value; None is left out, since it says nothing."""
        if value is not None:
            self.settings[path] = Setting(path=path, value=value, sources=sources, note=note)

    def gap(self, *keys: str, why: str, decide: bool = True, trap: bool = False) -> None:
        """Something is not carried over."""
        self.gaps.append(Gap(keys=keys, why=why, decide=decide, trap=trap))

    def same(self, *keys: str, why: str) -> None:
        """Something is so here in any case."""
        self.gaps.append(Gap(keys=keys, why=why, decide=False, same=True))

    def to(self, key: str) -> list[Setting]:
        """Our settings that follow from a setting of verl."""
        return [setting for setting in self.settings.values() if key in setting.sources]

    def without(self, key: str) -> list[Gap]:
        """What is not carried over of a setting of verl."""
        return [gap for gap in self.gaps if key in gap.keys]
