"""A run folder as one HTML page and a PNG; two run folders side by side.

    ./run tools/report.py runs/a                     # report.html and plot.png, into runs/a
    ./run tools/report.py runs/a runs/b              # comparison.html and comparison.png, here
    ./run tools/report.py runs/a --output pages      # into another folder

A page is one file: no script, nothing loaded from elsewhere, so it can be mailed. It also reads
the folder of a run that is still going. The exit status is 2 if a folder cannot be read.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rl_metrics import (
    RunReport,
    plot_comparison,
    plot_run,
    read_run,
    write_comparison,
    write_report,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the files and print where they are."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="run folder, the one with metrics.jsonl")
    parser.add_argument("other", type=Path, nargs="?", help="run folder to compare it with")
    parser.add_argument(
        "--output",
        type=Path,
        help="folder to write to; default: the run folder, or the current one for a comparison",
    )
    parser.add_argument("--no-plot", action="store_true", help="the page without the PNG")
    given = parser.parse_args(arguments)
    output: Path = given.output or (given.run if given.other is None else Path())
    try:
        written = write(given.run, given.other, output, plot=not given.no_plot)
    except (OSError, ValueError, ImportError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    for path in written:
        print(path)
    return 0


def write(run: Path, other: Path | None, output: Path, *, plot: bool) -> list[Path]:
    """Write a page, and a picture if wanted.

    Args:
        run: a run folder.
        other: a run folder to compare it with; None for a report on `run` alone.
        output: folder for the files; made if it is missing.
        plot: whether to draw the PNG too.

    Returns:
        The files.

    Raises:
        OSError: if a folder cannot be read or written.
        ValueError: for a broken file in a run folder; names it.
        ImportError: if the PNG is wanted and matplotlib is missing.
    """
    output_page, output_plot = (
        ("report.html", "plot.png") if other is None else ("comparison.html", "comparison.png")
    )
    page, picture = output / output_page, output / output_plot
    if other is None:
        report = read_run(run, title=run.resolve().name)
        output.mkdir(parents=True, exist_ok=True)
        write_report(report, page)
        if plot:
            plot_run(report.records, picture, title=report.title)
    else:
        first, second = read_two(run, other)
        output.mkdir(parents=True, exist_ok=True)
        write_comparison(first, second, page)
        if plot:
            plot_comparison(first, second, picture)
    return [page, picture] if plot else [page]


def read_two(run: Path, other: Path) -> tuple[RunReport, RunReport]:
    """Both runs, named by their folders, and by the folders above where those are called the same.

    Raises:
        ValueError: if both are the same folder.
    """
    first, second = run.resolve(), other.resolve()
    if first == second:
        raise ValueError(f"expected two run folders, got {first} twice")
    names = [first.name, second.name]
    if first.name == second.name:
        names = [f"{folder.parent.name}/{folder.name}" for folder in (first, second)]
    if names[0] == names[1]:
        names = [str(first), str(second)]
    return read_run(first, title=names[0]), read_run(second, title=names[1])


if __name__ == "__main__":
    sys.exit(main())
