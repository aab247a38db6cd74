"""Everything that this package raises beside `ValueError` and `TypeError` for a caller's mistake.

::

    AsyncPolicyError
    ├── VersionError        a sample's policy version contradicts what was published
    ├── StalledError        nobody is at work and nothing may start: waiting would never end
    ├── WaitTimeoutError    a wait ran out of time; also a TimeoutError
    ├── SamplingError       a sampling task failed; its cause is the failure
    ├── RefillError         too few groups were kept to fill a step within its bound
    ├── GroupLostError      raised *by* a `sample` function: sample this group again
    ├── WorkerPoolError     no worker is left, or one that shall join cannot serve
    ├── CheckpointError     a checkpoint folder is in use, or a state file is unreadable
    ├── ClusterError        the local Ray cluster is not what was asked for
    └── ActorError          a call to a Ray actor failed
        ├── ActorLostError      its process is gone, or cannot be reached
        └── ActorMethodError    its method raised; the cause is what it raised
"""


class AsyncPolicyError(Exception):
    """Base of this package's errors."""


class VersionError(AsyncPolicyError):
    """A sample's policy version contradicts what was published."""


class StalledError(AsyncPolicyError):
    """Nobody is at work and nothing may start, so waiting would never end."""


class WaitTimeoutError(AsyncPolicyError, TimeoutError):
    """A wait ran out of time; the message names who waited for whom, and how long."""


class SamplingError(AsyncPolicyError):
    """Sampling a group failed; ``__cause__`` is the failure."""


class RefillError(AsyncPolicyError):
    """Too few groups were kept to fill a step within its bound; the message holds the counts."""


class GroupLostError(AsyncPolicyError):
    """To be raised by a `sample` function whose group was lost and shall be sampled again."""


class WorkerPoolError(AsyncPolicyError):
    """No worker of a pool is left, or one that shall join cannot serve; the message says why."""


class CheckpointError(AsyncPolicyError):
    """A checkpoint folder is in use by another process, or a state file is unreadable."""


class ClusterError(AsyncPolicyError):
    """The local Ray cluster is not what was asked for."""


class ActorError(AsyncPolicyError):
    """A call to a Ray actor failed."""


class ActorLostError(ActorError):
    """The actor's process is gone, or cannot be reached."""


class ActorMethodError(ActorError):
    """The actor's method raised; ``__cause__`` is what it raised."""
