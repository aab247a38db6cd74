"""Actors whose calls keep their types: a name, a class, and errors that say what happened."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Concatenate, Generic, ParamSpec, Protocol, TypeVar, cast, final, overload

from async_policy.errors import ActorError, ActorLostError, ActorMethodError, WaitTimeoutError

ActorT_co = TypeVar("ActorT_co", covariant=True)
R = TypeVar("R")
P = ParamSpec("P")

MAX_LOG_LINES = 20
"""Last lines of a dead actor's standard error that a message quotes."""

RAY_HEADERS = (":job_id:", ":actor_name:", ":task_name:")


class _RemoteMethod(Protocol):
    """What ray makes of an actor's method."""

    def remote(self, *args: object, **kwargs: object) -> Awaitable[object]:
        """Submit the call."""


@final
class Actor(Generic[ActorT_co]):
    """A running object of class `ActorT_co` in a process of its own. Made by `ActorSpec.start`."""

    def __init__(
        self,
        name: str,
        cls: type,
        handle: object,
        *,
        call_timeout_s: float,
        log_folder: Path,
        release: Callable[[], None],
    ) -> None:
        """Wrap ray's handle; `release` frees the name and the resources."""
        self.name = name
        self._cls = cls
        self._handle = handle
        self._call_timeout_s = call_timeout_s
        self._log_folder = log_folder
        self._release = release
        self._stopped = False

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

    def stop(self) -> None:
        """End the actor's process, whatever it is doing. Safe to call again.

        Calls under way fail with `ActorLostError`; its name and its resources are free again.
        """
        import ray  # noqa: PLC0415 -- an extra

        if not self._stopped:
            self._stopped = True
            ray.kill(self._handle)  # type: ignore[arg-type]
            self._release()

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
        text = path.read_text(encoding="utf-8", errors="replace")
        # ray's own headers, such as ":job_id:01000000", say nothing
        lines = [line for line in text.splitlines() if not line.startswith(RAY_HEADERS)]
        if lines:
            return "\nits last lines:\n" + "\n".join(lines[-MAX_LOG_LINES:])
    return ""
