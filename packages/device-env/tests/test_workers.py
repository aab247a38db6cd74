"""The environment of workers: how it gets there, and whether it is the same everywhere."""

import ast
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from device_env import WorkerEnvironment, collect, compare, runtime_env
from device_env.packages import providers_of
from device_env.workers import _COPIED_PREFIXES


def on(node: str, worker: str, **variables: str) -> WorkerEnvironment:
    """A worker with these variables."""
    return collect(variables, worker=worker, node=node)


def test_the_node_and_the_variable_that_differ_are_named() -> None:
    """Silent failure 23: a variable that did not reach one node is named, with that node."""
    (found,) = compare(
        [
            on("a", "trainer-0", HCCL_BUFFSIZE="200", OMP_NUM_THREADS="1"),
            on("a", "trainer-1", HCCL_BUFFSIZE="200", OMP_NUM_THREADS="1"),
            on("b", "rollout-0", OMP_NUM_THREADS="1"),
        ]
    )
    assert str(found) == (
        "HCCL_BUFFSIZE: unset on b/rollout-0, but '200' on a/trainer-0 and 1 other"
    )


def test_what_differs_by_its_meaning_is_no_difference() -> None:
    """Ranks and visible devices are different on every worker, and secrets are not compared."""
    workers = [
        on("a", name, RANK=name, CUDA_VISIBLE_DEVICES=name, HF_TOKEN=name) for name in ("0", "1")
    ]
    assert compare(workers) == ()
    assert [found.variable for found in compare(workers, ignore=())] == [
        "CUDA_VISIBLE_DEVICES",
        "RANK",
    ]


def test_a_worker_is_on_this_host_unless_told_otherwise() -> None:
    """The node is the host name."""
    assert collect({}, worker="w").node == os.uname().nodename


def test_what_vllm_would_not_copy_is_named_for_it() -> None:
    """vLLM copies NCCL_* and its own names to Ray workers; the rest is named, once."""
    variables = {"HCCL_BUFFSIZE": "200", "NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "1"}
    assert runtime_env(variables) == {
        "env_vars": {
            **variables,
            "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY": "HCCL_BUFFSIZE,OMP_NUM_THREADS",
        }
    }
    more = runtime_env({"VLLM_RAY_EXTRA_ENV_VARS_TO_COPY": "A, B", "A": "1"})
    assert more["env_vars"]["VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"] == "A,B"
    assert runtime_env({"NCCL_DEBUG": "INFO"}) == {"env_vars": {"NCCL_DEBUG": "INFO"}}


def test_devices_are_not_given_to_all_workers_alike() -> None:
    """Ray chooses devices for each worker, so a list for all of them is refused."""
    with pytest.raises(ValueError, match=r"ASCEND_RT_VISIBLE_DEVICES would give every worker"):
        runtime_env({"ASCEND_RT_VISIBLE_DEVICES": "0,1"})


def test_the_prefixes_that_vllm_copies_are_those_of_the_installed_one() -> None:
    """The list that `runtime_env` relies on is the one in vllm/ray/ray_env.py."""
    (provider,) = providers_of("vllm")
    file = Path(str(metadata.distribution(provider).locate_file("vllm/ray/ray_env.py")))
    (value,) = [
        node.value
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.AnnAssign)
        and ast.unparse(node.target) == "DEFAULT_ENV_VAR_PREFIXES"
        and node.value is not None
    ]
    assert ast.literal_eval(value) == set(_COPIED_PREFIXES)


@pytest.mark.slow
def test_real_ray_workers_get_what_they_shall_and_the_odd_one_is_named() -> None:
    """Variables reach Ray workers and the processes that these start; the odd worker is found.

    Each worker sees the one GPU that Ray chose for it (case A40 under Ray actors).
    """
    hidden = {"CUDA_VISIBLE_DEVICES", "HCCL_CONNECT_TIMEOUT"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "ray_workers.py")],
        env={
            name: value
            for name, value in os.environ.items()
            if name not in hidden and not name.startswith("RAY_")
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["differences"] == [
        "HCCL_CONNECT_TIMEOUT: '300' on node-2/worker-2, but '1500' on node-0/worker-0 and 1 other"
    ]
    assert answer["child"] == "1500"
    assert answer["driver"] is None
    assert {tuple(ids) for ids in answer["devices"]} == {("0",), ("1",)}
    assert all(one["variables"]["VLLM_ASCEND_ENABLE_NZ"] == "0" for one in answer["reports"])
