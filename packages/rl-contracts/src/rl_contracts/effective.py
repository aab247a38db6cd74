"""The effective configuration as text: each value, who set it, and which package reads it.

The text is TOML that `rl_contracts.load_config` reads back into the same configuration; origins
and derived values stand in comments.
"""

import ast
import inspect
import sys
import textwrap
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path

import attrs
import tomli_w

from rl_contracts.config import ConfigT, LoadedConfig
from rl_contracts.converter import (
    NONE_WORD,
    attrs_class,
    has_own_form,
    kind_of,
    settings_of,
    union_members,
)


def _reader(owner: type) -> str:
    """The package whose class holds the setting; for a script, the script's name."""
    module = owner.__module__
    if module == "__main__":
        main = sys.modules["__main__"]
        return Path(getattr(main, "__file__", None) or "__main__").stem
    return module.partition(".")[0]


def _toml(value: object) -> str:
    if value is None:
        return f'"{NONE_WORD}"'
    if isinstance(value, Path):
        value = str(value)
    if has_own_form(value):
        value = value.to_config()  # type: ignore[attr-defined]  # has_own_form
    if isinstance(value, Mapping):
        body = ", ".join(f"{_key(str(name))} = {_toml(item)}" for name, item in value.items())
        return f"{{ {body} }}" if body else "{}"
    if isinstance(value, tuple | list):
        return f"[{', '.join(_toml(item) for item in value)}]"
    return tomli_w.dumps({"v": value}).partition(" = ")[2].rstrip("\n")


def _key(name: str) -> str:
    return tomli_w.dumps({name: 0}).partition(" = ")[0]


def _rows(config: object, prefix: str, annotation: object) -> Iterator[tuple[str, str, object]]:
    """Yield (dotted path, reading package, plain value), tables after plain values."""
    owner = attrs_class(type(config))
    if owner is None:
        raise TypeError(f"expected a configuration, got {config!r}")
    attrs.resolve_types(owner, include_extras=True)
    if union_members(annotation):
        yield f"{prefix}kind", _reader(owner), kind_of(owner)
    tables: list[tuple[str, object, object]] = []
    for field in attrs.fields(owner):
        if not field.init:
            continue
        value: object = getattr(config, field.name)
        if has_own_form(value):
            yield f"{prefix}{field.name}", _reader(owner), value.to_config()  # type: ignore[attr-defined]  # has_own_form
        elif attrs.has(type(value)):
            tables.append((field.name, value, field.type))
        elif isinstance(value, tuple):
            (item_type, *_) = typing.get_args(field.type) or (None,)
            items = tuple(_as_table(item, item_type) for item in value)
            yield f"{prefix}{field.name}", _reader(owner), items
        else:
            yield f"{prefix}{field.name}", _reader(owner), value
    for name, value, field_type in tables:
        yield from _rows(value, f"{prefix}{name}.", field_type)


def _as_table(value: object, annotation: object) -> object:
    """A configuration inside of a tuple as one table; every other value as it is."""
    owner = attrs_class(type(value))
    if owner is None or has_own_form(value):
        return value
    attrs.resolve_types(owner, include_extras=True)
    kind = {"kind": kind_of(owner)} if union_members(annotation) else {}
    fields = {
        field.name: _as_table(getattr(value, field.name), field.type)
        for field in attrs.fields(owner)
        if field.init
    }
    return kind | fields


def effective_toml(
    loaded: LoadedConfig[ConfigT], *, derived: Mapping[str, tuple[object, str]] | None = None
) -> str:
    """Render a loaded configuration with the origin and the reader of every value.

    Args:
        loaded: what `load_config` returned.
        derived: values that were not set but follow: name to (value, reason); written as comments.
    """
    lines: list[str] = []
    table = ""
    rows = [
        (path, value, f"{loaded.origin(path)}; read by {reader}")
        for path, reader, value in _rows(loaded.value, "", None)
    ]
    for path, value, comment in rows:
        parent, _, leaf = path.rpartition(".")
        if parent != table:
            lines += ["", f"[{'.'.join(_key(part) for part in parent.split('.'))}]"]
            table = parent
        lines.append(f"{_key(leaf)} = {_toml(value)}  # {comment}")
    if derived:
        lines += ["", "# derived"]
        lines += [f"# {name} = {_toml(value)}  ({why})" for name, (value, why) in derived.items()]
    return "\n".join(lines).lstrip("\n") + "\n"


def field_docs(config_class: type) -> dict[str, str]:
    """The docstring under each field of a class, as one line of text."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(config_class)))
    (class_node,) = tree.body
    assert isinstance(class_node, ast.ClassDef)  # noqa: S101  # source of a class
    docs: dict[str, str] = {}
    for node, following in zip(class_node.body, class_node.body[1:], strict=False):
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
            and isinstance(following.value.value, str)
        ):
            docs[node.target.id] = " ".join(following.value.value.split())
    return docs


def _type_text(annotation: object) -> str:
    if isinstance(annotation, type) and not typing.get_args(annotation):
        return annotation.__name__
    if typing.get_origin(annotation) is typing.Literal:
        return " | ".join(map(str, typing.get_args(annotation)))
    text = str(annotation).replace("NoneType", "None")
    return text.rpartition(".")[2] if "[" not in text else text.replace("typing.", "")


def settings_help(config_class: type, *, width: int = 100, defaults: object = None) -> str:
    """Every setting with its type, default and docstring, for a ``--help`` text.

    Args:
        config_class: the configuration.
        width: of the text, in characters.
        defaults: an instance whose values are the defaults; None for the class's own.
    """
    lines: list[str] = []
    seen: set[str] = set()
    docs: dict[type, dict[str, str]] = {}
    for setting in settings_of(config_class, base=defaults):
        if setting.owner not in docs:
            docs[setting.owner] = field_docs(setting.owner)
        default = "required" if setting.default is attrs.NOTHING else _toml(setting.default)
        only = f", with kind={setting.kind}" if setting.kind else ""
        type_text = " | ".join(setting.kinds) or _type_text(setting.field.type)
        title = f"  {setting.path}  ({type_text}; {default}{only})"
        if title in seen:
            continue
        seen.add(title)
        lines.append(title)
        text = docs[setting.owner].get(setting.field.name, "")
        lines += textwrap.wrap(text, width, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines)
