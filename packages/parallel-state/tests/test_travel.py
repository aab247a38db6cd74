"""Values that travel: through Ray, and through configuration files."""

import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import attrs
import pytest

from parallel_state import ExtraParallelSizes, ParallelState
from rl_contracts import ConfigError, effective_toml, load_config

DRIVER = Path(__file__).with_name("ray_driver.py")

EpEmb = Literal["ep", "emb"]


@attrs.frozen(kw_only=True)
class Run:
    """A configuration with a state in it, as an example has."""

    name: str = "run"
    parallel: ParallelState[EpEmb]


RUN = Run(
    parallel=ParallelState(
        dp_size=8,
        dp_replicate_size=2,
        ulysses_size=2,
        extra_parallel_sizes=ExtraParallelSizes({"ep": 8, "emb": 2}),
    )
)


def _mentions(folder: str) -> list[str]:
    """Processes whose command line or environment names the folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        for file in ("cmdline", "environ"):
            try:
                if folder.encode() in (process / file).read_bytes():
                    found.append(process.name)
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
    return found


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")
def test_round_trip_through_ray(tmp_path: Path) -> None:
    """An actor gets the same key that it would build, sends it back, and nothing stays behind."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    # short: Ray puts sockets into it, whose paths must be
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        ended = subprocess.run(
            [sys.executable, str(DRIVER), str(tmp_path / "seen.json")],
            check=False,
            capture_output=True,
            text=True,
            timeout=240,
            env={**environment, "TMPDIR": folder},
        )
        assert ended.returncode == 0, ended.stderr
        assert list(Path(folder).iterdir()) == []
        assert _mentions(folder) == []
    assert json.loads((tmp_path / "seen.json").read_text()) == {
        "in another process": True,
        "found there": True,
        "sizes": True,
        "order": ["ep", "emb"],
        "state": True,
        "same hash": True,
    }


def test_round_trip_through_toml(tmp_path: Path) -> None:
    """What a run writes down as its configuration is read back equal, order of axes included."""
    file = tmp_path / "run.toml"
    file.write_text(
        """
        [parallel]
        dp_size = 8
        dp_replicate_size = 2
        ulysses_size = 2
        extra_parallel_sizes = { ep = 8, emb = 2 }
        """
    )
    loaded = load_config(Run, file=file)
    assert loaded.value == RUN
    assert list(loaded.value.parallel.extra_parallel_sizes) == ["ep", "emb"]
    written = tmp_path / "effective.toml"
    written.write_text(effective_toml(loaded))
    assert load_config(Run, file=written).value == RUN


def test_round_trip_through_json(tmp_path: Path) -> None:
    """The plain tables of a state are JSON, and come back equal."""
    file = tmp_path / "run.json"
    file.write_text(
        json.dumps(
            {
                "parallel": {
                    "dp_size": 8,
                    "dp_replicate_size": 2,
                    "ulysses_size": 2,
                    "extra_parallel_sizes": RUN.parallel.extra_parallel_sizes.to_config(),
                }
            }
        )
    )
    assert load_config(Run, file=file).value == RUN


def test_overrides_reach_one_axis(tmp_path: Path) -> None:
    """`parallel.extra_parallel_sizes.ep=4` changes that axis alone, and is checked like a file."""
    file = tmp_path / "run.json"
    file.write_text('{"parallel": {"dp_size": 8, "extra_parallel_sizes": {"ep": 8, "emb": 2}}}')
    loaded = load_config(Run, file=file, overrides=["parallel.extra_parallel_sizes.ep=4"])
    assert loaded.value.parallel.extra_parallel_sizes.as_dict() == {"ep": 4, "emb": 2}
    with pytest.raises(
        ConfigError, match=r"extra_parallel_sizes\['ep'\] = 3 must divide"
    ) as caught:
        load_config(Run, file=file, overrides=["parallel.extra_parallel_sizes.ep=3"])
    assert "parallel" in str(caught.value)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ("[8]", "expected a mapping from axis names to sizes, got the list [8]"),
        ('{"ep": "8"}', "ExtraParallelSizes['ep']: expected an int of at least 1, got '8' (str)"),
        ('{"ep": true}', "ExtraParallelSizes['ep']: expected an int of at least 1, got True"),
        ('{"ep": 0}', "ExtraParallelSizes['ep']: expected an int of at least 1, got 0"),
    ],
)
def test_a_wrong_file_says_where(tmp_path: Path, sizes: str, message: str) -> None:
    """The words of the value, with the path in the file."""
    file = tmp_path / "run.json"
    file.write_text(f'{{"parallel": {{"extra_parallel_sizes": {sizes}}}}}')
    with pytest.raises(ConfigError) as caught:
        load_config(Run, file=file)
    assert message in str(caught.value)
    assert "parallel.extra_parallel_sizes" in str(caught.value)
