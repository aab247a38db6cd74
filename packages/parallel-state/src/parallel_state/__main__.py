"""`parallel-state show`: print the layout of a run before anything starts."""

import argparse
import sys
from collections.abc import Sequence

from parallel_state.picture import layout_picture
from parallel_state.sizes import ExtraParallelSizes
from parallel_state.state import ParallelState


def _extra_axis(text: str) -> tuple[str, int]:
    name, found, size = text.partition("=")
    if not found or not size.isdecimal():
        message = f"expected NAME=SIZE such as emb=2, got {text!r}"
        raise argparse.ArgumentTypeError(message)
    return name, int(size)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="parallel-state", description=__doc__)
    show = parser.add_subparsers(dest="command", required=True).add_parser(
        "show", help="print which rank sits where on every axis, and which groups it is in"
    )
    show.add_argument("--world-size", type=int, required=True, help="ranks of the whole run")
    show.add_argument("--dp-replicate", type=int, default=1, help="copies of the sharded model")
    show.add_argument("--ulysses", type=int, default=1, help="ranks that share each sequence")
    show.add_argument("--tensor", type=int, default=1, help="ranks that share each product")
    show.add_argument("--pipeline", type=int, default=1, help="stages of layers")
    show.add_argument("--ep", type=int, default=1, help="ranks that the experts are spread over")
    show.add_argument(
        "--extra",
        type=_extra_axis,
        action="append",
        default=[],
        metavar="NAME=SIZE",
        help="a further axis; may be given several times",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; wrong degrees end it with status 2 and the rule that they break."""
    parser = _parser()
    options = parser.parse_args(arguments)
    sizes: dict[str, int] = {"ep": options.ep}
    for name, size in options.extra:
        if name in sizes:
            parser.error(f"the axis {name!r} was given twice")
        sizes[name] = size
    try:
        state = ParallelState.for_world(
            options.world_size,
            dp_replicate_size=options.dp_replicate,
            ulysses_size=options.ulysses,
            tensor_size=options.tensor,
            pipeline_size=options.pipeline,
            extra_parallel_sizes=ExtraParallelSizes[str](sizes),
        )
    except ValueError as error:
        parser.error(str(error))
    sys.stdout.write(layout_picture(state))
    return 0


if __name__ == "__main__":
    sys.exit(main())
