"""Values that a process needs in its environment, each with its reason and source."""

import re
import shlex
from collections.abc import Collection, MutableMapping
from typing import final

import attrs

from device_env.device import Device, DeviceKind
from device_env.environment_snapshot import shown
from device_env.errors import ProfileConflictError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def is_name(text: str) -> bool:
    """Whether a shell takes this as the name of a variable."""
    return _NAME.fullmatch(text) is not None


@final
@attrs.frozen(kw_only=True)
class Setting:
    """One variable of a profile."""

    name: str = attrs.field()
    """The variable."""

    value: str = attrs.field()
    """What it shall be."""

    reason: str
    """Why."""

    source: str
    """Where the reason is from: a document, a file of a version, or a measurement."""

    @name.validator
    def _check_name(self, _: "attrs.Attribute[str]", name: str) -> None:
        if not is_name(name):
            raise ValueError(f"Setting: expected letters, digits and _ as a name, got {name!r}")

    @value.validator
    def _check_value(self, _: "attrs.Attribute[str]", value: str) -> None:
        if "\0" in value:
            raise ValueError(f"Setting: {self.name}: an environment cannot hold a NUL character")


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
    """What it is now."""

    reason: str
    """Why."""

    before: str | None = None
    """What it was; None when it was unset."""


def layered(name: str, *layers: Profile) -> Profile:
    """One profile out of several, from the most general to the most particular.

    A later layer's setting takes the place of an earlier one for the same variable, and says so
    in its reason.
    """
    settings: dict[str, Setting] = {}
    for layer in layers:
        for setting in layer.settings:
            below = settings.get(setting.name)
            if below is not None and below.value != setting.value:
                reason = f"{setting.reason} (instead of {below.value}: {below.reason})"
                settings[setting.name] = attrs.evolve(setting, reason=reason)
            else:
                settings[setting.name] = setting
    return Profile(name=name, settings=tuple(settings.values()))


def apply(
    profile: Profile, environ: MutableMapping[str, str], *, overwrite: Collection[str] = ()
) -> tuple[Change, ...]:
    """Set what is unset, keep what agrees, and return what changed.

    Args:
        profile: what shall be set.
        environ: the environment that is changed.
        overwrite: variables whose value may be replaced.

    Raises:
        ProfileConflictError: the user set another variable to something else; nothing is changed.
    """
    different = [
        setting
        for setting in profile.settings
        if environ.get(setting.name, setting.value) != setting.value
    ]
    conflicts = [
        f"{setting.name} is {shown(setting.name, environ[setting.name])}, the profile wants "
        f"{shown(setting.name, setting.value)} ({setting.reason})"
        for setting in different
        if setting.name not in overwrite
    ]
    if conflicts:
        raise ProfileConflictError(
            f"profile {profile.name!r} does not overwrite what is set: {'; '.join(conflicts)}; "
            "unset these variables or set them to the profile's values"
        )
    changes = tuple(
        Change(
            name=setting.name,
            value=setting.value,
            reason=setting.reason,
            before=environ.get(setting.name),
        )
        for setting in profile.settings
        if setting.name not in environ or setting in different
    )
    for change in changes:
        environ[change.name] = change.value
    return changes


def shell_lines(profile: Profile) -> str:
    """The profile as lines for a shell script, each with its reason above it."""
    lines = [_comment(profile.name)]
    for setting in profile.settings:
        lines.append(_comment(f"{setting.reason} [{setting.source}]"))
        lines.append(f"export {setting.name}={shlex.quote(setting.value)}")
    return "\n".join(lines)


def _comment(text: str) -> str:
    """One line, since what follows a line end would be a command."""
    return "# " + " ".join(text.split())


def worker_profile(device: Device, *, num_threads: int) -> Profile:
    """What each worker process of a run on this device needs in its environment.

    It must be in place before the worker starts, since OpenMP reads it once.

    Args:
        device: where the workers compute.
        num_threads: OpenMP threads per worker process.
    """
    return thread_profile(device.kind, num_threads=num_threads)


def thread_profile(kind: DeviceKind, *, num_threads: int) -> Profile:
    """Threads of each worker process on a kind of device, and how they wait."""
    if num_threads < 1:
        raise ValueError(f"expected num_threads of at least 1, got {num_threads}")
    threads = Setting(
        name="OMP_NUM_THREADS",
        value=str(num_threads),
        reason="without it every worker process starts one thread per core of the host",
        source="OpenMP specification 5.2, section 21.1.2",
    )
    if kind != "cpu":
        return Profile(name=f"{kind} worker", settings=(threads,))
    return Profile(
        name="cpu worker",
        settings=(
            threads,
            Setting(
                name="OMP_WAIT_POLICY",
                value="passive",
                reason="spinning threads take the cores that other workers compute on: "
                "5 to 10 times slower with two threads on two shared cores",
                source="measured with torch 2.13 and two processes",
            ),
            Setting(
                name="GOMP_SPINCOUNT",
                value="0",
                reason="the same for GNU OpenMP, which torch's wheels use",
                source="GCC libgomp manual, GOMP_SPINCOUNT",
            ),
            Setting(
                name="VLLM_CPU_OMP_THREADS_BIND",
                value="nobind",
                reason="by default every engine process of a host binds to the same cores",
                source="vllm 0.32.0, vllm/utils/ompmultiprocessing.py",
            ),
        ),
    )


def worker_environment(device: Device, *, num_threads: int) -> dict[str, str]:
    """The variables of `worker_profile`, for Ray's `runtime_env` or a subprocess."""
    return worker_profile(device, num_threads=num_threads).as_dict()
