"""The picture of a layout, compared as text, and the command that prints it."""

import subprocess
import sys
from textwrap import dedent

import pytest

from parallel_state import ExtraParallelSizes, ParallelState
from parallel_state.__main__ import main
from parallel_state.picture import layout_picture


def test_the_picture_of_eight_ranks() -> None:
    """Two replicas of four shards with ep 2, drawn by hand."""
    state = ParallelState(
        dp_size=8, dp_replicate_size=2, extra_parallel_sizes=ExtraParallelSizes.of(ep=2)
    )
    title, _, drawing = layout_picture(state).partition("\n\n")
    assert title == "8 ranks = dp_replicate 2 x dp_shard 4; fsdp 4 = ep_fsdp 2 x ep 2"
    assert drawing == dedent("""\
        rank  dp_replicate  dp_shard  fsdp  data  ep  ep_fsdp
           0             0         0     0     0   0        0
           1             0         1     1     1   1        0
           2             0         2     2     2   0        1
           3             0         3     3     3   1        1
           4             1         0     0     4   0        0
           5             1         1     1     5   1        0
           6             1         2     2     6   0        1
           7             1         3     3     7   1        1

        groups
          dp_replicate  4 of 2  0,4  1,5  2,6  3,7
          dp_shard      2 of 4  0-3  4-7
          fsdp          2 of 4  0-3  4-7
          data          1 of 8  0-7
          ep            4 of 2  0,1  2,3  4,5  6,7
          ep_fsdp       4 of 2  0,2  1,3  4,6  5,7
        """)


def test_steps_between_ranks_show() -> None:
    """With two tensor ranks a group takes every second rank; pairs are written out."""
    picture = layout_picture(ParallelState(dp_size=3, tensor_size=2))
    assert "  dp_shard  2 of 3  0-4:2  1-5:2\n" in picture
    assert "  tensor    3 of 2  0,1  2,3  4,5\n" in picture


def test_many_groups_take_several_lines() -> None:
    """64 ranks in 32 pairs fill two lines, the second under the first group."""
    picture = layout_picture(ParallelState(dp_size=64, dp_replicate_size=2))
    assert max(len(line) for line in picture.splitlines()) <= 100
    first, second = [line for line in picture.splitlines() if "," in line][:2]
    assert first.startswith("  dp_replicate  32 of 2  0,32  1,33  ")
    assert second.index(second.strip()) == first.index("0,32")


def test_one_rank_has_no_groups() -> None:
    """A world of one has nothing to draw."""
    assert layout_picture(ParallelState()) == "1 ranks = 1\nevery rank is alone on every axis\n"


def test_the_command_prints_the_picture() -> None:
    """`python -m parallel_state show` fills the world, further axes included."""
    command = [sys.executable, "-m", "parallel_state", "show", "--world-size", "16", "--ep", "8"]
    done = subprocess.run(
        [*command, "--extra", "emb=2"], capture_output=True, text=True, check=True, timeout=60
    )
    state = ParallelState(dp_size=16, extra_parallel_sizes=ExtraParallelSizes({"ep": 8, "emb": 2}))
    assert done.stdout == layout_picture(state)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--world-size", "6", "--ep", "4"], "extra_parallel_sizes['ep'] = 4 must divide"),
        (["--world-size", "8", "--extra", "emb"], "expected NAME=SIZE such as emb=2, got 'emb'"),
        (["--world-size", "8", "--extra", "ep=2"], "the axis 'ep' was given twice"),
        (["--world-size", "8", "--extra", "emb=\u0662"], "expected NAME=SIZE such as emb=2"),
        (["--world-size", "8_0"], "--world-size: expected a whole number such as 8, got '8_0'"),
        (["--world-size", "-8"], "--world-size: expected a whole number such as 8, got '-8'"),
        (["--world-size", "9" * 5000], "--world-size: expected a whole number such as 8, got"),
        (["--world-size", "8", "--tens", "2"], "unrecognized arguments: --tens 2"),
        (
            ["--world-size", "131073"],
            "a line for each rank, at most 131072 of them, got a world of",
        ),
        (["--world-size", "999999999999999", "--ep", "7"], "use a divisor of 999999999999999"),
    ],
)
def test_the_command_refuses_with_the_rule(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 2, and the words of the rule."""
    with pytest.raises(SystemExit) as caught:
        main(["show", *arguments])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_the_help_has_an_example_that_works(capsys: pytest.CaptureFixture[str]) -> None:
    """What the help shows can be typed."""
    with pytest.raises(SystemExit):
        main(["show", "--help"])
    shown = [line.split() for line in capsys.readouterr().out.splitlines() if "64 --ep" in line]
    assert [words[0] for words in shown] == ["parallel-state"]
    assert main(shown[0][1:]) == 0
    assert capsys.readouterr().out.startswith("64 ranks = dp_shard 64; fsdp 64 = ep_fsdp 8 x ep 8")
