"""The one cattrs converter that every configuration goes through, and the shapes it knows."""

import difflib
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import attrs
import cattrs

NONE_WORD = "none"
"""How None is written in files and overrides."""

Hook = Callable[[object, object], object]


def kind_of(config_class: type) -> str:
    """The word that selects a class in a union: its ``kind``, or its name in snake case."""
    declared = getattr(config_class, "kind", None)
    if isinstance(declared, str):
        return declared
    name = config_class.__name__
    return "".join(
        f"_{letter.lower()}" if letter.isupper() and index else letter.lower()
        for index, letter in enumerate(name)
    )


def union_members(annotation: object) -> tuple[type, ...]:
    """The attrs classes of a union of two or more of them; empty for everything else."""
    if typing.get_origin(annotation) not in {typing.Union, types.UnionType}:
        return ()
    members = typing.get_args(annotation)
    if len(members) > 1 and all(isinstance(m, type) and attrs.has(m) for m in members):
        return cast("tuple[type, ...]", members)
    return ()


def shown(value: object) -> str:
    """A value and its type, as error messages show them."""
    return f"{value!r} ({type(value).__name__})"


def _structure_primitive(value: object, expected: type) -> object:
    if expected is float and type(value) is int:
        try:
            return float(value)  # TOML writes 1 for 1.0
        except OverflowError as error:
            raise TypeError(f"expected float, got {shown(value)}, above the largest") from error
    if type(value) is not expected:
        raise TypeError(f"expected {expected.__name__}, got {shown(value)}")
    return value


def _structure_path(value: object, _: object) -> Path:
    if isinstance(value, Path):
        return value
    if not isinstance(value, str):
        raise TypeError(f"expected a path as str, got {shown(value)}")
    return Path(value)


def _structure_literal(value: object, annotation: object) -> object:
    allowed = typing.get_args(annotation)
    for candidate in allowed:
        if type(candidate) is type(value) and candidate == value:
            return value
    close = difflib.get_close_matches(str(value), [str(a) for a in allowed], n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"expected one of {', '.join(map(repr, allowed))}, got {value!r}{hint}")


def _is_optional(annotation: object) -> bool:
    return type(None) in typing.get_args(annotation) and (
        typing.get_origin(annotation) in {typing.Union, types.UnionType}
    )


def _is_object(annotation: object) -> bool:
    return annotation is object


def _is_literal(annotation: object) -> bool:
    return typing.get_origin(annotation) is Literal


def _is_tuple(annotation: object) -> bool:
    return typing.get_origin(annotation) is tuple


def has_own_form(annotation: object) -> bool:
    """Whether a class (or a value of it) has `from_config` and `to_config`."""
    target = typing.get_origin(annotation) or annotation
    return hasattr(target, "from_config") and hasattr(target, "to_config")


def _target(annotation: object) -> object:
    """The class behind a possibly parametrised annotation."""
    return typing.get_origin(annotation) or annotation


def attrs_class(annotation: object) -> type["attrs.AttrsInstance"] | None:
    """The attrs class that an annotation names, if it names one."""
    target = _target(annotation)
    if isinstance(target, type) and attrs.has(target):
        return target
    return None


class StructureError(Exception):
    """What is wrong with a table: (path below it, message) of every problem."""

    def __init__(self, problems: list[tuple[str, str]]) -> None:
        self.problems = problems
        super().__init__("; ".join(f"{path}: {message}" for path, message in problems))


def _attrs_factory(annotation: object, converter: cattrs.BaseConverter) -> Hook:
    owner = attrs_class(annotation)
    assert owner is not None  # noqa: S101  # the predicate of this factory
    attrs.resolve_types(owner, include_extras=True)
    fields = {field.name: field for field in attrs.fields(owner) if field.init}

    def hook(value: object, _: object) -> object:
        if isinstance(value, owner):
            return value  # a default that an outer class gave
        if not isinstance(value, Mapping):
            raise TypeError(f"expected a table of settings, got {shown(value)}")
        problems = [(name, unknown_setting(name, owner)) for name in value if name not in fields]
        arguments: dict[str, object] = {}

        def fill(name: str, field: "attrs.Attribute[object]") -> None:
            given = completed_from(value[name], default_of(field))
            arguments[name] = _structure(converter, given, field.type)
            _validate(owner, field, arguments[name])

        for name, field in fields.items():
            if name in value:
                problems += [
                    (f"{name}.{path}".rstrip("."), m) for path, m in _tried(fill, name, field)
                ]
            elif field.default is attrs.NOTHING:
                problems.append((name, "required setting is missing"))
        if not problems:
            try:
                return owner(**arguments)
            except (TypeError, ValueError) as error:
                # What a class finds wrong between its settings belongs to the whole table.
                problems.append(("", str(error)))
        raise StructureError(problems)

    return hook


def _tried(
    fill: Callable[[str, "attrs.Attribute[object]"], None],
    name: str,
    field: "attrs.Attribute[object]",
) -> list[tuple[str, str]]:
    """Fill one field; the problems that came up, with their paths below it."""
    try:
        fill(name, field)
    except StructureError as error:
        return error.problems
    except (TypeError, ValueError) as error:
        return [("", str(error))]
    return []


def default_of(field: "attrs.Attribute[object]") -> object:
    """The default value of a field; `attrs.NOTHING` if it has none."""
    factory = getattr(field.default, "factory", None)  # of an attrs.Factory, typed as a function
    if factory is None:
        return field.default
    return attrs.NOTHING if getattr(field.default, "takes_self", False) else factory()


def completed_from(value: object, base: object) -> object:
    """A table of settings completed from the value that the class has there by default.

    ``loop.group_size=4`` changes one setting of the default `loop` and keeps the others. A table
    that names another `kind` than the default's begins afresh.
    """
    owner = attrs_class(type(base))
    if owner is None or has_own_form(base) or not isinstance(value, Mapping):
        return value
    kind = value.get("kind", kind_of(owner))
    names = {field.name for field in attrs.fields(owner) if field.init}
    if kind != kind_of(owner) and "kind" not in names:
        return value
    completed: dict[str, object] = {name: getattr(base, name) for name in names}
    for name, given in value.items():
        completed[name] = completed_from(given, completed.get(name))
    return _Completed(completed, kind=kind)


class _Completed(dict[str, object]):
    """A completed table; knows its kind, which only a union asks for."""

    def __init__(self, values: Mapping[str, object], *, kind: object) -> None:
        super().__init__(values)
        self.kind = kind


def _validate(
    owner: type["attrs.AttrsInstance"], field: "attrs.Attribute[object]", value: object
) -> None:
    """Run one field's validator by itself, so that the problems of all fields are found at once."""
    if field.validator is None:
        return
    try:
        field.validator(object.__new__(owner), field, value)
    except AttributeError:
        return  # it looks at other fields too: construction will run it again


def unknown_setting(name: str, owner: type["attrs.AttrsInstance"]) -> str:
    """What to say of a name that a class lacks."""
    names = sorted(field.name for field in attrs.fields(owner) if field.init)
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f"unknown setting; did you mean {close[0]}?"
    if not names:
        return "unknown setting; there are none here"
    return f"unknown setting; known here: {', '.join(names)}"


def _structure(converter: cattrs.BaseConverter, value: object, annotation: object) -> object:
    """`converter.structure`, which accepts every annotation although its type says `type`."""
    return converter.structure(value, cast("type[object]", annotation))


def _mapping_factory(annotation: object, converter: cattrs.BaseConverter) -> Hook:
    _, value_type = typing.get_args(annotation)

    def hook(value: object, _: object) -> dict[str, object]:
        if not isinstance(value, Mapping):
            raise TypeError(f"expected a table, got {shown(value)}")
        found: dict[str, object] = {}
        problems: list[tuple[str, str]] = []
        for key, item in value.items():
            try:
                found[str(key)] = _structure(converter, item, value_type)
            except StructureError as error:
                problems += [(f"{key}.{path}".rstrip("."), text) for path, text in error.problems]
            except (TypeError, ValueError) as error:
                problems.append((str(key), str(error)))
        if problems:
            raise StructureError(problems)
        return found

    return hook


def _union_factory(annotation: object, converter: cattrs.BaseConverter) -> Hook:
    members = {kind_of(member): member for member in union_members(annotation)}
    known = ", ".join(sorted(members))

    def hook(value: object, _: object) -> object:
        if isinstance(value, tuple(members.values())):
            return value
        if not isinstance(value, Mapping):
            raise TypeError(f"expected a table with a `kind` ({known}), got {shown(value)}")
        rest = dict(value)
        kind = rest.pop("kind", value.kind if isinstance(value, _Completed) else None)
        if not isinstance(kind, str) or kind not in members:
            raise ValueError(f"expected `kind` to be one of {known}; got {kind!r}")
        try:
            return converter.structure(rest, members[kind])
        except StructureError as error:
            raise StructureError(
                [
                    (path, message.replace("unknown setting;", f"unknown setting of kind={kind};"))
                    for path, message in error.problems
                ]
            ) from error

    return hook


def _optional_factory(annotation: object, converter: cattrs.BaseConverter) -> Hook:
    inner = tuple(a for a in typing.get_args(annotation) if a is not type(None))
    # Rebuilt at run time, so the | form is not available.
    rest: object = inner[0] if len(inner) == 1 else typing.Union[inner]  # noqa: UP007

    def hook(value: object, _: object) -> object:
        if value is None or value == NONE_WORD:
            return None
        return _structure(converter, value, rest)

    return hook


def _tuple_factory(annotation: object, converter: cattrs.BaseConverter) -> Hook:
    item_types = typing.get_args(annotation)
    any_length = item_types[-1:] == (Ellipsis,)

    def hook(value: object, _: object) -> tuple[object, ...]:
        if not isinstance(value, list | tuple):
            raise TypeError(f"expected a list, got {shown(value)}")
        if not any_length and len(value) != len(item_types):
            raise ValueError(f"expected {len(item_types)} entries, got {len(value)}: {value!r}")
        types_by_place = item_types[:1] * len(value) if any_length else item_types
        return tuple(
            _structure(converter, item, item_type)
            for item, item_type in zip(value, types_by_place, strict=True)
        )

    return hook


def _structure_own_form(value: object, annotation: object) -> object:
    if has_own_form(value):
        return value
    return _target(annotation).from_config(value)  # type: ignore[attr-defined]  # has_own_form


def make_converter() -> cattrs.Converter:
    """The converter of `load_config`: no silent conversion, no unknown key.

    A class that has its own text form says so with a class method ``from_config(value)`` and a
    method ``to_config()``.
    """
    converter = cattrs.Converter(detailed_validation=False)
    for primitive in (int, float, bool, str):
        converter.register_structure_hook(primitive, _structure_primitive)
    converter.register_structure_hook(Path, _structure_path)
    of = converter.register_structure_hook_func
    by_factory = converter.register_structure_hook_factory
    # The one registered last is asked first.
    of(_is_object, lambda value, _: value)
    of(_is_literal, _structure_literal)
    by_factory(lambda annotation: attrs_class(annotation) is not None, _attrs_factory)
    by_factory(lambda annotation: _target(annotation) in {Mapping, dict}, _mapping_factory)
    by_factory(lambda annotation: bool(union_members(annotation)), _union_factory)
    by_factory(_is_optional, _optional_factory)
    by_factory(_is_tuple, _tuple_factory)
    of(has_own_form, _structure_own_form)
    return converter


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One leaf of a configuration class."""

    path: str
    """Dotted path from the root class."""

    field: "attrs.Attribute[object]"
    """The field itself."""

    owner: type["attrs.AttrsInstance"]
    """The class that holds it."""

    default: object
    """What it is if nobody sets it; `attrs.NOTHING` if somebody must."""

    kind: str | None
    """The kind of the nearest union that it belongs to, if any."""

    kinds: tuple[str, ...] = ()
    """For the choice of a union's member itself: the words to choose from."""


def settings_of(
    annotation: object, *, prefix: str = "", base: object = None, kind: str | None = None
) -> Iterator[Setting]:
    """Yield every leaf setting below a configuration class.

    Args:
        annotation: the class.
        prefix: what paths begin with.
        base: an instance whose values are the defaults; None for the class's own.
        kind: of the union that the class was chosen from.

    Raises:
        TypeError: if the annotation names no attrs class.
    """
    owner = attrs_class(annotation)
    if owner is None:
        raise TypeError(f"expected an attrs class, got {annotation!r}")
    attrs.resolve_types(owner, include_extras=True)
    for field in attrs.fields(owner):
        if not field.init:
            continue
        default = getattr(base, field.name) if isinstance(base, owner) else default_of(field)
        path = f"{prefix}{field.name}"
        nested = _nested_classes(field.type)
        if not nested:
            yield Setting(path=path, field=field, owner=owner, default=default, kind=kind)
        members = union_members(field.type)
        if members:
            yield Setting(
                path=f"{path}.kind",
                field=field,
                owner=owner,
                default=attrs.NOTHING if default is attrs.NOTHING else kind_of(type(default)),
                kind=kind,
                kinds=tuple(kind_of(member) for member in members),
            )
        for member in nested:
            yield from settings_of(
                member,
                prefix=f"{path}.",
                base=default,
                kind=kind_of(member) if len(nested) > 1 else kind,
            )


def _nested_classes(annotation: object) -> tuple[type, ...]:
    if has_own_form(annotation):
        return ()
    members = union_members(annotation)
    if members:
        return members
    owner = attrs_class(annotation)
    if owner is not None:
        return (owner,)
    if _is_optional(annotation):
        inner = [a for a in typing.get_args(annotation) if a is not type(None)]
        return tuple(member for a in inner for member in _nested_classes(a))
    return ()
