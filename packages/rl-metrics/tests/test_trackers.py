"""The trackers, each with its own package: what was written is read back by it."""

import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path

import attrs
import pytest

from rl_contracts import ConfigError, load_config
from rl_metrics import (
    MetricsWriter,
    MlflowConfig,
    StepRecord,
    TensorBoardConfig,
    TrackerConfig,
    Trackers,
    TrackioConfig,
    WandbConfig,
    read_metrics,
)
from rl_metrics.trackers.config import tracker_from_json, tracker_to_json
from rl_metrics.trackers.mlflow import mlflow_params
from rl_metrics.trackers.process import TrackerProcess

REWARD = "reward/train/mean"
LOSS = "loss/policy/mean"
PATIENCE_S = 600.0

SLOW_KINDS = ("wandb", "mlflow", "trackio")
"""Their packages take seconds to import, twice here in two processes."""


def config_of(kind: str, folder: Path) -> TrackerConfig:
    store = f"file://{folder.parent / 'mlruns'}"
    configs: tuple[TrackerConfig, ...] = (
        TensorBoardConfig(),
        WandbConfig(project="quick", mode="offline"),
        MlflowConfig(tracking_uri=store, experiment="quick"),
        TrackioConfig(project="quick", folder=folder.parent / "trackio"),
    )
    return next(config for config in configs if config.kind == kind)


def read_back(kind: str, folder: Path) -> list[tuple[list[tuple[int, dict[str, object]]], str]]:
    """What the tracker's own package finds: runs, with rows and how they ended."""
    done = subprocess.run(
        [sys.executable, Path(__file__).parent / "tracker_readers.py", kind, folder],
        check=True,
        capture_output=True,
        text=True,
    )
    runs = json.loads(done.stdout.splitlines()[-1])
    return [([(step, values) for step, values in rows], end) for rows, end in runs]


def process_of(trackers: Trackers) -> TrackerProcess:
    (process,) = trackers._processes
    return process


def killed(pid: int) -> None:
    """Kill a tracker's process with all its children, and wait until they are gone."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    for one in (pid, *map(int, children)):
        os.kill(one, signal.SIGKILL)
    for child in children:  # not ours, hence no wait for them
        while is_alive(int(child)):
            time.sleep(0.01)


def is_alive(pid: int) -> bool:
    """Whether a process that is not ours still runs; one that nobody has waited for does not."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return "\nState:\tZ" not in status


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is not what is tested here."""
    for limit in ("_START_TIMEOUT_S", "_CLOSE_TIMEOUT_S"):
        monkeypatch.setattr(f"rl_metrics.trackers.fan_out.{limit}", PATIENCE_S)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with a configuration."""
    folder = tmp_path / "run-a"
    folder.mkdir()
    (folder / "effective_config.toml").write_text("[loop]\nnum_steps = 5\n")
    return folder


@pytest.mark.parametrize(
    "kind",
    ["tensorboard", *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW_KINDS)],
)
def test_a_kill_loses_no_step_and_a_resumed_run_holds_each_once(kind: str, run: Path) -> None:
    """The tracker dies right after step 4; the run goes on, is resumed at step 2, and ends."""
    said: list[str] = []
    config = config_of(kind, run)
    with MetricsWriter.create(run / "metrics.jsonl") as writer:
        trackers = Trackers.open([config], folder=run, say=said.append, write_timeout_s=PATIENCE_S)
        for step in range(5):
            loss = math.nan if step == 1 else 0.5
            trackers.write(writer.write(step, {REWARD: step / 4, LOSS: loss}))
        assert said == []
        killed(process_of(trackers).pid)
        died = read_back(kind, run) if kind in {"tensorboard", "trackio"} else None
        trackers.write(writer.write(5, {REWARD: 1.25}))
        assert trackers.num_missed == {kind: 1}
        trackers.close()
    assert len(said) == 2
    assert said[0].startswith(f"tracker {kind}: its process has ended; its last words are in /")
    assert said[1] == f"tracker {kind}: lacks 1 of the run's steps; metrics.jsonl has them all"

    said.clear()
    with MetricsWriter.resume(run / "metrics.jsonl", last_step=2) as writer:
        earlier = read_metrics(run / "metrics.jsonl")
        with Trackers.open(
            [config],
            folder=run,
            say=said.append,
            records=earlier,
            write_timeout_s=PATIENCE_S,
        ) as trackers:
            for step in (3, 4):
                trackers.write(writer.write(step, {REWARD: -step / 4}))
            assert trackers.num_missed == {kind: 0}
    assert said == []

    (first, resumed) = [(died or [])[0], *read_back(kind, run)] if died else read_back(kind, run)
    losses: dict[int, object] = {0: 0.5, 1: "nan", 2: 0.5, 3: 0.5, 4: 0.5}
    assert first[0] == [(step, {REWARD: step / 4, LOSS: losses[step]}) for step in range(5)]
    assert resumed[0] == [
        *((step, {REWARD: step / 4, LOSS: losses[step]}) for step in range(3)),
        *((step, {REWARD: -step / 4}) for step in (3, 4)),
    ]
    ends = {"wandb": ("running", "0"), "mlflow": ("KILLED", "FINISHED")}.get(kind, ("", ""))
    assert (first[1], resumed[1]) == ends


@pytest.mark.slow
def test_a_run_that_is_killed_is_marked_as_failed(run: Path) -> None:
    """The tracker outlives the run long enough to say so, and has its last step."""
    program = textwrap.dedent("""
        import os, pathlib, signal, sys
        from rl_metrics import MetricsWriter, MlflowConfig, Trackers
        run = pathlib.Path(sys.argv[1])
        config = MlflowConfig(tracking_uri=f"file://{run.parent / 'mlruns'}", experiment="quick")
        writer = MetricsWriter.create(run / "metrics.jsonl")
        trackers = Trackers.open([config], folder=run, say=print)
        trackers.write(writer.write(1, {"reward/train/mean": 0.5}))
        print(trackers._processes[0].pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    done = subprocess.run(
        [sys.executable, "-c", program, run], check=False, capture_output=True, text=True
    )
    assert done.returncode == -signal.SIGKILL
    while is_alive(int(done.stdout)):
        time.sleep(0.05)
    assert read_back("mlflow", run) == [([(1, {REWARD: 0.5})], "FAILED")]


def test_a_tracker_that_cannot_start_is_tried_again(run: Path) -> None:
    """What stands in its way is said once; when it is gone, the tracker gets every step."""
    said: list[str] = []
    (run / "tensorboard").write_text("a file, where a folder should be")
    with Trackers.open(
        [TensorBoardConfig()], folder=run, say=said.append, write_timeout_s=PATIENCE_S
    ) as trackers:
        for step in range(3):
            if step == 2:
                (run / "tensorboard").unlink()
            trackers.write(StepRecord(step=step, unix_seconds=0.0, values={REWARD: step / 4}))
        assert trackers.num_missed == {"tensorboard": 0}
    assert len(said) == 1
    assert said[0].startswith("tracker tensorboard: FileExistsError: ")
    assert read_back("tensorboard", run) == [([(s, {REWARD: s / 4}) for s in range(3)], "")]


def test_a_network_that_is_down_neither_ends_nor_stalls_the_run(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is told once; the steps are counted, and the others' trackers have them."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    said: list[str] = []
    nobody_listens = MlflowConfig(tracking_uri="http://127.0.0.1:9", experiment="quick")
    configs: list[TrackerConfig] = [nobody_listens, TensorBoardConfig()]
    with Trackers.open(
        configs, folder=run, say=said.append, write_timeout_s=PATIENCE_S
    ) as trackers:
        for step in range(3):
            trackers.write(StepRecord(step=step, unix_seconds=0.0, values={REWARD: step / 4}))
    assert trackers.num_missed == {"mlflow": 3, "tensorboard": 0}
    assert len(said) == 2
    assert "tracker mlflow: " in said[0]
    assert "127.0.0.1" in said[0]
    assert said[1] == "tracker mlflow: lacks 3 of the run's steps; metrics.jsonl has them all"
    assert read_back("tensorboard", run) == [([(s, {REWARD: s / 4}) for s in range(3)], "")]


def test_a_tracker_that_hangs_is_waited_for_once(run: Path) -> None:
    """After one limit the run goes on at its own pace; what was held back arrives at last."""
    said: list[str] = []
    configs = [TensorBoardConfig()]
    trackers = Trackers.open(configs, folder=run, say=said.append, write_timeout_s=0.2)
    pid = process_of(trackers).pid
    os.kill(pid, signal.SIGSTOP)
    for step in range(50):
        trackers.write(StepRecord(step=step, unix_seconds=0.0, values={REWARD: step / 4}))
    assert said == [
        "tracker tensorboard: no answer for 0.2 s; the run goes on and does not wait for it"
    ]
    assert trackers.num_missed == {"tensorboard": 0}
    os.kill(pid, signal.SIGCONT)
    trackers.close()
    assert len(said) == 1
    assert [step for step, _ in read_back("tensorboard", run)[0][0]] == list(range(50))
    with pytest.raises(ValueError, match="cannot write step 50, the trackers are closed"):
        trackers.write(StepRecord(step=50, unix_seconds=0.0, values={}))


def test_a_full_disk_costs_the_steps_that_did_not_fit(run: Path) -> None:
    """The file ends with a whole event, and what fits later is there."""
    program = textwrap.dedent("""
        import pathlib, resource, sys
        from rl_metrics.jsonl import StepRecord
        from rl_metrics.trackers.sink import TrackedRun
        from rl_metrics.trackers.tensorboard import TensorBoardSink
        run = pathlib.Path(sys.argv[1])
        sink = TensorBoardSink(TrackedRun(name="a", folder=run))
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, resource.RLIM_INFINITY))
        for step, num_values in ((1, 1), (2, 50), (3, 1)):
            values = {f"a/b/{index}": 0.5 for index in range(num_values)}
            try:
                sink.write(StepRecord(step=step, unix_seconds=0.0, values=values))
            except OSError as error:
                print(step, error.strerror)
    """)
    done = subprocess.run(
        [sys.executable, "-c", program, run], check=True, capture_output=True, text=True
    )
    assert done.stdout == "2 File too large\n"
    assert read_back("tensorboard", run) == [([(1, {"a/b/0": 0.5}), (3, {"a/b/0": 0.5})], "")]


def test_nothing_is_sent_anywhere_but_where_configured(run: Path) -> None:
    """Variables that would send, rename or switch off do not reach the tracker."""
    program = textwrap.dedent("""
        import os, pathlib, sys
        from rl_metrics.trackers.sink import TrackedRun
        from rl_metrics.trackers.trackio import TrackioConfig, TrackioSink
        from rl_metrics.trackers.wandb import WandbConfig, WandbSink
        run = pathlib.Path(sys.argv[1])
        (run / "trackers").mkdir()
        tracked = TrackedRun(name="a", folder=run)
        sink = WandbSink(WandbConfig(project="quick", mode="offline"), tracked)
        sink.close()
        TrackioSink(TrackioConfig(project="quick", folder=run), tracked)
        print(*sorted(n for n in os.environ if n.startswith(("WANDB_", "TRACKIO_"))))
        print(os.environ["WANDB_ERROR_REPORTING"], os.environ["HF_HUB_OFFLINE"])
    """)
    hostile = {
        "WANDB_MODE": "online",
        "WANDB_BASE_URL": "http://127.0.0.1:9",
        "WANDB_DISABLED": "true",
        "WANDB_PROJECT": "another",
        "TRACKIO_SPACE_ID": "somebody/space",
        "TRACKIO_WEBHOOK_URL": "http://127.0.0.1:9",
        "TRACKIO_SERVER_URL": "http://127.0.0.1:9",
    }
    done = subprocess.run(
        [sys.executable, "-c", program, run],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, **hostile},
    )
    names, values = done.stdout.splitlines()[-2:]
    # what wandb itself sets while it is imported, and the two that are ours
    assert not set(names.split()) & (set(hostile))
    assert {"WANDB_ERROR_REPORTING", "TRACKIO_DIR"} <= set(names.split())
    assert values == "false 1"
    assert len(list((run / "wandb").glob("offline-run-*"))) == 1


def test_a_tracker_cannot_take_requests_for_its_own_input(run: Path) -> None:
    """A package that asks for a login, and processes that it starts, read nothing."""
    with Trackers.open([TensorBoardConfig()], folder=run, say=print) as trackers:
        stdin = Path(f"/proc/{process_of(trackers).pid}/fd/0")
        assert str(stdin.readlink()) == os.devnull


def test_mlflow_gets_every_setting_under_a_name_that_it_takes() -> None:
    """One name that it refuses would cost every step of the run."""
    settings: dict[str, str | int | float | bool] = {
        "optim.lr": 1e-6,
        "rewards.openai/gsm8k": "x",
        'engine_args."a=b"': 1,
        "engine_args._a_b_": 2,
        "../up": True,
        "k" * 300: "",
        "k" * 299: "",
    }
    assert mlflow_params(settings) == {
        "optim.lr": "1e-06",
        "rewards.openai/gsm8k": "x",
        "engine_args._a_b_": "1",
        "engine_args._a_b__2": "2",
        "___up": "True",
        "k" * 250: "",
        "k" * 242 + "_2": "",
    }


@pytest.mark.slow
def test_mlflow_takes_a_run_with_any_setting(run: Path) -> None:
    (run / "effective_config.toml").write_text('"a=b" = 1\n"../c" = 2\n"\u00e9[0]" = 3\n')
    said: list[str] = []
    with Trackers.open([config_of("mlflow", run)], folder=run, say=said.append) as trackers:
        trackers.write(StepRecord(step=1, unix_seconds=1.0, values={REWARD: 0.5}))
        assert trackers.num_missed == {"mlflow": 0}
    assert said == []


def test_settings_that_cannot_take_effect_are_refused() -> None:
    """A server while offline, online without one, and passwords in what is written down."""
    with pytest.raises(ValueError, match="cannot take effect with mode = 'offline'"):
        WandbConfig(project="a", mode="offline", server="https://wandb.example")
    with pytest.raises(ValueError, match="mode = 'online' needs server"):
        WandbConfig(project="a", mode="online")
    with pytest.raises(ValueError, match=r"WandbConfig: expected a name for project, got ''"):
        WandbConfig(project=" ", mode="offline")
    with pytest.raises(ValueError, match=r"tracking_uri: expected an address with its scheme"):
        MlflowConfig(tracking_uri="mlruns", experiment="a")
    with pytest.raises(ValueError, match="without user or password") as refused:
        MlflowConfig(tracking_uri="https://me:hidden@host", experiment="a")
    assert "hidden" not in str(refused.value)


@attrs.frozen(kw_only=True)
class RunConfig:
    """As an example would declare it."""

    trackers: tuple[TrackerConfig, ...] = ()


def test_trackers_are_configured_in_toml(tmp_path: Path) -> None:
    """An array of tables, each with its kind; what is wrong is named with its place."""
    file = tmp_path / "run.toml"
    file.write_text(
        '[[trackers]]\nkind = "tensorboard"\n'
        '[[trackers]]\nkind = "trackio"\nproject = "quick"\nfolder = "/data/trackio"\n'
        '[[trackers]]\nkind = "wandb"\nproject = "quick"\nmode = "offline"\n'
    )
    assert load_config(RunConfig, file=file).value.trackers == (
        TensorBoardConfig(),
        TrackioConfig(project="quick", folder=Path("/data/trackio")),
        WandbConfig(project="quick", mode="offline"),
    )
    file.write_text('[[trackers]]\nkind = "wandb"\nproject = "quick"\nmode = "cloud"\n')
    with pytest.raises(ConfigError, match=r"expected one of 'offline', 'online', got 'cloud'"):
        load_config(RunConfig, file=file)


def test_a_configuration_reaches_its_process_unchanged() -> None:
    """Paths and None survive the way through JSON."""
    for config in (
        TensorBoardConfig(),
        WandbConfig(project="a", mode="online", server="https://b", entity="c"),
        MlflowConfig(tracking_uri="http://a", experiment="b"),
        TrackioConfig(project="a", folder=Path("/b")),
        TrackioConfig(project="a"),
    ):
        content = json.loads(json.dumps(tracker_to_json(config)))
        assert tracker_from_json(content) == config


def test_missing_packages_and_repeated_kinds_are_refused(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both before anything starts; the extra is named."""

    def say(text: str) -> None:
        pytest.fail(text)

    twice = [TensorBoardConfig(), TensorBoardConfig()]
    with pytest.raises(ValueError, match="each kind at most once, got tensorboard again"):
        Trackers.open(twice, folder=run, say=say)
    monkeypatch.setattr("rl_metrics.trackers.config.find_spec", lambda _: None)
    with pytest.raises(ImportError, match=r"install the extra rl-metrics\[wandb\]"):
        Trackers.open([config_of("wandb", run)], folder=run, say=say)
    assert [path.name for path in run.iterdir()] == ["effective_config.toml"]


def test_no_tracker_is_nothing(run: Path) -> None:
    """A run without trackers needs no special case, and leaves no trace."""
    with Trackers.open([], folder=run, say=print) as trackers:
        trackers.write(StepRecord(step=1, unix_seconds=0.0, values={}))
    missed: Mapping[str, int] = trackers.num_missed
    assert missed == {}
    assert [path.name for path in run.iterdir()] == ["effective_config.toml"]
