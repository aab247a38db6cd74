"""The layout of a run, before anything starts."""

import argparse
import sys
from collections.abc import Sequence

from parallel_state.picture import layout_picture
from parallel_state.sizes import ExtraParallelSizes
from parallel_state.state import ParallelState

_EXAMPLE = """\
for example, 64 ranks with experts spread over 8 of them:

    parallel-state show --world-size 64 --ep 8

What the other degrees leave of the world is data parallelism: ranks that read different data.
"""


def _count(text: str) -> int:
    # Narrower than int(), which takes "8_0" and digits of every script.
    if not (text.isascii() and text.isdecimal() and len(text) <= len(str(sys.maxsize))):
        message = f"expected a whole number such as 8, got {text!r}"
        raise argparse.ArgumentTypeError(message)
    return int(text)


def _extra_axis(text: str) -> tuple[str, int]:
    name, _, size = text.partition("=")
    try:
        return name, _count(size)
    except argparse.ArgumentTypeError as error:
        message = f"expected NAME=SIZE such as emb=2, got {text!r}"
        raise argparse.ArgumentTypeError(message) from error


def _parsers() -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """The parser of the command line, and that of `show`."""
    parser = argparse.ArgumentParser(prog="parallel-state", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser(
        "show",
        help="print which rank sits where on every axis, and which groups it is in",
        description="Print which rank sits where on every axis, and which groups it is in.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )

    def add(option: str, text: str, *, is_required: bool = False) -> None:
        show.add_argument(
            option, type=_count, metavar="N", default=1, help=text, required=is_required
        )

    add("--world-size", "ranks of the whole run; required", is_required=True)
    add("--dp-replicate", "copies of the sharded model (HSDP); 1 if not given, as all that follow")
    add("--ulysses", "ranks that share each sequence")
    add("--tensor", "ranks that share each matrix product")
    add("--pipeline", "stages of layers")
    add("--ep", "ranks that the experts are spread over")
    show.add_argument(
        "--extra",
        type=_extra_axis,
        action="append",
        default=[],
        metavar="NAME=SIZE",
        help="a further axis beside ep, such as emb=2; may be given several times",
    )
    return parser, show


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; wrong degrees end it with status 2 and the rule that they break."""
    parser, show = _parsers()
    options = parser.parse_args(arguments)
    sizes: dict[str, int] = {"ep": options.ep}
    for name, size in options.extra:
        if name in sizes:
            show.error(f"the axis {name!r} was given twice")
        sizes[name] = size
    try:
        picture = layout_picture(
            ParallelState.for_world(
                options.world_size,
                dp_replicate_size=options.dp_replicate,
                ulysses_size=options.ulysses,
                tensor_size=options.tensor,
                pipeline_size=options.pipeline,
                extra_parallel_sizes=ExtraParallelSizes[str](sizes),
            )
        )
    except ValueError as error:
        show.error(str(error))
    sys.stdout.write(picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
