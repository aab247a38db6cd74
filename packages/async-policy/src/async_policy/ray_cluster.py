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

import asyncio
import ipaddress
import logging
import os
import re
import secrets
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Concatenate, Generic, ParamSpec, Protocol, TypeVar, cast, final, overload

from async_policy.cluster_processes import (
    CLUSTER_MARK,
    END_GRACE_S,
    end_processes,
    guarded,
    interrupts_ignored,
)
from async_policy.errors import (
    ActorError,
    ActorLostError,
    ActorMethodError,
    ClusterError,
    WaitTimeoutError,
)

T = TypeVar("T")
ActorT_co = TypeVar("ActorT_co", covariant=True)
R = TypeVar("R")
P = ParamSpec("P")

READ_AT_IMPORT = {
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}
"""Environment variables that ray reads when it is imported, and what they must be."""

MAX_TEMPORARY_PREFIX = 24
"""Our folder and ray's socket names add up to 82 characters; Linux allows 107 in all."""

MAX_LOG_LINES = 20
"""Last lines of a dead actor's standard error that a message quotes."""


class _RemoteMethod(Protocol):
    """What ray makes of an actor's method."""

    def remote(self, *args: object, **kwargs: object) -> Awaitable[object]:
        """Submit the call."""


@final
class Actor(Generic[ActorT_co]):
    """A running object of class `ActorT_co` in a process of its own. Made by `ActorSpec.start`."""

    def __init__(
        self, name: str, cls: type, handle: object, *, call_timeout_s: float, log_folder: Path
    ) -> None:
        """Wrap ray's handle."""
        self.name = name
        self._cls = cls
        self._handle = handle
        self._call_timeout_s = call_timeout_s
        self._log_folder = log_folder

    @overload
    async def call(
        self,
        method: Callable[Concatenate[ActorT_co, P], Awaitable[R]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R: ...
    @overload
    async def call(
        self, method: Callable[Concatenate[ActorT_co, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R: ...
    async def call(
        self, method: Callable[Concatenate[ActorT_co, P], object], *args: P.args, **kwargs: P.kwargs
    ) -> object:
        """Call a method of the actor, and wait for what it returns.

        Write ``await trainer.call(Trainer.step, batch)``: arguments and result are checked
        against the method. Cancelling the awaiting task cancels the call in the actor, if the
        method is ``async``.

        Raises:
            TypeError: if `method` is not a method of the actor's class.
            ActorLostError: if the actor's process is gone or cannot be reached.
            ActorMethodError: if the method raised.
            WaitTimeoutError: if there is no answer within `call_timeout_s`.
        """
        name = getattr(method, "__name__", repr(method))
        if not callable(getattr(self._cls, name, None)):
            message = (
                f"call: expected a method of {self._cls.__name__}, the class of actor "
                f"'{self.name}', got {method!r}"
            )
            raise TypeError(message)
        return await self._call(name, args, kwargs, self._call_timeout_s)

    async def ready(self, *, timeout_s: float | None) -> None:
        """Wait until the actor's constructor has returned.

        Args:
            timeout_s: seconds to wait; None for a caller that has a limit of its own.

        Raises:
            ActorLostError: if it raised, or its process died; the message holds why.
            WaitTimeoutError: if it takes longer than `timeout_s`.
        """
        await self._call("__ray_ready__", (), {}, timeout_s)

    async def _call(
        self,
        name: str,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        timeout_s: float | None,
    ) -> object:
        import ray  # noqa: PLC0415 -- an extra
        from ray.exceptions import RayError  # noqa: PLC0415

        method = cast("_RemoteMethod", getattr(self._handle, name))
        reference = method.remote(*args, **kwargs)
        what = "to become ready" if name == "__ray_ready__" else f"to answer {name}"
        try:
            async with asyncio.timeout(timeout_s):
                return await reference
        except RayError as error:
            raise self._translate(error, name) from error
        except TimeoutError:
            ray.cancel(reference)
            message = f"waited {timeout_s} s for actor '{self.name}' {what}"
            raise WaitTimeoutError(message) from None
        except asyncio.CancelledError:
            ray.cancel(reference)
            raise

    def _translate(self, error: Exception, name: str) -> ActorError:
        from ray.exceptions import RayTaskError  # noqa: PLC0415 -- an extra

        message = describe_failure(error, actor=self.name, method=name)
        if isinstance(error, RayTaskError):
            return ActorMethodError(message)
        return ActorLostError(message + _log_tail(self._log_folder, str(error)))


async def wait_ready(actors: Sequence[Actor[object]], *, timeout_s: float) -> None:
    """Wait until the constructors of all actors have returned.

    Raises:
        ActorLostError: as soon as one of them raised or died; names it, with the reason.
        WaitTimeoutError: if it takes longer than `timeout_s`; names every actor that is not ready.
    """
    tasks = {asyncio.create_task(actor.ready(timeout_s=None)): actor.name for actor in actors}
    if not tasks:
        return
    try:
        done, late = await asyncio.wait(
            tasks, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION
        )
        for task in done:
            task.result()
        if late:
            names = ", ".join(sorted(f"'{tasks[task]}'" for task in late))
            message = (
                f"waited {timeout_s:g} s for actors to become ready: {names} "
                f"({len(late)} of {len(actors)}) did not"
            )
            raise WaitTimeoutError(message)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@final
class ActorSpec:
    """Name, resources and environment of an actor that is about to start."""

    def __init__(
        self,
        cluster: "Cluster",
        name: str,
        *,
        num_cpus: float,
        num_gpus: float,
        environment: Mapping[str, str],
        call_timeout_s: float,
    ) -> None:
        """Made by `Cluster.actor`."""
        self._cluster = cluster
        self._name = name
        self._num_cpus = num_cpus
        self._num_gpus = num_gpus
        self._environment = environment
        self._call_timeout_s = call_timeout_s

    def start(self, cls: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Actor[T]:
        """Build ``cls(*args, **kwargs)`` in a process of its own.

        Returns at once; `wait_ready` waits for the constructor. The class reaches the process
        under its module's name, or by value if it stands in the script that was started.

        Raises:
            TypeError: if `cls` is not a class.
            ValueError: if the name is taken, or the cluster has not enough CPUs or GPUs left:
                ray would let the actor wait for ever.
        """
        import ray  # noqa: PLC0415 -- an extra

        if not isinstance(cls, type):
            message = f"start: expected a class for actor '{self._name}', got {cls!r}"
            raise TypeError(message)
        self._cluster.claim(self._name, num_cpus=self._num_cpus, num_gpus=self._num_gpus)
        handle: object = (
            ray.remote(cls)
            .options(
                name=self._name,
                num_cpus=self._num_cpus,
                num_gpus=self._num_gpus,
                runtime_env={"env_vars": {**self._cluster.environment, **self._environment}},
            )
            .remote(*args, **kwargs)
        )
        return Actor(
            self._name,
            cls,
            handle,
            call_timeout_s=self._call_timeout_s,
            log_folder=self._cluster.log_folder,
        )


@final
class Cluster:
    """The running cluster. Made by `local_cluster`."""

    def __init__(
        self, *, num_cpus: int, num_gpus: int, environment: Mapping[str, str], log_folder: Path
    ) -> None:
        """Describe what `ray.init` was given."""
        self.environment = dict(environment)
        self.log_folder = log_folder
        self._total = {"CPUs": float(num_cpus), "GPUs": float(num_gpus)}
        self._claims: dict[str, dict[str, float]] = {}

    def actor(
        self,
        name: str,
        *,
        num_cpus: float = 1.0,
        num_gpus: float = 0.0,
        environment: Mapping[str, str] | None = None,
        call_timeout_s: float = 600.0,
    ) -> ActorSpec:
        """Say how an actor shall run; `ActorSpec.start` starts it.

        Args:
            name: names the actor in every message; unique in the cluster.
            num_cpus: CPUs that ray sets aside for it. Unless the environment says otherwise, ray
                sets ``OMP_NUM_THREADS`` to this number.
            num_gpus: GPUs that ray sets aside for it and makes visible to it.
            environment: environment variables, beside and above those of the cluster.
            call_timeout_s: seconds that a call may take.
        """
        return ActorSpec(
            self,
            name,
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            environment=_checked_environment(environment),
            call_timeout_s=call_timeout_s,
        )

    def claim(self, name: str, *, num_cpus: float, num_gpus: float) -> None:
        """Set resources aside for an actor.

        Raises:
            ValueError: if the name is taken, or there is not enough left.
        """
        if name in self._claims:
            message = f"actor '{name}' exists already; names are unique in a cluster"
            raise ValueError(message)
        wanted = {"CPUs": num_cpus, "GPUs": num_gpus}
        for kind, amount in wanted.items():
            left = self._total[kind] - sum(claim[kind] for claim in self._claims.values())
            if amount > left:
                message = (
                    f"actor '{name}' asks for {amount:g} {kind}, the cluster has {left:g} of "
                    f"{self._total[kind]:g} left; ask for less, or give local_cluster more"
                )
                raise ValueError(message)
        self._claims[name] = wanted


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
    worker_environment = _checked_environment(environment)
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
    with guarded(mark, folder, scratch=scratch), _signal_handlers_kept():
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
            with interrupts_ignored():
                ray.shutdown()
                end_processes(mark, folder, grace_s=END_GRACE_S)
                if keep_logs_in is not None and log_folder.is_dir():
                    shutil.copytree(log_folder, keep_logs_in, dirs_exist_ok=True)
                shutil.rmtree(folder)
                if scratch is not None:
                    shutil.rmtree(scratch)


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


def describe_failure(error: BaseException, *, actor: str, method: str) -> str:
    """One sentence on what ray's error means for the actor and the call.

    Args:
        error: what ray raised.
        actor: name of the actor.
        method: name of the method; ``__ray_ready__`` stands for the constructor.
    """
    from ray import exceptions  # noqa: PLC0415 -- an extra

    call = "its constructor" if method == "__ray_ready__" else method
    text = str(error)
    match error:
        case exceptions.RayTaskError(cause=cause):
            what = f"{call} raised {type(cause).__name__}: {cause}"
        case exceptions.RayActorError() if error.actor_init_failed:
            what = f"its constructor raised {_last_line(text)}"
        case exceptions.ActorUnavailableError():
            what = f"it cannot be reached during {call}: {_last_line(text)}"
        case exceptions.RayActorError() | exceptions.WorkerCrashedError():
            what = f"its process died during {call}; {_exit_detail(text)}"
        case exceptions.OutOfMemoryError():
            what = f"ray ended its process during {call}, since memory was short: {text}"
        case exceptions.RuntimeEnvSetupError():
            what = f"its environment could not be set up: {text}"
        case _:
            what = f"{call} failed: {type(error).__name__}: {text}"
    return f"actor '{actor}': {what}"


def _checked_environment(environment: Mapping[str, str] | None) -> dict[str, str]:
    """A copy; environment variables are text, and ray's message on others names no variable."""
    checked = dict(environment or {})
    for name, value in checked.items():
        if not isinstance(value, str):
            message = f"environment: expected text for {name}, got {value!r}; write '{value}'"
            raise TypeError(message)
    return checked


def _prepare_import() -> None:
    """Set what ray reads at import; refuse if that is too late."""
    if "ray" in sys.modules:
        unset = [name for name, value in READ_AT_IMPORT.items() if os.environ.get(name) != value]
        if unset:
            wanted = " ".join(f"{name}={READ_AT_IMPORT[name]}" for name in unset)
            message = (
                f"local_cluster: ray was imported before it could be told {wanted}; enter "
                f"local_cluster before anything imports ray (vllm does), or set it in the "
                f"environment of this process"
            )
            raise ClusterError(message)
    os.environ.update(READ_AT_IMPORT)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


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


def _last_line(text: str) -> str:
    """The line of a message that says most: the last one that is not blank."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), text)


def _exit_detail(text: str) -> str:
    """Ray's reason for a death, without its list of common causes."""
    detail = re.search(r"Worker exit type: (.*?)(?= Some common causes|$)", text, re.MULTILINE)
    return detail[1] if detail else _last_line(text)


def _log_tail(log_folder: Path, text: str) -> str:
    """The last lines that a dead actor wrote to its standard error, if it wrote any."""
    process = re.search(r"pid: (\d+)", text)
    if process is None:
        return ""
    for path in log_folder.glob(f"worker-*-{process[1]}.err"):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        if lines:
            return "\nits last lines:\n" + "\n".join(lines[-MAX_LOG_LINES:])
    return ""
