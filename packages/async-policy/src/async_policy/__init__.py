"""Policy versions, staleness and admission: asynchronous RL that loses nothing.

Loads neither torch nor ray; `local_cluster` imports ray when it starts.
"""

from async_policy.actor_spec import ActorSpec, Cluster, Node
from async_policy.batch import Activity, Batch
from async_policy.checkpoints import Checkpoint, CheckpointStore, KeepBest
from async_policy.errors import (
    ActorError,
    ActorLostError,
    ActorMethodError,
    AsyncPolicyError,
    CheckpointError,
    ClusterError,
    GroupLostError,
    RefillError,
    SamplingError,
    StalledError,
    VersionError,
    WaitTimeoutError,
    WorkerPoolError,
)
from async_policy.json_files import JsonValue, read_json, write_json
from async_policy.pipeline import Rollouts, Timeouts
from async_policy.placement import Reservation, reserve
from async_policy.pool_limits import PoolLimits, WorkerStatus
from async_policy.ray_actor import Actor, describe_failure, wait_ready
from async_policy.ray_cluster import connect, local_cluster
from async_policy.schedule import (
    ConsumptionOrder,
    ReadyGroup,
    Refill,
    SchedulerConfig,
    Ticket,
)
from async_policy.scheduler import Scheduler
from async_policy.verl_settings import VerlAsyncSettings, VerlTranslation, from_verl
from async_policy.worker_pool import WorkerPool

__all__ = [
    "Activity",
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
    "KeepBest",
    "Node",
    "PoolLimits",
    "ReadyGroup",
    "Refill",
    "RefillError",
    "Reservation",
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
    "WorkerPool",
    "WorkerPoolError",
    "WorkerStatus",
    "connect",
    "describe_failure",
    "from_verl",
    "local_cluster",
    "read_json",
    "reserve",
    "wait_ready",
    "write_json",
]
