"""Text that a model wrote, made safe to look at.

A terminal obeys escape sequences, and both terminals and browsers obey the characters that turn
the reading direction. Model output is data: such characters are shown, not obeyed.
"""

import unicodedata

_FIRST_SYMBOL = 0x2400
"""U+2400 to U+241F are the pictures of the control characters U+0000 to U+001F."""

_DELETE = 0x7F
_DELETE_SYMBOL = "\u2421"


def visible(text: str, *, max_characters: int | None = None) -> str:
    """`text` with every control and formatting character replaced by a visible one.

    Newlines stay. Text beyond `max_characters` is cut, and an ellipsis says so; None keeps all.
    """
    if max_characters is not None and len(text) > max_characters:
        text = text[:max_characters] + "\u2026"
    return "".join(_visible_character(character) for character in text)


def _visible_character(character: str) -> str:
    code = ord(character)
    if character == "\n" or unicodedata.category(character) not in {"Cc", "Cf", "Cs", "Zl", "Zp"}:
        return character
    if code < ord(" "):
        return chr(_FIRST_SYMBOL + code)
    if code == _DELETE:
        return _DELETE_SYMBOL
    return f"<U+{code:04X}>"
