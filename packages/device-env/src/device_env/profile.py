"""Values that a process needs in its environment, each with its reason."""

from collections.abc import MutableMapping
from typing import final

import attrs

from device_env.device import Device
from device_env.errors import ProfileConflictError


@final
@attrs.frozen(kw_only=True)
class Setting:
    """One variable of a profile."""

    name: str
    """The variable."""

    value: str
    """What it shall be."""

    reason: str
    """Why."""


@final
@attrs.frozen(kw_only=True)
class Profile:
    """A named list of settings."""

    name: str
    """What the profile is for."""

    settings: tuple[Setting, ...]
    """Each variable once."""

    def __attrs_post_init__(self) -> None:
        """Refuse a profile that sets a variable twice."""
        names = [setting.name for setting in self.settings]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"profile {self.name!r} sets {', '.join(twice)} more than once")

    def as_dict(self) -> dict[str, str]:
        """The variables, without the reasons."""
        return {setting.name: setting.value for setting in self.settings}


@final
@attrs.frozen(kw_only=True)
class Change:
    """A variable that `apply` set."""

    name: str
    """The variable."""

    value: str
    """What it is now; it was unset before."""

    reason: str
    """Why."""


def apply(profile: Profile, environ: MutableMapping[str, str]) -> tuple[Change, ...]:
    """Set what is unset, keep what agrees, and return what changed.

    Raises:
        ProfileConflictError: the user set a variable to something else; nothing is changed.
    """
    conflicts = [
        f"{setting.name} is {environ[setting.name]!r}, the profile wants {setting.value!r} "
        f"({setting.reason})"
        for setting in profile.settings
        if environ.get(setting.name, setting.value) != setting.value
    ]
    if conflicts:
        raise ProfileConflictError(
            f"profile {profile.name!r} does not overwrite what is set: {'; '.join(conflicts)}; "
            "unset these variables or set them to the profile's values"
        )
    changes = tuple(
        Change(name=setting.name, value=setting.value, reason=setting.reason)
        for setting in profile.settings
        if setting.name not in environ
    )
    for change in changes:
        environ[change.name] = change.value
    return changes


def worker_profile(device: Device, *, num_threads: int) -> Profile:
    """What each worker process of a run on this device needs in its environment.

    It must be in place before the worker starts, since OpenMP reads it once.

    Args:
        device: where the workers compute.
        num_threads: OpenMP threads per worker process.
    """
    if num_threads < 1:
        raise ValueError(f"expected num_threads of at least 1, got {num_threads}")
    threads = Setting(
        name="OMP_NUM_THREADS",
        value=str(num_threads),
        reason="without it every worker process starts one thread per core of the host",
    )
    if device.kind != "cpu":
        return Profile(name=f"{device.kind} worker", settings=(threads,))
    return Profile(
        name="cpu worker",
        settings=(
            threads,
            Setting(
                name="OMP_WAIT_POLICY",
                value="passive",
                reason="spinning threads take the cores that other workers compute on: "
                "5 to 10 times slower with two threads on two shared cores",
            ),
            Setting(
                name="GOMP_SPINCOUNT",
                value="0",
                reason="the same for GNU OpenMP, which torch's wheels use",
            ),
            Setting(
                name="VLLM_CPU_OMP_THREADS_BIND",
                value="nobind",
                reason="by default every engine process of a host binds to the same cores",
            ),
        ),
    )


def worker_environment(device: Device, *, num_threads: int) -> dict[str, str]:
    """The variables of `worker_profile`, for Ray's `runtime_env` or a subprocess."""
    return worker_profile(device, num_threads=num_threads).as_dict()
