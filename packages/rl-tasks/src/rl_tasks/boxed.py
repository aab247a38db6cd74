r"""Finding the answer that a completion puts into ``\boxed{...}``."""

import re

_TOKEN = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
r"""A box that opens, an escaped character (``\{`` is no brace), or a brace."""


def last_complete_box(text: str) -> str | None:
    r"""The content of the last ``\boxed{...}`` or ``\fbox{...}`` whose braces close, or None.

    Last is the box that opens last, so of a box within a box the inner one. Runs once over the
    text, whatever stands there.
    """
    open_braces: list[int | None] = []  # where a box's content begins; None for a plain brace
    start, content = -1, None
    for token in _TOKEN.finditer(text):
        if token[0] == "{":
            open_braces.append(None)
        elif token[0] == "}":
            opened = open_braces.pop() if open_braces else None
            if opened is not None and opened > start:
                start, content = opened, text[opened : token.start()]
        elif token[0].endswith("{") and token[0] != "\\{":
            open_braces.append(token.end())
    return content
