"""What code in a sandbox may use, what it did, and why it could not be run."""

from dataclasses import dataclass
from typing import Literal

import attrs

_MIB = 2**20

Ended = Literal["itself", "wall_time", "output"]


class SandboxUnavailableError(RuntimeError):
    """This machine cannot close a sandbox; the message names what is missing."""


class SandboxFailedError(RuntimeError):
    """A sandbox could not be started this time, although the machine can have them."""


@attrs.frozen(kw_only=True)
class SandboxLimits:
    """What code may use. At most `max_processes` times `memory_bytes`, plus `folder_bytes`."""

    wall_s: float = attrs.field(
        default=10.0, validator=[attrs.validators.gt(0.0), attrs.validators.le(86_400.0)]
    )
    """Seconds from the start of Python to the end of everything. Default: that of verl's
    ``prime_code.check_correctness``, which has them for all test cases together."""

    cpu_s: int = attrs.field(default=10, validator=attrs.validators.ge(1))
    """Seconds of CPU time for each process, all its threads together."""

    memory_bytes: int = attrs.field(default=512 * _MIB, validator=attrs.validators.ge(64 * _MIB))
    """Address space of each process, in bytes; Python itself needs about 30 MiB."""

    max_processes: int = attrs.field(default=4, validator=attrs.validators.ge(1))
    """Processes and threads at the same time, the first included."""

    folder_bytes: int = attrs.field(default=16 * _MIB, validator=attrs.validators.ge(_MIB))
    """Size of the folder in which the code may write, in bytes; it counts as memory."""

    max_output_bytes: int = attrs.field(default=_MIB, validator=attrs.validators.ge(1))
    """Bytes of standard output; more ends the code."""

    max_open_files: int = attrs.field(default=64, validator=attrs.validators.ge(8))
    """Open files of each process."""

    def __attrs_post_init__(self) -> None:
        """Refuse a CPU limit that the wall clock always beats."""
        if self.cpu_s > self.wall_s * self.max_processes:
            message = (
                f"SandboxLimits: cpu_s = {self.cpu_s} can never be reached within wall_s = "
                f"{self.wall_s} by {self.max_processes} processes or threads; lower cpu_s"
            )
            raise ValueError(message)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramResult:
    """What a program did."""

    output: bytes
    """Its standard output, up to the limit."""

    ended: Ended
    """Whether it ended, or which limit it was killed for."""

    exit_code: int
    """0 to 255; 128 and the signal's number if a signal ended it (152: CPU time)."""
