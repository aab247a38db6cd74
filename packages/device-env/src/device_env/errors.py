"""The errors of this package.

DeviceEnvError
├── DeviceNotFoundError     a device was demanded that is not there
├── VisibleDevicesError     the visible-device variables contradict each other
├── UnknownVariableError    the registry does not know this name
├── ProfileConflictError    a profile would overwrite what the user set
├── EnvFileError            a line of an environment file cannot be read
└── ScriptError             a shell script cannot be read
"""


class DeviceEnvError(Exception):
    """Base of every error that this package raises on purpose."""


class DeviceNotFoundError(DeviceEnvError, RuntimeError):
    """A kind of device was demanded, and this process does not see one."""


class VisibleDevicesError(DeviceEnvError, ValueError):
    """The variables that choose devices contradict each other or name what is not there."""


class UnknownVariableError(DeviceEnvError, ValueError):
    """The registry has no variable of this name."""


class ProfileConflictError(DeviceEnvError, ValueError):
    """A profile wants a value where the user already set another one."""


class EnvFileError(DeviceEnvError, ValueError):
    """An environment file has a line that is not an assignment."""


class ScriptError(DeviceEnvError, ValueError):
    """A shell script has syntax that a shell, or this package's reader, does not take."""
