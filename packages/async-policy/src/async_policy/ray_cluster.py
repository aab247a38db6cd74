"""A Ray cluster of this process alone, and actors whose calls keep their types.

::

    local_cluster()  ──▶  cluster.actor(name).start(Class, ...)  ──▶  actor.call(Class.method, ...)
    ray on loopback       one process, with its environment           awaited, with a timeout
          │                        │                                         │
          │ exit, error,           │ wait_ready()                            ├ ActorLostError
          │ Ctrl-C, SIGTERM        ▼                                         ├ ActorMethodError
          ▼                 ready, or an error that names who is not         └ WaitTimeoutError
    every process of the cluster has ended, its temporary folder is gone

Ray is imported when the cluster starts, after the environment variables that it reads at import:

``RAY_ENABLE_UV_RUN_RUNTIME_ENV=0``
    Otherwise a driver started by ``uv run`` makes every worker build the project's environment
    again (ray 2.60, ``_private/worker.py``).
``RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0``
    The only way to loopback: in ray 2.60 ``ray.init(_node_ip_address="127.0.0.1")`` is replaced
    by the address of the network card, and all servers listen on every interface
    (``services.resolve_ip_for_localhost``).
``RAY_AUTH_MODE=token`` with a random ``RAY_AUTH_TOKEN``
    Otherwise ray writes a lasting token into the home folder. What the user has set is kept.
"""

import ipaddress
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from async_policy.actor_spec import Cluster, checked_environment
from async_policy.cluster_processes import (
    CLUSTER_MARK,
    END_GRACE_S,
    despite_interrupts,
    end_processes,
    guarded,
)
from async_policy.errors import ClusterError

READ_BY_ALL = {"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
READ_AT_IMPORT = {**READ_BY_ALL, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Environment variables that ray reads when it is imported, and what they must be."""

CONNECT_LIMIT_S = 10.0
"""Seconds until the head of a cluster accepts a connection."""

LOOPBACK = ("127.0.0.1", "localhost", "::1")

MAX_TEMPORARY_PREFIX = 24
"""Our folder and ray's socket names add up to 82 characters; Linux allows 107 in all."""


MAX_PORT = 65_535


@contextmanager
def local_cluster(
    *,
    num_cpus: int,
    num_gpus: int = 0,
    environment: Mapping[str, str] | None = None,
    object_store_bytes: int = 2**30,
    keep_logs_in: Path | None = None,
    scratch: Path | None = None,
) -> Iterator[Cluster]:
    """Run a Ray cluster for the body of a ``with`` statement, reachable from this machine only.

    However the body ends, by Ctrl-C and SIGTERM too, every process of the cluster has ended when
    the ``with`` statement is left, those that the actors started included. If this process is
    killed, a guard beside it does the same.

    Args:
        num_cpus: CPUs that actors may ask for in all. A number for ray's book-keeping, not a
            limit: it may be more than the machine has.
        num_gpus: GPUs that actors may ask for in all.
        environment: environment variables of every worker process.
        object_store_bytes: shared memory for objects passed between processes. Default: 1 GiB,
            twice the float32 weights of a model of 135 million parameters.
        keep_logs_in: folder to copy the logs of all processes into at the end; None keeps none.
        scratch: an existing folder that is removed with the cluster, also by the guard; for what
            the actors pass each other outside of ray.

    Raises:
        ClusterError: if ray is running already or was imported too early, listens on more than
            loopback, or a process of the cluster cannot be ended.
    """
    worker_environment = checked_environment(environment)
    _prepare_import()
    import ray  # noqa: PLC0415 -- an extra, and only now

    if ray.is_initialized():
        message = (
            "local_cluster: this process is connected to a Ray cluster already; leave it first"
        )
        raise ClusterError(message)
    mark = secrets.token_hex(8)
    base = tempfile.gettempdir()
    if len(base) > MAX_TEMPORARY_PREFIX:
        base = "/tmp"  # noqa: S108 -- mkdtemp makes a new folder there, readable by us alone
    folder = Path(tempfile.mkdtemp(prefix="rl-ray-", dir=base))
    # One level below: ray makes its own folder writable for everybody.
    ray_folder = folder / "r"
    log_folder = ray_folder / "session_latest" / "logs"

    with guarded(mark, folder, scratch=scratch) as all_done, _signal_handlers_kept():

        def clean_up() -> None:
            ray.shutdown()
            end_processes(mark, folder, grace_s=END_GRACE_S)
            if keep_logs_in is not None and log_folder.is_dir():
                shutil.copytree(log_folder, keep_logs_in, dirs_exist_ok=True)
            shutil.rmtree(folder)
            if scratch is not None:
                shutil.rmtree(scratch)
            all_done()

        try:
            os.environ[CLUSTER_MARK] = mark
            try:
                ray.init(
                    address="local",  # never a cluster that RAY_ADDRESS names
                    num_cpus=num_cpus,
                    num_gpus=num_gpus,
                    include_dashboard=False,
                    object_store_memory=object_store_bytes,
                    log_to_driver=False,
                    logging_level=logging.WARNING,
                    namespace=mark,
                    runtime_env={"env_vars": worker_environment},
                    _temp_dir=str(ray_folder),
                )
            finally:
                del os.environ[CLUSTER_MARK]
            _check_launched()
            yield Cluster(
                num_cpus=num_cpus,
                num_gpus=num_gpus,
                environment=worker_environment,
                log_folder=log_folder,
            )
        finally:
            despite_interrupts(clean_up)


@contextmanager
def connect(*, address: str, environment: Mapping[str, str] | None = None) -> Iterator[Cluster]:
    """Use a Ray cluster that runs already, for the body of a ``with`` statement.

    The actors that are started in the body end with it; the cluster stays. Its nodes may come and
    go meanwhile. What it asks for in its own environment (``RAY_AUTH_TOKEN`` and the like) must be
    in that of this process.

    Args:
        address: host and port of its head, such as ``127.0.0.1:6379``. No search, and no default:
            a run never ends up on a cluster that happens to be there.
        environment: environment variables of every worker process.

    Raises:
        ValueError: if `address` is not a host and a port.
        ClusterError: if ray is running already or was imported too early, or there is no cluster
            at this address.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) <= MAX_PORT:
        message = f"connect: expected an address such as '127.0.0.1:6379', got {address!r}"
        raise ValueError(message)
    worker_environment = checked_environment(environment)
    _check_listens(host.strip("[]"), int(port))
    _prepare_import(loopback=host in LOOPBACK, own=False)
    import ray  # noqa: PLC0415 -- an extra, and only now

    if ray.is_initialized():
        message = "connect: this process is connected to a Ray cluster already; leave it first"
        raise ClusterError(message)
    with _signal_handlers_kept():
        try:
            try:
                ray.init(
                    address=address,
                    log_to_driver=False,
                    logging_level=logging.WARNING,
                    namespace=secrets.token_hex(8),
                    runtime_env={"env_vars": worker_environment},
                )
            except (ConnectionError, RuntimeError, ValueError) as error:
                message = f"connect: no Ray cluster answers at {address}: {error}"
                raise ClusterError(message) from error
            node = ray._private.worker.global_worker.node  # noqa: SLF001
            log_folder = Path(node.get_logs_dir_path() if node else "no-logs")
            yield Cluster(
                num_cpus=0,
                num_gpus=0,
                environment=worker_environment,
                log_folder=log_folder,
                elastic=True,
            )
        finally:
            despite_interrupts(ray.shutdown)


@contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Put back the SIGTERM handler, which ray.init replaces by one that exits in good order."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


def _prepare_import(*, loopback: bool = True, own: bool = True) -> None:
    """Set what ray reads at import; refuse if that is too late.

    Args:
        loopback: whether all of the cluster is on this machine; otherwise ray must find the
            address under which the others reach it.
        own: whether the cluster is started here, and needs a token of its own.
    """
    wanted = READ_AT_IMPORT if loopback else READ_BY_ALL
    if "ray" in sys.modules:
        unset = [name for name, value in wanted.items() if os.environ.get(name) != value]
        if unset:
            settings = " ".join(f"{name}={wanted[name]}" for name in unset)
            message = (
                f"local_cluster: ray was imported before it could be told {settings}; enter "
                f"local_cluster before anything imports ray (vllm does), or set it in the "
                f"environment of this process"
            )
            raise ClusterError(message)
    os.environ.update(wanted)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if own and not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def _check_listens(host: str, port: int) -> None:
    """Refuse an address where nobody listens, on which ray waits for minutes."""
    try:
        with socket.create_connection((host, port), timeout=CONNECT_LIMIT_S):
            pass
    except OSError as error:
        message = (
            f"connect: no Ray cluster listens at {host}:{port}: {error}; give the address that "
            "`ray start --head` printed"
        )
        raise ClusterError(message) from error


def _check_launched() -> None:
    """Compare what runs with what was asked for."""
    import ray  # noqa: PLC0415 -- an extra

    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    if not ipaddress.ip_address(address).is_loopback:
        message = (
            f"local_cluster: expected ray to listen on loopback, got {address}; ray was imported "
            f"before RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 was set, or no longer reads it"
        )
        raise ClusterError(message)
    if "py_executable" in ray.get_runtime_context().runtime_env:
        message = (
            "local_cluster: ray starts workers through `uv run`; it was imported before "
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV=0 was set, or no longer reads it"
        )
        raise ClusterError(message)
