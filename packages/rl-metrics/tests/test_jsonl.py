"""metrics.jsonl."""

import json
import math
import os
import resource
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from rl_metrics import METRICS, MetricsWriter, read_metrics

REWARD = "reward/train/mean"


def write_steps(path: Path, *steps: int) -> None:
    with MetricsWriter.create(path) as writer:
        for step in steps:
            writer.write(step, {REWARD: step / 4})


def steps_in(path: Path) -> list[int]:
    return [record.step for record in read_metrics(path)]


def test_a_record_is_one_strict_json_object_per_line(tmp_path: Path) -> None:
    """Any JSON reader reads it: step, time, and the names as they are."""
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 1, 3)
    lines = path.read_text().splitlines()
    assert len(lines) == 2
    record = json.loads(lines[1])
    assert record.pop("unix_seconds") > 1.7e9
    assert record == {"step": 3, REWARD: 0.75}


def test_what_was_written_is_read_back_exactly(tmp_path: Path) -> None:
    """Floats keep every bit, whole numbers stay whole, numpy's scalars become plain."""
    path = tmp_path / "metrics.jsonl"
    values: dict[str, float] = {
        REWARD: 0.1 + 0.2,
        "batch/sampled/tokens": 768,
        "gradient/norm/value": np.float32(0.1),  # type: ignore[dict-item]
    }
    with MetricsWriter.create(path) as writer:
        written = writer.write(1, values)
    assert read_metrics(path) == [written]
    assert dict(written.values) == values
    assert type(written.values["batch/sampled/tokens"]) is int
    assert type(written.values["gradient/norm/value"]) is float


def test_numbers_that_json_lacks_are_kept(tmp_path: Path) -> None:
    """The step in which a loss became NaN is still strict JSON, and reads back as NaN."""
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter.create(path) as writer:
        writer.write(
            1,
            {
                "loss/policy/mean": math.nan,
                "gradient/norm/value": math.inf,
                "reward/train/mean": -math.inf,
            },
        )

    def refuse(name: str) -> None:
        pytest.fail(f"{name} is not JSON")

    raw = json.loads(path.read_text(), parse_constant=refuse)
    assert raw["loss/policy/mean"] == "nan"
    (record,) = read_metrics(path)
    assert math.isnan(record.values["loss/policy/mean"])
    assert record.values["gradient/norm/value"] == math.inf
    assert record.values["reward/train/mean"] == -math.inf


def test_each_step_is_on_the_disk_when_write_returns(tmp_path: Path) -> None:
    """A process that kills itself right after `write` loses nothing."""
    path = tmp_path / "metrics.jsonl"
    program = textwrap.dedent("""
        import os, pathlib, signal, sys
        from rl_metrics import MetricsWriter
        writer = MetricsWriter.create(pathlib.Path(sys.argv[1]))
        for step in (1, 2, 3):
            writer.write(step, {"reward/train/mean": 0.5})
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    result = subprocess.run([sys.executable, "-c", program, str(path)], check=False)
    assert result.returncode == -signal.SIGKILL
    assert steps_in(path) == [1, 2, 3]


def test_every_record_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One fsync per record, after its last byte."""
    path = tmp_path / "metrics.jsonl"
    synced: list[int] = []
    with MetricsWriter.create(path) as writer:
        sync = os.fsync

        def record_sync(descriptor: int) -> None:
            synced.append(path.read_bytes().count(b"\n"))
            sync(descriptor)

        monkeypatch.setattr(os, "fsync", record_sync)
        writer.write(1, {REWARD: 0.0})
        writer.write(2, {REWARD: 0.0})
    assert synced == [1, 2]


@given(cut=st.integers(0, 400))
def test_a_file_cut_anywhere_is_readable_and_resumable(
    cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever a kill leaves of the file, whole records are read and the run goes on."""
    path = tmp_path_factory.mktemp("cut") / "metrics.jsonl"
    write_steps(path, 1, 2, 3, 4, 5)
    content = path.read_bytes()[:cut]
    path.write_bytes(content)
    whole = content.count(b"\n")
    assert steps_in(path) == list(range(1, whole + 1))
    if whole == 0:
        with pytest.raises(ValueError, match="expected the record of step 1"):
            MetricsWriter.resume(path, last_step=1)
        return
    with MetricsWriter.resume(path, last_step=whole) as writer:
        writer.write(whole + 1, {REWARD: 0.0})
    assert steps_in(path) == list(range(1, whole + 2))


def test_resuming_cuts_off_the_steps_that_will_run_again(tmp_path: Path) -> None:
    """After a resume at step 3 no step stands there twice, and the cut ones were counted."""
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 1, 2, 3, 4, 5)
    with MetricsWriter.resume(path, last_step=3) as writer:
        assert writer.num_dropped == 2
        assert steps_in(path) == [1, 2, 3]
        writer.write(4, {REWARD: 0.5})
    assert steps_in(path) == [1, 2, 3, 4]


def test_steps_must_rise(tmp_path: Path) -> None:
    """Neither a new nor a resumed writer writes a step twice."""
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter.create(path) as writer:
        writer.write(2, {})
        with pytest.raises(ValueError, match="steps must rise, got step 2 after step 2"):
            writer.write(2, {})
    with (
        MetricsWriter.resume(path, last_step=2) as writer,
        pytest.raises(ValueError, match="got step 1 after step 2"),
    ):
        writer.write(1, {})


def test_lost_records_are_noticed(tmp_path: Path) -> None:
    """A file that ends before the checkpoint's step is refused, and left as it is."""
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 1, 2)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"expected the record of step 5.*, got step 2"):
        MetricsWriter.resume(path, last_step=5)
    assert path.read_bytes() == before


def test_a_full_disk_leaves_whole_records_only(tmp_path: Path) -> None:
    """A record that does not fit is an error, is taken back, and the next one can be written."""
    path = tmp_path / "metrics.jsonl"
    program = textwrap.dedent("""
        import pathlib, resource, signal, sys
        from rl_metrics import METRICS, MetricsWriter
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        writer = MetricsWriter.create(pathlib.Path(sys.argv[1]))
        writer.write(1, {"reward/train/mean": 0.5})
        limit = int(sys.argv[2])
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        try:
            writer.write(2, dict.fromkeys(METRICS, 0.5))
        except OSError as error:
            print(error.strerror)
        writer.write(3, {"reward/train/mean": 0.5})
    """)
    result = subprocess.run(
        [sys.executable, "-c", program, str(path), "200"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert result.stdout == "File too large\n"
    assert steps_in(path) == [1, 3]
    assert path.read_bytes().endswith(b"}\n")  # for readers that know no torn lines
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    """A new run in an old folder is refused and told about `resume`."""
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 1)
    with pytest.raises(FileExistsError, match=r"continue it with MetricsWriter\.resume"):
        MetricsWriter.create(path)
    assert steps_in(path) == [1]


def test_unknown_names_and_values_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    """Nothing of a refused record reaches the file."""
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter.create(path) as writer:
        with pytest.raises(ValueError, match="unknown metric 'reward/mean'"):
            writer.write(1, {"reward/mean": 0.5})
        with pytest.raises(TypeError, match=r"reward/train/mean: expected a number, got 'x' \(str"):
            writer.write(1, {REWARD: "x"})  # type: ignore[dict-item]
        with pytest.raises(TypeError, match=r"got True \(bool\)"):
            writer.write(1, {REWARD: True})
    assert path.read_bytes() == b""
    with pytest.raises(ValueError, match="cannot write step 1, the writer is closed"):
        writer.write(1, {REWARD: 0.5})


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("{", "line 2: expected one JSON object, got b'{'"),
        ("[1]", "line 2: expected one JSON object"),
        ('{"step": 1.5, "unix_seconds": 1}', r"line 2: expected the keys step .* got 1\.5 and 1"),
        ('{"step": 9, "unix_seconds": 1, "a/b/c": "x"}', "line 2: expected a number for a/b/c"),
        ('{"step": 1, "unix_seconds": 1}', "got step 1 after step 1; two runs wrote"),
    ],
)
def test_a_broken_whole_line_is_an_error(line: str, text: str, tmp_path: Path) -> None:
    """Only a torn last line is a kill's doing; anything else is named and left alone."""
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 1)
    with path.open("a") as file:
        file.write(line + "\n")
    content = path.read_bytes()
    with pytest.raises(ValueError, match=text):
        read_metrics(path)
    with pytest.raises(ValueError, match=text):
        MetricsWriter.resume(path, last_step=9)
    assert path.read_bytes() == content


def test_names_of_other_releases_are_read(tmp_path: Path) -> None:
    """A file outlives the list of names: reading does not check them."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "unix_seconds": 1, "gone/by/now": 2}\n')
    assert "gone/by/now" not in METRICS
    assert dict(read_metrics(path)[0].values) == {"gone/by/now": 2}
