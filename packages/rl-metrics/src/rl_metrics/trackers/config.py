"""The trackers that can be configured, told apart by ``kind``."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec

import attrs

from rl_metrics.trackers.mlflow import MlflowConfig
from rl_metrics.trackers.tensorboard import TensorBoardConfig
from rl_metrics.trackers.trackio import TrackioConfig
from rl_metrics.trackers.wandb import WandbConfig

TrackerConfig = TensorBoardConfig | WandbConfig | MlflowConfig | TrackioConfig
"""Any tracker; a field of type ``tuple[TrackerConfig, ...]`` holds those of a run."""

_CLASSES: dict[str, type[TrackerConfig]] = {
    "tensorboard": TensorBoardConfig,
    "wandb": WandbConfig,
    "mlflow": MlflowConfig,
    "trackio": TrackioConfig,
}


def check_trackers(configs: Sequence[TrackerConfig]) -> None:
    """Refuse two trackers of one kind, and one whose package is missing.

    Raises:
        ValueError: for the former.
        ImportError: for the latter; names the extra.
    """
    kinds = [config.kind for config in configs]
    twice = sorted({kind for kind in kinds if kinds.count(kind) > 1})
    if twice:
        message = f"trackers: expected each kind at most once, got {', '.join(twice)} again"
        raise ValueError(message)
    for kind in kinds:  # a tracker's package is named as its kind
        if find_spec(kind) is None:
            message = (
                f"tracker {kind}: its package is missing; install the extra rl-metrics[{kind}]"
            )
            raise ImportError(message)


def tracker_to_json(config: TrackerConfig) -> dict[str, str | None]:
    """A configuration as JSON holds it."""
    values = {
        name: None if value is None else str(value) for name, value in attrs.asdict(config).items()
    }
    return {"kind": config.kind, **values}


def tracker_from_json(content: Mapping[str, str | None]) -> TrackerConfig:
    """What `tracker_to_json` was given."""
    values = dict(content)
    owner = _CLASSES[str(values.pop("kind"))]
    return owner(**values)  # type: ignore[arg-type]  # the names and types that asdict gave
