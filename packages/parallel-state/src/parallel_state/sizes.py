"""Sizes of the extra parallel axes as a frozen mapping whose keys are types.

The axes beside data, sequence, tensor and pipeline parallelism are open-ended: expert parallelism
(`ep`) is one, sharded embeddings (`emb`) another. Passed around as a tuple or a plain dict they
end as a `TypeError` in the middle of a run; here a wrong axis is an error for the type checker.
"""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any, Generic, Literal, Self, cast, final, overload

import attrs
from typing_extensions import TypeVar

AxisT = TypeVar("AxisT", bound=str, default=Literal["ep"])
"""Names of the extra axes, a literal type; `Literal["ep"]` unless said otherwise."""


@final
class UnknownAxisError(KeyError):
    """An axis was asked for that is not there; the message names those that are."""

    def __str__(self) -> str:
        """Show the message as it is, where `KeyError` shows its repr."""
        return str(self.args[0])


def unknown_axis(axis: object, known: tuple[str, ...], *, where: str) -> UnknownAxisError:
    """Build the error for `axis`, which is none of the axes `known` to `where`."""
    message = f"unknown axis {axis!r}; {where} has: {', '.join(known)}"
    close = get_close_matches(str(axis), known, n=1)
    return UnknownAxisError(f"{message}; did you mean {close[0]!r}?" if close else message)


def check_int(name: str, value: object, *, expected: str = "an int") -> None:
    """Refuse anything but an int.

    A bool is no int here: `True` in a configuration means a switch, not one rank.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        message = f"{name}: expected {expected}, got {value!r} ({type(value).__name__})"
        raise TypeError(message)


def check_count(name: str, value: int) -> None:
    """Refuse what counts no ranks, heads or experts: anything but an int of at least 1."""
    check_int(name, value, expected="an int of at least 1")
    if value < 1:
        message = f"{name}: expected an int of at least 1, got {value}"
        raise ValueError(message)


def _in_order(sizes: dict[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sizes.items())


@final
@attrs.frozen(init=False, repr=False)
class ExtraParallelSizes(Mapping[AxisT, int], Generic[AxisT]):
    """Axis names and sizes, in order, never changed after construction.

    Two values are equal if they hold the same axes with the same sizes in the same order; a plain
    dict is never equal. The hash differs between processes, as that of any string does: use it in
    dictionaries and sets, never as a key that another process reads. Inside a compiled function
    look sizes up, do not build them.

    Raises:
        TypeError: for anything but a mapping from `str` to `int`.
        ValueError: for no axis at all, a name that is no identifier, or a size below 1.
    """

    _sizes: dict[str, int] = attrs.field(eq=_in_order)

    @overload
    def __init__(
        self: "ExtraParallelSizes[Literal['ep']]", sizes: Mapping[Literal["ep"], int], /
    ) -> None: ...
    @overload
    def __init__(
        self: "ExtraParallelSizes[Literal['ep', 'emb']]",
        sizes: Mapping[Literal["ep", "emb"], int],
        /,
    ) -> None: ...
    @overload
    def __init__(self, sizes: Mapping[AxisT, int], /) -> None: ...

    # `attrs.evolve` gives `sizes` by name; the checkers see the overloads only
    def __init__(self, sizes: Mapping[Any, int]) -> None:
        self.__attrs_init__(_checked(sizes))

    @staticmethod
    def of(*, ep: int) -> "ExtraParallelSizes[Literal['ep']]":
        """Build the most common value: expert parallelism and no other extra axis."""
        return ExtraParallelSizes({"ep": ep})

    @classmethod
    def from_config(cls, value: object) -> Self:
        """Read what a configuration file holds, a table of axis names and sizes.

        Which names a literal type admits is the type checker's knowledge: here a name has to be an
        identifier, no more.

        Raises:
            TypeError: if `value` is no table, a name no string, or a size no int.
            ValueError: for no axis at all, a name that is no identifier, or a size below 1.
        """
        return cls(cast("Mapping[AxisT, int]", value))

    def to_config(self) -> object:
        """Give back what `from_config` reads: a plain dict."""
        return self.as_dict()

    def as_dict(self) -> dict[str, int]:
        """Copy the sizes into a plain dict, in order; it is the caller's own."""
        return dict(self._sizes)

    def __getitem__(self, axis: AxisT, /) -> int:
        if axis not in self._sizes:
            raise unknown_axis(axis, tuple(self._sizes), where="ExtraParallelSizes")
        return self._sizes[axis]

    def __iter__(self) -> Iterator[AxisT]:
        return iter(cast("dict[AxisT, int]", self._sizes))

    def __len__(self) -> int:
        return len(self._sizes)

    def __repr__(self) -> str:
        return f"ExtraParallelSizes({self._sizes!r})"


def _checked(sizes: object) -> dict[str, int]:
    if isinstance(sizes, tuple | list):
        is_one_size = len(sizes) == 1 and isinstance(sizes[0], int)
        hint = f"{{'ep': {sizes[0]!r}}}" if is_one_size else "{'ep': 8, 'emb': 2}"
        message = (
            f"ExtraParallelSizes: expected a mapping from axis names to sizes, got the "
            f"{type(sizes).__name__} {sizes!r}, which does not say which axis a size belongs to; "
            f"write ExtraParallelSizes({hint})"
        )
        raise TypeError(message)
    if not isinstance(sizes, Mapping):
        message = (
            "ExtraParallelSizes: expected a mapping from axis names to sizes such as "
            f"{{'ep': 8}}, got {sizes!r} ({type(sizes).__name__})"
        )
        raise TypeError(message)
    if not sizes:
        message = (
            "ExtraParallelSizes: expected at least one axis, got none; "
            "an axis that is not used has size 1, as in ExtraParallelSizes.of(ep=1)"
        )
        raise ValueError(message)
    checked: dict[str, int] = {}
    for axis, size in sizes.items():
        if not isinstance(axis, str):
            message = (
                f"ExtraParallelSizes: expected axis names of type str, "
                f"got {axis!r} ({type(axis).__name__})"
            )
            raise TypeError(message)
        if not axis.isidentifier():
            message = (
                f"ExtraParallelSizes: expected an axis name that is an identifier such as 'ep', "
                f"got {axis!r}"
            )
            raise ValueError(message)
        check_count(f"ExtraParallelSizes[{axis!r}]", size)
        # Plain values: an enum of strings or ints would show in logs and travel in pickles.
        checked[str.__str__(axis)] = int(size)
    return checked
