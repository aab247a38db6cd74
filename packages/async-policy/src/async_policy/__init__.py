"""Policy versions, staleness and admission: asynchronous RL that loses nothing.

Loads neither torch nor ray; `local_cluster` imports ray when it starts.
"""

from async_policy.checkpoints import Checkpoint, CheckpointStore
from async_policy.errors import (
    ActorError,
    ActorLostError,
    ActorMethodError,
    AsyncPolicyError,
    CheckpointError,
    ClusterError,
    GroupLostError,
    SamplingError,
    StalledError,
    VersionError,
    WaitTimeoutError,
)
from async_policy.json_files import JsonValue, read_json, write_json
from async_policy.pipeline import Batch, Rollouts, Timeouts
from async_policy.ray_cluster import (
    Actor,
    ActorSpec,
    Cluster,
    describe_failure,
    local_cluster,
    wait_ready,
)
from async_policy.scheduler import (
    ConsumptionOrder,
    ReadyGroup,
    Scheduler,
    SchedulerConfig,
    Ticket,
)
from async_policy.verl_settings import VerlAsyncSettings, VerlTranslation, from_verl

__all__ = [
    "Actor",
    "ActorError",
    "ActorLostError",
    "ActorMethodError",
    "ActorSpec",
    "AsyncPolicyError",
    "Batch",
    "Checkpoint",
    "CheckpointError",
    "CheckpointStore",
    "Cluster",
    "ClusterError",
    "ConsumptionOrder",
    "GroupLostError",
    "JsonValue",
    "ReadyGroup",
    "Rollouts",
    "SamplingError",
    "Scheduler",
    "SchedulerConfig",
    "StalledError",
    "Ticket",
    "Timeouts",
    "VerlAsyncSettings",
    "VerlTranslation",
    "VersionError",
    "WaitTimeoutError",
    "describe_failure",
    "from_verl",
    "local_cluster",
    "read_json",
    "wait_ready",
    "write_json",
]
