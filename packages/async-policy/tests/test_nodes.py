"""A Ray cluster of three nodes on this machine: environments, places, GPUs, a node that dies."""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from async_policy import Cluster, ClusterError, JsonValue, connect, read_json, reserve

DRIVER = Path(__file__).with_name("nodes_driver.py")
LIMIT_S = 300.0


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, JsonValue]:
    """What one driver saw that was connected to the cluster."""
    path = tmp_path_factory.mktemp("nodes") / "report.json"
    finished = subprocess.run(
        [sys.executable, str(DRIVER), str(path)],
        check=False,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={key: value for key, value in os.environ.items() if not key.startswith("RAY_")},
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    report = read_json(path)
    assert isinstance(report, Mapping)
    return report


def part(seen: Mapping[str, JsonValue], name: str) -> Mapping[str, JsonValue]:
    value = seen[name]
    assert isinstance(value, Mapping)
    return value


@pytest.mark.slow
def test_node_with_another_environment_is_named(seen: Mapping[str, JsonValue]) -> None:
    """Of three nodes one has a variable that the others lack; nothing else differs."""
    found = part(seen, "environments")
    assert len(found["nodes"]) == 3  # type: ignore[arg-type]
    (difference,) = [str(line) for line in found["differences"]]  # type: ignore[union-attr]
    assert re.fullmatch(
        rf"HCCL_CONNECT_TIMEOUT: '300' on {found['own']}/worker, but unset on .* and 1 other",
        difference,
    )


@pytest.mark.slow
def test_what_fails_on_a_node_names_the_node(seen: Mapping[str, JsonValue]) -> None:
    """A look at every node that raises somewhere says where."""
    assert re.fullmatch(
        r"ClusterError: node 127\.0\.0\.1/[0-9a-f]{8}: OSError: no driver for this card",
        str(part(seen, "environments")["failure"]),
    )


@pytest.mark.slow
def test_ranks_of_an_engine_are_on_one_node(seen: Mapping[str, JsonValue]) -> None:
    """Two ranks with one CPU each share a node; three would not fit on any, which is said."""
    found = part(seen, "ranks")
    together = found["together"]
    assert isinstance(together, list)
    assert len(together) == 2
    assert together[0] == together[1]
    assert str(found["too many"]).startswith(
        "ClusterError: waited 1 s for one node with 3 x 1 CPUs and 3 x 0 GPUs free for 'big engine'"
    )
    assert str(found["too many"]).count("has 2 CPUs") == 2


@pytest.mark.slow
def test_gpus_are_those_that_ray_was_told_of(seen: Mapping[str, JsonValue]) -> None:
    """Halves share one card, a whole one has the other.

    An actor without a GPU is not restricted by ray 2.60, unless it is told to be.
    """
    found = part(seen, "devices")
    assert found["half-0"] == found["half-1"]
    assert sorted([*found["half-0"], *found["whole"]]) == ["0", "1"]  # type: ignore[misc]
    assert found["unasked"] is None
    assert found["hidden"] == []


@pytest.mark.slow
def test_killed_node_is_survived(seen: Mapping[str, JsonValue]) -> None:
    """The workers of the dead node start again on the other; every prompt once and in order."""
    found = part(seen, "node dies")
    assert found["consumed"] == list(range(32))
    status = found["status"]
    assert isinstance(status, list)
    num_restarts = sum(restarts for _, restarts in status)
    assert num_restarts >= 1
    log = seen["log"]
    assert isinstance(log, list)
    replaced = [line for line in log if re.match(r"WARNING worker 'worker-\d' is replaced", line)]
    assert len(replaced) == num_restarts


def test_address_is_explicit() -> None:
    """No search for a cluster that happens to be there."""
    for address in ("auto", "local", "127.0.0.1", ":6379", "127.0.0.1:65536"):
        with (
            pytest.raises(ValueError, match=r"an address such as '127\.0\.0\.1:6379', got"),
            connect(address=address),
        ):
            pass


def test_address_where_nobody_listens_is_an_error_at_once() -> None:
    """Ray itself would wait for minutes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with (
        pytest.raises(ClusterError, match=rf"no Ray cluster listens at 127\.0\.0\.1:{port}: "),
        connect(address=f"127.0.0.1:{port}"),
    ):
        pass


@pytest.mark.parametrize(("num_ranks", "num_cpus", "num_gpus"), [(0, 1, 0), (2, 0, 0), (1, -1, 2)])
def test_a_reservation_of_nothing_is_refused(
    num_ranks: int, num_cpus: int, num_gpus: int, tmp_path: Path
) -> None:
    """Before ray is asked, which has no name for it."""
    cluster = Cluster(num_cpus=1, num_gpus=0, environment={}, log_folder=tmp_path)
    with pytest.raises(ValueError, match=r"reserve 'engine': expected at least one rank with CPUs"):
        reserve(cluster, "engine", num_ranks=num_ranks, num_cpus=num_cpus, num_gpus=num_gpus)
