"""MLflow, on a server or in a folder. Needs the extra ``rl-metrics[mlflow]``.

A resumed run is a new MLflow run that holds every step from the first on, and the one before is
tagged with its id: MLflow has no way to take back the steps after a checkpoint, which come again.
"""

import contextlib
import os
import posixpath
import re
from collections.abc import Mapping
from typing import ClassVar, Literal, final

import attrs

from rl_metrics.atomic import write_atomically
from rl_metrics.effective import SettingValue
from rl_metrics.jsonl import StepRecord
from rl_metrics.trackers.sink import TrackedRun
from rl_metrics.trackers.validators import address_validator, filled_validator

_PARAMS_PER_CALL = 100
_PARAM_CHARACTERS = 6000
_NAME_CHARACTERS = 250
"""MLflow's own limits, for one call, one value and one name."""


@final
@attrs.frozen(kw_only=True)
class MlflowConfig:
    """An MLflow run. Who you are is MLflow's own affair: ``MLFLOW_TRACKING_USERNAME`` and so on."""

    kind: ClassVar[Literal["mlflow"]] = "mlflow"

    tracking_uri: str = attrs.field(validator=address_validator)
    """Address of a server, or ``file:///...``. ``sqlite:///...`` needs the whole of mlflow."""

    experiment: str = attrs.field(validator=filled_validator)
    """Experiment that the run belongs to; made if it is missing."""


@final
class MlflowSink:
    """One MLflow run; changes the environment, and therefore wants a process of its own."""

    def __init__(self, config: MlflowConfig, run: TrackedRun) -> None:
        os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
        os.environ["DO_NOT_TRACK"] = "true"
        if config.tracking_uri.startswith("file:"):
            # mlflow 3 wants to be told that a folder is meant
            os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"

        from mlflow.entities import Param  # noqa: PLC0415 - an extra
        from mlflow.exceptions import MlflowException  # noqa: PLC0415 - an extra
        from mlflow.tracking import MlflowClient  # noqa: PLC0415 - an extra

        self._client = MlflowClient(tracking_uri=config.tracking_uri)
        experiment = self._client.get_experiment_by_name(config.experiment)
        experiment_id = (
            self._client.create_experiment(config.experiment)
            if experiment is None
            else experiment.experiment_id
        )
        id_file = run.folder / "trackers" / "mlflow_run_id"
        earlier = id_file.read_text(encoding="utf-8") if run.is_resumed and id_file.exists() else ""
        tags = {"rl_metrics.folder": str(run.folder)}
        if earlier:
            tags["rl_metrics.replaces"] = earlier
        created = self._client.create_run(experiment_id, run_name=run.name, tags=tags)
        self._run_id = created.info.run_id
        write_atomically(id_file, self._run_id.encode())
        if earlier:
            with contextlib.suppress(MlflowException):  # somebody may have deleted it
                self._client.set_tag(earlier, "rl_metrics.replaced_by", self._run_id)
                self._client.set_terminated(earlier, status="KILLED")
        params = [
            Param(name, value[:_PARAM_CHARACTERS])
            for name, value in mlflow_params(run.settings).items()
        ]
        try:
            for start in range(0, len(params), _PARAMS_PER_CALL):
                self._client.log_batch(
                    self._run_id, params=params[start : start + _PARAMS_PER_CALL]
                )
        except MlflowException:
            # opening is tried again with every step, and each time would leave a run behind
            with contextlib.suppress(MlflowException):
                self._client.delete_run(self._run_id)
            raise

    def write(self, record: StepRecord) -> None:
        """All values of the step in one call, which returns when the store has them."""
        from mlflow.entities import Metric  # noqa: PLC0415 - an extra

        milliseconds = round(record.unix_seconds * 1000)
        metrics = [
            Metric(name, value, milliseconds, record.step) for name, value in record.values.items()
        ]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self, *, failed: bool = False) -> None:
        """Say how the run ended."""
        self._client.set_terminated(self._run_id, status="FAILED" if failed else "FINISHED")


def mlflow_params(settings: Mapping[str, SettingValue]) -> dict[str, str]:
    """Settings under names that MLflow takes, which are their own wherever it takes those.

    Other characters become ``_``; two names that become the same are counted.
    """
    params: dict[str, str] = {}
    for path, value in settings.items():
        name = re.sub(r"[^\w.\-: /]", "_", path, flags=re.ASCII)[:_NAME_CHARACTERS]
        if name != posixpath.normpath(name) or name.startswith(("/", "..")):
            name = re.sub(r"[/.]", "_", name) or "_"
        unique, count = name, 1
        while unique in params:
            count += 1
            unique = f"{name[: _NAME_CHARACTERS - 8]}_{count}"
        params[unique] = str(value)
    return params
