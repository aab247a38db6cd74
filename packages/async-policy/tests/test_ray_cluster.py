"""Real Ray: environments, deaths, timeouts, loopback, and nothing left behind."""

import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from async_policy import Cluster, JsonValue, read_json

DRIVER = Path(__file__).with_name("ray_driver.py")
LIMIT_S = 180.0


def alive(processes: Sequence[int]) -> list[int]:
    """Those of the processes that exist and are no zombies."""
    found = []
    for process in processes:
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state not in "ZX":
            found.append(process)
    return found


def numbers(value: JsonValue) -> list[int]:
    assert isinstance(value, list)
    assert all(isinstance(number, int) for number in value)
    return value


def ray_folder(driver: int) -> Path:
    """The temporary folder of a driver's cluster; ray puts the driver's id into a name there."""
    (session,) = Path(tempfile.gettempdir()).glob(f"rl-ray-*/r/session_*_{driver}")
    return session.parent.parent


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, JsonValue]:
    """What one driver saw that used everything once."""
    folder = tmp_path_factory.mktemp("ray")
    path = folder / "report.json"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    finished = subprocess.run(
        [sys.executable, str(DRIVER), "report", str(path)],
        check=False,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=environment,
    )
    assert finished.returncode == 0, finished.stderr
    report = read_json(path)
    assert isinstance(report, Mapping)
    return {**report, "logs": sorted(entry.name for entry in (folder / "logs").iterdir())}


@pytest.fixture
def waiting_driver(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], list[int]]]:
    """A driver in the middle of its work, and the processes below it."""
    path = tmp_path / "report.json"
    with subprocess.Popen(
        [sys.executable, str(DRIVER), "wait", str(path)], stderr=subprocess.DEVNULL
    ) as driver:
        try:
            deadline = time.monotonic() + LIMIT_S
            while not path.exists() and driver.poll() is None and time.monotonic() < deadline:
                time.sleep(0.1)
            report = read_json(path)
            assert isinstance(report, Mapping)
            processes = numbers(report["processes"])
            assert len(alive(processes)) > 3
            yield driver, processes
        finally:
            driver.kill()


@pytest.mark.slow
def test_actor_sees_its_environment(seen: Mapping[str, JsonValue]) -> None:
    """An actor's own variable wins over the cluster's; the cluster's reaches every actor."""
    assert seen["actor variable"] == "red"
    assert seen["cluster variable"] == "large"
    assert seen["other actor's variable"] == "blue"


@pytest.mark.slow
def test_call_returns_and_translates(seen: Mapping[str, JsonValue]) -> None:
    """40 + 2 is 42; an error in the method names actor, method and the error."""
    assert seen["sum"] == 42
    assert (
        seen["refuse"] == "ActorMethodError: actor 'counter': refuse raised KeyError: 'no thanks'"
    )
    assert str(seen["wrong type"]).startswith("ActorMethodError: actor 'counter': add raised TypeE")


@pytest.mark.slow
def test_waits_end_with_a_name(seen: Mapping[str, JsonValue]) -> None:
    """A call without answer and an actor that never gets ready are errors that name them."""
    assert (
        seen["impatient"] == "WaitTimeoutError: waited 0.5 s for actor 'impatient' to answer wait"
    )
    assert seen["slow"] == (
        "WaitTimeoutError: waited 1 s for actors to become ready: 'slow' (1 of 1) did not"
    )
    assert (
        seen["broken"] == "ActorLostError: actor 'broken': its constructor raised OSError: no disk"
    )


@pytest.mark.slow
def test_calls_above_the_limit_wait(seen: Mapping[str, JsonValue]) -> None:
    """With one call at a time the second waits for the first to end; by default it does not."""
    assert not seen["narrow: the second call is answered beside the first"]
    assert seen["wide: the second call is answered beside the first"]


@pytest.mark.slow
def test_cancelling_the_wait_cancels_the_call(seen: Mapping[str, JsonValue]) -> None:
    """The async method in the actor got its CancelledError, so that a sampler frees its slots."""
    assert seen["cancelled in the actor"] is True


@pytest.mark.slow
def test_killed_actor_is_named_with_its_last_words(seen: Mapping[str, JsonValue]) -> None:
    """kill -9 during a call, and a call to the dead: ActorLostError with name and last lines."""
    killed = str(seen["killed"])
    assert killed.startswith("ActorLostError: actor 'counter': its process died during complain_")
    assert killed.endswith("about to be killed")
    assert str(seen["called after its death"]).startswith("ActorLostError: actor 'counter': its p")


@pytest.mark.slow
def test_failures_are_described_by_what_they_mean(seen: Mapping[str, JsonValue]) -> None:
    """Memory, environment, network, cancellation: one sentence each, with the actor's name."""
    descriptions = seen["descriptions"]
    assert isinstance(descriptions, list)
    for description, start in zip(
        descriptions,
        (
            "ray ended its process during step, since memory was short: 7 of 8 GB were used",
            "its environment could not be set up: ",
            "it cannot be reached during step: The actor None is unavailable: the network is down",
            "step failed: TaskCancelledError: ",
        ),
        strict=True,
    ):
        assert isinstance(description, str)
        assert description.startswith(f"actor 'trainer': {start}")


@pytest.mark.slow
def test_every_server_of_the_cluster_listens_on_loopback(seen: Mapping[str, JsonValue]) -> None:
    """No socket of the driver, ray or the workers accepts connections from other machines."""
    listening = seen["listening"]
    assert isinstance(listening, list)
    assert len(listening) > 3
    assert set(listening) <= {"127.0.0.1", "::ffff:7f00:1", "::1"}


@pytest.mark.slow
def test_nothing_is_left_of_the_cluster(seen: Mapping[str, JsonValue]) -> None:
    """Ray's processes, the actors and what an actor started have ended; the logs were kept."""
    processes = numbers(seen["processes"])
    assert len(processes) > 5
    assert seen["child"] in processes
    assert alive(processes) == []
    assert isinstance(seen["logs"], list)
    assert "raylet.out" in seen["logs"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_leaves_nothing_behind(
    waiting_driver: tuple[subprocess.Popen[bytes], list[int]], number: signal.Signals
) -> None:
    """Ctrl-C, a second Ctrl-C while it cleans up, or SIGTERM: every process has ended."""
    driver, processes = waiting_driver
    folder = ray_folder(driver.pid)
    driver.send_signal(number)
    time.sleep(0.3)
    driver.send_signal(signal.SIGINT)
    assert driver.wait(LIMIT_S) != 0
    assert alive(processes) == []
    assert not folder.exists()


@pytest.mark.slow
def test_killed_driver_takes_its_cluster_along(
    waiting_driver: tuple[subprocess.Popen[bytes], list[int]],
) -> None:
    """kill -9 of the driver: the guard ends its cluster and removes the private folder."""
    driver, processes = waiting_driver
    folder = ray_folder(driver.pid)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    driver.kill()
    driver.wait(LIMIT_S)
    deadline = time.monotonic() + LIMIT_S
    while (alive(processes) or folder.exists()) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert alive(processes) == []
    assert not folder.exists()


def test_ray_that_was_imported_too_early_is_refused() -> None:
    """What ray reads at import cannot be set any more: the message says what, and how."""
    script = """
import sys, types
sys.modules["ray"] = types.ModuleType("ray")
from async_policy import ClusterError, local_cluster
try:
    with local_cluster(num_cpus=1):
        pass
except ClusterError as error:
    print(error)
"""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    finished = subprocess.run(
        [sys.executable, "-c", script],
        check=True,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=environment,
    )
    assert finished.stdout == (
        "local_cluster: ray was imported before it could be told RAY_ENABLE_UV_RUN_RUNTIME_ENV=0 "
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0; enter local_cluster before anything imports ray "
        "(vllm does), or set it in the environment of this process\n"
    )


def test_actors_that_could_never_start_are_refused() -> None:
    """Ray would let an actor wait for ever for CPUs that all others hold."""
    cluster = Cluster(num_cpus=2, num_gpus=0, environment={}, log_folder=Path("logs"))
    cluster.claim("trainer", num_cpus=1.0, num_gpus=0.0)
    with pytest.raises(
        ValueError, match=r"'sampler' asks for 1\.5 CPUs, the cluster has 1 of 2 left"
    ):
        cluster.claim("sampler", num_cpus=1.5, num_gpus=0.0)
    with pytest.raises(ValueError, match="actor 'sampler' asks for 1 GPUs, the cluster has 0 of 0"):
        cluster.claim("sampler", num_cpus=1.0, num_gpus=1.0)
    with pytest.raises(ValueError, match="actor 'trainer' exists already"):
        cluster.claim("trainer", num_cpus=0.0, num_gpus=0.0)
    cluster.claim("sampler", num_cpus=1.0, num_gpus=0.0)


def test_environment_is_text() -> None:
    """A number as a variable's value is refused with the variable's name."""
    cluster = Cluster(num_cpus=2, num_gpus=0, environment={}, log_folder=Path("logs"))
    with pytest.raises(TypeError, match="expected text for OMP_NUM_THREADS, got 1; write '1'"):
        cluster.actor("trainer", environment={"OMP_NUM_THREADS": 1})  # type: ignore[dict-item]
