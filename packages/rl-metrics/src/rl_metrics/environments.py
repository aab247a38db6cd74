"""``environments.json``: what each worker of a run saw, and how much of it a page shows."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

from rl_metrics.visible import visible

_SECRET_WORDS = frozenset(
    {
        "apikey",
        "auth",
        "cookie",
        "credential",
        "credentials",
        "jwt",
        "key",
        "passwd",
        "password",
        "pwd",
        "secret",
        "token",
    }
)


_USER_OF_ADDRESS = re.compile(r"(?<=://)[^/?#\s]*@")
"""As of a proxy or a database: user and password."""


def read_environments(path: Path) -> Mapping[str, Mapping[str, str]]:
    """Worker to variable to value.

    Raises:
        ValueError: for a file of another form; names it.
    """
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        message = f"{path}: expected a JSON object of workers: {error}"
        raise ValueError(message) from error
    if not isinstance(content, dict) or not all(
        isinstance(variables, dict) and all(isinstance(value, str) for value in variables.values())
        for variables in content.values()
    ):
        message = f"{path}: expected a JSON object of worker to variable to string"
        raise ValueError(message)
    return content


def shown_value(name: str, value: str) -> str:
    """The value, unless the variable's name says that it is secret; no password of an address."""
    if _SECRET_WORDS & set(name.lower().split("_")):
        return "(set, not shown)" if value else "(empty)"
    return visible(_USER_OF_ADDRESS.sub("(not shown)@", value))
