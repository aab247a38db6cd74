"""One output of a notebook cell that is replaced as a run goes on.

Jupyter shows everything that is printed as an output of its own; a thousand steps would be a
thousand of them. IPython can replace an output, without any widget, and a saved notebook keeps the
last state.
"""

import io
from typing import Protocol, Self, cast, final

from rich.console import Console, RenderableType

_FORMAT = (
    '<pre style="white-space: pre; overflow-x: auto; line-height: normal; '
    "font-family: Menlo, 'DejaVu Sans Mono', consolas, 'Courier New', monospace\">{code}</pre>"
)


class _Handle(Protocol):
    """What IPython gives for an output that can be replaced."""

    def update(self, obj: object) -> None:
        """Put something else in its place."""


class _Shown:
    """A rendering as HTML, and as text for a front end that shows none."""

    def __init__(self, html: str, text: str) -> None:
        self._html = html
        self._text = text

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        return {"text/html": self._html, "text/plain": self._text}


@final
class NotebookOutput:
    """The output; made by `open` in the cell that it belongs to."""

    def __init__(self, handle: _Handle, *, width: int) -> None:
        self._handle = handle
        self._width = width

    @classmethod
    def open(cls, *, width: int) -> Self | None:
        """Begin an empty output of so many columns; None where there is no IPython."""
        try:
            from IPython import display  # type: ignore[import-not-found]  # noqa: PLC0415
        except ImportError:
            return None
        handle = display.display(_Shown("", ""), display_id=True)
        return None if handle is None else cls(cast("_Handle", handle), width=width)

    def show(self, renderable: RenderableType) -> None:
        """Replace what is shown."""
        console = Console(
            file=io.StringIO(),
            record=True,
            width=self._width,
            force_jupyter=False,
            force_terminal=True,
            color_system="truecolor",
        )
        console.print(renderable)
        html = console.export_html(inline_styles=True, code_format=_FORMAT, clear=False)
        self._handle.update(_Shown(html, console.export_text()))
