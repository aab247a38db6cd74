"""The scheduler's state as it is written and read: a few numbers in JSON."""

from collections.abc import Mapping, Sequence
from typing import Self, TypeGuard, cast

import attrs

from async_policy.json_files import JsonValue
from async_policy.schedule import SchedulerConfig

STATE_FORMAT = 3
READABLE_FORMATS = (2, 3)
"""Format 2 is from before groups could be set aside."""


@attrs.frozen(kw_only=True)
class SavedState:
    """What a later process needs to go on."""

    trained_version: int
    """Optimizer steps done."""

    groups_per_step: int
    """Of the run that wrote it."""

    num_trained: int
    """Groups trained on; fewer than the steps have places, where a step was short."""

    num_set_aside: int
    """Groups looked at for these steps and not kept."""

    consumed_ahead: tuple[int, ...]
    """Indices trained on or set aside, above the first that was neither."""

    @property
    def first_unconsumed(self) -> int:
        """The first index that was neither trained on nor set aside."""
        return self.num_trained + self.num_set_aside - len(self.consumed_ahead)

    def json(self) -> dict[str, JsonValue]:
        """As `read` reads it."""
        values = attrs.asdict(self) | {"consumed_ahead": list(self.consumed_ahead)}
        return {"format": STATE_FORMAT, **values}

    @classmethod
    def read(cls, state: JsonValue) -> Self:
        """Check a JSON value.

        Raises:
            ValueError: if it is not a state; names the value that is wrong.
        """
        if not isinstance(state, Mapping) or state.get("format") not in READABLE_FORMATS:
            message = (
                f"from_state: expected a scheduler state of format "
                f"{' or '.join(map(str, READABLE_FORMATS))}, got {state!r}"
            )
            raise ValueError(message)
        old = state["format"] == 2  # noqa: PLR2004 -- a format's number
        names = ["trained_version", "groups_per_step"]
        names += [] if old else ["num_trained", "num_set_aside"]
        values: dict[str, int] = {}
        for name in names:
            value = state.get(name)
            if not _is_count(value):
                message = f"from_state: expected {name} as an int of at least 0, got {value!r}"
                raise ValueError(message)
            values[name] = value
        places = values["trained_version"] * values["groups_per_step"]
        name = "trained_ahead" if old else "consumed_ahead"
        ahead = state.get(name)
        if not isinstance(ahead, Sequence) or not all(map(_is_count, ahead)):
            message = f"from_state: expected {name} as a list of indices, got {ahead!r}"
            raise ValueError(message)
        saved = cls(
            trained_version=values["trained_version"],
            groups_per_step=values["groups_per_step"],
            num_trained=values.get("num_trained", places),
            num_set_aside=values.get("num_set_aside", 0),
            consumed_ahead=tuple(cast("Sequence[int]", ahead)),
        )
        first, rest = saved.first_unconsumed, saved.consumed_ahead
        if saved.num_trained > places or first < 0 or (rest and min(rest) <= first):
            message = (
                f"from_state: {saved.trained_version} steps of {saved.groups_per_step} groups, "
                f"{saved.num_trained} groups trained on, {saved.num_set_aside} set aside and the "
                f"groups consumed ahead, {list(rest)!r}, do not go together"
            )
            raise ValueError(message)
        return saved

    def check_against(self, config: SchedulerConfig) -> None:
        """Refuse settings that cannot go on from here.

        Raises:
            ValueError: names the setting and what to do.
        """
        if self.groups_per_step != config.groups_per_step:
            message = (
                f"from_state: the state was written with groups_per_step {self.groups_per_step}, "
                f"the configuration has {config.groups_per_step}; this would repeat or skip "
                f"prompts, so keep {self.groups_per_step}"
            )
            raise ValueError(message)
        if self.consumed_ahead and config.order == "data":
            message = (
                f"from_state: the state was written with order 'completion' and has trained on "
                f"{len(self.consumed_ahead)} groups ahead of others; order 'data' cannot go on "
                "from there, so keep order 'completion'"
            )
            raise ValueError(message)
        if self.trained_version > config.num_steps:
            message = (
                f"from_state: the state has {self.trained_version} steps behind it, the "
                f"configuration has num_steps {config.num_steps}; raise num_steps to go on"
            )
            raise ValueError(message)
        short = self.num_trained < self.trained_version * self.groups_per_step
        if config.refill is None and (self.num_set_aside or short):
            message = (
                f"from_state: the state was written with refill and has set {self.num_set_aside} "
                "groups aside; without refill an index is no longer one of the run's num_groups, "
                "so keep refill"
            )
            raise ValueError(message)
        behind = self.num_trained + self.num_set_aside
        if behind > config.max_prompts:
            message = (
                f"from_state: the state has {behind} prompts behind "
                f"it, the configuration lets the run use {config.max_prompts}; raise "
                "refill.num_prompts or refill.max_rounds to go on"
            )
            raise ValueError(message)
        left = config.max_prompts - behind
        needed = (config.num_steps - self.trained_version) * config.groups_per_step
        refill = config.refill
        if refill is not None and config.max_prompts != refill.num_prompts and left < needed:
            message = (
                f"from_state: the state has {behind} prompts behind it, and of the "
                f"{config.max_prompts} that refill.max_rounds = {refill.max_rounds} lets the whole "
                f"run use, {left} are left for the {needed} groups of the steps to come; raise "
                "refill.max_rounds to go on"
            )
            raise ValueError(message)


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
