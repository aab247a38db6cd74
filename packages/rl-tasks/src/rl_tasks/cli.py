"""The command ``rl-tasks``: prepares published data sets."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rl_tasks.errors import TaskError
from rl_tasks.prepare import PUBLISHED, prepare


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code: 0, or 1 with the reason on standard error."""
    options = _parser().parse_args(arguments)
    try:
        counts = prepare(
            options.data_set,
            source=options.source,
            output=options.output,
            split=options.split,
            unusable=options.unusable,
        )
    except (TaskError, OSError) as error:
        sys.stderr.write(f"rl-tasks prepare: {error}\n")
        return 1
    dropped = ", ".join(f"{field}: {count}" for field, count in counts.unusable.items()) or "none"
    sys.stdout.write(
        f"{options.output}: {counts.num_written} of {counts.num_rows} rows; left out: "
        f"{counts.num_repeated} repeated, {counts.num_contradictory} with the same prompt and "
        f"different answers, unusable by field: {dropped}\n"
    )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rl-tasks", allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="prepare")
    listed = "\n".join(f"  {name}: {published.where}" for name, published in PUBLISHED.items())
    command = commands.add_parser(
        "prepare",
        allow_abbrev=False,
        help="published files to one parquet file in verl's schema",
        description=f"Fetch the published files yourself:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("data_set", choices=sorted(PUBLISHED))
    command.add_argument("--source", type=Path, required=True, help="folder of published files")
    command.add_argument("--output", type=Path, required=True, help="the .parquet file to write")
    command.add_argument(
        "--split", choices=("train", "test"), help="which part, where there are parts"
    )
    command.add_argument(
        "--unusable",
        choices=("error", "drop"),
        default="error",
        help="what happens to rows that cannot be used (default: an error that names the row)",
    )
    return parser
