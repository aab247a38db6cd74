"""trackio's local database. Needs the extra ``rl-metrics[trackio]``.

``trackio show`` displays it, and ``trackio sync`` sends it to a Space if you want that; nothing is
sent from here. Steps go through trackio's storage and not through ``trackio.log``, which collects
them for half a second and turns failures into warnings. A resumed run replaces what the earlier
part wrote.
"""

import os
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar, Literal, final

import attrs

from rl_metrics.atomic import write_atomically
from rl_metrics.effective import SettingValue
from rl_metrics.jsonl import StepRecord
from rl_metrics.trackers.sink import TrackedRun
from rl_metrics.trackers.validators import filled_validator


@final
@attrs.frozen(kw_only=True)
class TrackioConfig:
    """A run in a local trackio database."""

    kind: ClassVar[Literal["trackio"]] = "trackio"

    project: str = attrs.field(validator=filled_validator)
    """Project that the run belongs to; letters, digits, ``-`` and ``_``."""

    folder: Path | None = attrs.field(default=None, converter=attrs.converters.optional(Path))
    """Folder of the databases; None: trackio's own place, where ``trackio show`` looks."""


@final
class TrackioSink:
    """One trackio run; changes the environment, and therefore wants a process of its own."""

    def __init__(self, config: TrackioConfig, run: TrackedRun) -> None:
        for name in [name for name in os.environ if name.startswith("TRACKIO_")]:
            if name != "TRACKIO_DIR":  # the others may name a Space, a bucket or a webhook
                del os.environ[name]
        if config.folder is not None:
            os.environ["TRACKIO_DIR"] = str(config.folder)
        os.environ["HF_HUB_OFFLINE"] = "1"
        os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"

        from trackio.sqlite_storage import SQLiteStorage  # noqa: PLC0415 - an extra

        SQLiteStorage.validate_project_name(config.project)
        self._project = config.project
        self._name = run.name
        id_file = run.folder / "trackers" / "trackio_run_id"
        if run.is_resumed and id_file.exists():
            earlier = id_file.read_text(encoding="utf-8")
            SQLiteStorage.delete_run(config.project, run.name, run_id=earlier)
        self._run_id = uuid.uuid4().hex
        write_atomically(id_file, self._run_id.encode())
        # trackio's own keys, which its dashboard reads, among the settings
        self._config: dict[str, SettingValue | None] | None = {
            **run.settings,
            "_Username": None,
            "_Created": datetime.now(UTC).isoformat(),
            "_Group": None,
        }

    def write(self, record: StepRecord) -> None:
        """One row, committed when this returns."""
        from trackio.sqlite_storage import SQLiteStorage  # noqa: PLC0415 - an extra

        SQLiteStorage.bulk_log(
            project=self._project,
            run=self._name,
            run_id=self._run_id,
            metrics_list=[dict(record.values)],
            steps=[record.step],
            timestamps=[datetime.fromtimestamp(record.unix_seconds, UTC).isoformat()],
            config=self._config,
            log_ids=[f"{self._run_id}-{record.step}"],
        )
        self._config = None

    def close(self, *, failed: bool = False) -> None:
        """Nothing is open between two writes, and trackio keeps no end of a run."""
