"""All of a launch: a line for every override, and the settings of a recipe."""

from collections.abc import Mapping, Sequence
from typing import final

import attrs

from verl_conversion.carry_engine import carry_engine
from verl_conversion.carry_loop import carry_data, carry_loop, carry_names, carry_run
from verl_conversion.carry_sampler import carry_sampler
from verl_conversion.composed import GROUP, Composed, Entry, compose, is_hydras
from verl_conversion.labels import LABELS, Label
from verl_conversion.launches import Launch
from verl_conversion.overrides import Value
from verl_conversion.readers import facts_about
from verl_conversion.releases import Release
from verl_conversion.rhythm import carry_rhythm
from verl_conversion.sheet import Gap, Setting, Sheet

_TO_LOOK_AT = frozenset({"trap", "broken", "unresolved", "unknown"})


@final
@attrs.frozen(kw_only=True)
class Line:
    """What becomes of one override."""

    override: str
    """As it was given; for what was not given, the setting and its default."""

    labels: tuple[Label, ...]
    """In the order of `LABELS`."""

    to: tuple[Setting, ...] = ()
    """Our settings that follow from it."""

    why: tuple[str, ...] = ()
    """Reasons, a sentence each."""

    evidence: tuple[str, ...] = ()
    """Where in verl, and public issues."""

    decide: bool = False
    """Whether somebody has to look at it."""


@final
@attrs.frozen(kw_only=True)
class Conversion:
    """A launch of verl in the terms of a recipe."""

    composed: Composed
    """What verl would run with."""

    lines: tuple[Line, ...]
    """One for each override, in order."""

    unset: tuple[Line, ...]
    """Defaults of verl that nobody set and that differ here."""

    settings: Mapping[str, Setting]
    """The recipe's settings, by path."""

    @property
    def undecided(self) -> int:
        """Lines that somebody has to look at."""
        return sum(line.decide for line in (*self.lines, *self.unset))


def convert(launch: Launch, release: Release, *, train_rows: int | None = None) -> Conversion:
    """Convert a launch.

    Args:
        launch: what is launched.
        release: of verl, whose defaults and readers count.
        train_rows: number of training prompts, where the run's length is given in epochs.

    Raises:
        LaunchError: an engine is chosen that there is no counterpart of.
    """
    composed = compose(launch, release)
    sheet = Sheet()
    carry_data(composed, sheet)
    rhythm = carry_rhythm(composed, sheet, train_rows=train_rows)
    carry_loop(composed, sheet, rhythm)
    carry_engine(composed, sheet, rhythm)
    carry_sampler(composed, sheet)
    carry_run(composed, sheet, rhythm)
    carry_names(composed, sheet)
    lines = tuple(_line(entry, composed, sheet) for entry in composed.entries)
    return Conversion(
        composed=composed,
        lines=lines,
        unset=tuple(_unset(composed, sheet)),
        settings=sheet.settings,
    )


def _line(entry: Entry, c: Composed, sheet: Sheet) -> Line:
    if entry.unknown:
        why = (
            f"{entry.unknown}; give what it depends on with --with NAME=VALUE (HOME=/home/me), or "
            "the arguments that it makes, as JSON or behind --"
        )
        return Line(override=entry.text, labels=("unresolved",), why=(why,), decide=True)
    if entry.unread:
        return Line(override=entry.text, labels=("unknown",), why=(entry.unread,), decide=True)
    if is_hydras(entry.key):
        why = "a setting of hydra's own, about its folders and logs"
        return Line(override=entry.text, labels=("no counterpart",), why=(why,))
    if entry.refused or entry.override is None:
        return Line(override=entry.text, labels=("broken",), why=(entry.refused,), decide=True)
    if entry.replaced_by is not None:
        later = c.entries[entry.replaced_by]
        same = later.override is not None and later.override.value == entry.override.value
        why = f"set again later, where the last wins: {'the same value' if same else later.text}"
        return Line(override=entry.text, labels=("duplicate",), why=(why,))
    return _judged(entry, entry.override.value, c, sheet)


def _judged(entry: Entry, value: Value, c: Composed, sheet: Sheet) -> Line:
    key = entry.key
    facts = list(facts_about(key, c))
    labels = {label for fact in facts for label in fact.labels}
    why = [fact.why_here(c) for fact in facts]
    evidence = [fact.evidence for fact in facts]
    settings: list[Setting] = []
    gaps: list[Gap] = []
    if key != GROUP and key in c.defaults.values and _same(value, c.defaults.values[key]):
        labels.add("default")
    if not any(fact.final for fact in facts):
        settings, gaps = sheet.to(key), sheet.without(key)
        why += [gap.why for gap in gaps]
        if settings or (gaps and all(gap.same for gap in gaps)):
            labels.add("carried")
        elif gaps and "default" not in labels:
            labels.add("no counterpart")
        labels |= {"trap" for gap in gaps if gap.trap}
    if not labels:
        labels.add("unknown")
        where = (
            f"not in the table of verl {c.release}: + adds it, whether or not anything reads it"
            if entry.absent
            else f"verl {c.release} has it; this tool has no rule about it with this value"
        )
        why.append(where)
    elif labels == {"default"} and not why:
        why.append(f"verl {c.release} has this value anyway")
    return Line(
        override=entry.text,
        labels=_ordered(labels),
        to=tuple(settings),
        why=tuple(dict.fromkeys(why)),
        evidence=tuple(dict.fromkeys(evidence)),
        decide=bool(labels & _TO_LOOK_AT) or any(gap.decide for gap in gaps),
    )


def _unset(c: Composed, sheet: Sheet) -> list[Line]:
    """What follows from verl's defaults alone."""
    found: list[Line] = []
    for gap in sheet.gaps:
        if gap.same or any(key in c.set_here for key in gap.keys):
            continue
        shown = ", ".join(
            f"{key}={_shown(c.get(key))}" if key in c.values else key for key in gap.keys
        )
        label: Label = "trap" if gap.trap else "no counterpart"
        to = tuple(s for key in gap.keys for s in sheet.to(key))
        found.append(
            Line(
                override=shown,
                labels=(label,),
                to=to,
                why=(gap.why,),
                decide=gap.decide or gap.trap,
            )
        )
    return found


def _same(left: Value, right: Value) -> bool:
    """Whether two values are the same setting; True and 1 are not."""
    return isinstance(left, bool) == isinstance(right, bool) and left == right


def _ordered(labels: set[Label]) -> tuple[Label, ...]:
    return tuple(label for label in LABELS if label in labels)


def _shown(value: Value) -> str:
    return "null" if value is None else str(value)


def count_labels(lines: Sequence[Line]) -> dict[Label, int]:
    """How many lines have each label."""
    return {
        label: number for label in LABELS if (number := sum(label in line.labels for line in lines))
    }
