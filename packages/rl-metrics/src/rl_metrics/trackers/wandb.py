"""Weights & Biases, offline or online. Needs the extra ``rl-metrics[wandb]``.

Offline, everything stays in ``wandb/`` of the run folder until somebody types ``wandb sync``.
A resumed run is a new W&B run in the same group that holds every step from the first on: W&B
ignores a step that comes a second time, and the steps after a checkpoint do come again.
"""

import json
import os
import time
from pathlib import Path
from typing import ClassVar, Literal, final

import attrs

from rl_metrics.jsonl import StepRecord
from rl_metrics.trackers.sink import TrackedRun
from rl_metrics.trackers.validators import address_validator, filled_validator

_KEPT = frozenset({"WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_CREDENTIALS_FILE"})
"""Variables of W&B that say who you are; all others could change what was configured."""

_FLUSH_S = 0.05
"""Seconds after which wandb's service writes what it was given; its default is 15."""

_FLUSH_TIMEOUT_S = 30.0

_INIT_TIMEOUT_S = 30.0
"""Seconds that a server may take to know the run; a failure is tried again with every step."""


@final
@attrs.frozen(kw_only=True)
class WandbConfig:
    """A W&B run. The key to log in with is W&B's own affair: ``WANDB_API_KEY`` or `wandb login`."""

    kind: ClassVar[Literal["wandb"]] = "wandb"

    project: str = attrs.field(validator=filled_validator)
    """Project that the run belongs to."""

    mode: Literal["offline", "online"]
    """`offline` sends nothing; `online` sends every step. There is no default."""

    entity: str | None = None
    """User or team; None: the one that the key belongs to, or that `wandb sync` names."""

    server: str | None = attrs.field(
        default=None, validator=attrs.validators.optional(address_validator)
    )
    """Address of the server, online only, such as ``https://api.wandb.ai``."""

    def __attrs_post_init__(self) -> None:
        """Refuse a server that nothing would be sent to, and sending to nowhere in particular."""
        if self.mode == "offline" and self.server is not None:
            raise ValueError(
                f"WandbConfig: server = {self.server!r} cannot take effect with mode = 'offline'; "
                "leave it out, and name it to `wandb sync` later"
            )
        if self.mode == "online" and self.server is None:
            raise ValueError(
                "WandbConfig: mode = 'online' needs server, the address that steps are sent to: "
                "'https://api.wandb.ai', or that of your own server"
            )


@final
class WandbSink:
    """One W&B run; changes the environment, and therefore wants a process of its own."""

    def __init__(self, config: WandbConfig, run: TrackedRun) -> None:
        for name in [name for name in os.environ if name.startswith("WANDB_")]:
            if name not in _KEPT:
                del os.environ[name]
        os.environ["WANDB_ERROR_REPORTING"] = "false"
        os.environ["DO_NOT_TRACK"] = "true"

        import wandb  # noqa: PLC0415 - an extra, which reads the environment when imported

        settings = wandb.Settings(
            mode=config.mode,
            console="off",
            disable_code=True,
            disable_git=True,
            init_timeout=_INIT_TIMEOUT_S,
            save_code=False,
            silent=True,
            x_disable_machine_info=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_save_requirements=False,
            x_transaction_log_flush_interval=_FLUSH_S,
        )
        if config.server is not None:
            settings.base_url = config.server
        self._run = wandb.init(
            project=config.project,
            entity=config.entity,
            name=f"{run.name} (resumed)" if run.is_resumed else run.name,
            group=run.name,
            dir=str(run.folder),
            config=dict(run.settings),
            settings=settings,
        )
        if self._run.settings.mode != config.mode:
            message = (
                f"asked for the mode {config.mode!r}, and wandb runs in {self._run.settings.mode!r}"
            )
            raise RuntimeError(message)
        self._log = Path(self._run.settings.sync_file)
        self._wait_for_growth(from_size=0, by=1)

    def write(self, record: StepRecord) -> None:
        """One history row; waits until it is in the run's ``.wandb`` file."""
        size = self._log.stat().st_size
        self._run.log(dict(record.values), step=record.step, commit=True)
        # a row holds at least the names and the numbers as JSON
        self._wait_for_growth(from_size=size, by=len(json.dumps(dict(record.values))) // 2)

    def _wait_for_growth(self, *, from_size: int, by: int) -> None:
        deadline = time.monotonic() + _FLUSH_TIMEOUT_S
        while not self._log.exists() or self._log.stat().st_size < from_size + by:
            if time.monotonic() > deadline:
                message = f"wandb's service wrote nothing to {self._log} in {_FLUSH_TIMEOUT_S:g} s"
                raise TimeoutError(message)
            time.sleep(_FLUSH_S / 10)

    def close(self, *, failed: bool = False) -> None:
        """Finish the run; online, what is left is sent now."""
        self._run.finish(exit_code=1 if failed else 0)
