"""How many optimizer steps there are, on how many prompts, and how stale those may be.

In verl a step is a round of sampling, or of waiting for samples; in it the optimizer steps once for
each mini-batch. Here a step is an optimizer step.
"""

from typing import final

import attrs

from async_policy import VerlAsyncSettings, from_verl
from verl_conversion.composed import Composed
from verl_conversion.sheet import Sheet
from verl_conversion.situations import A

MINI = f"{A}ppo_mini_batch_size"
BATCH = "data.train_batch_size"
STEPS = "trainer.total_training_steps"
EPOCHS = "trainer.total_epochs"
PROMPTS = "rollout.total_rollout_steps"
_ASYNC = "async_training."


@final
@attrs.frozen(kw_only=True)
class Rhythm:
    """The optimizer steps of a run."""

    num_steps: int | None
    """Of the whole run; None where the configuration does not say."""

    per_verl_step: int
    """In one step of verl, the unit of test_freq and save_freq."""

    per_schedule_step: int
    """In one step of verl's learning rate schedule."""


def carry_rhythm(c: Composed, sheet: Sheet, *, train_rows: int | None) -> Rhythm:
    """Put the settings of steps and staleness down; `train_rows` counts the training prompts."""
    return _async(c, sheet) if c.is_async else _sync(c, sheet, train_rows=train_rows)


def _sync(c: Composed, sheet: Sheet, *, train_rows: int | None) -> Rhythm:
    mini, batch = c.count(MINI), c.count(BATCH)
    rounds = c.count(STEPS)
    sources: tuple[str, ...] = (STEPS,)
    if rounds is None and train_rows is not None and batch:
        rounds = train_rows // batch * (c.count(EPOCHS) or 1)
        sources = (EPOCHS,)
    elif rounds is not None and EPOCHS in c.set_here:
        sheet.gap(
            EPOCHS,
            why=f"{STEPS} = {rounds} ends the run; only if the data ends before, after so many "
            "epochs, does verl stop earlier",
            decide=False,
        )
    if not mini or not batch or batch % mini:
        sheet.gap(
            MINI,
            BATCH,
            why=f"expected data.train_batch_size to be a multiple of actor.ppo_mini_batch_size, "
            f"got {batch} and {mini}; set loop.groups_per_step, publish_every and max_staleness "
            "yourself",
        )
        return Rhythm(num_steps=None, per_verl_step=1, per_schedule_step=1)
    each = batch // mini
    if rounds is None:
        sheet.gap(
            STEPS,
            EPOCHS,
            why="how many steps so many epochs are depends on the data; give the number of "
            "training prompts (--train-rows N), or set loop.num_steps",
        )
    num_steps = None if rounds is None else rounds * each
    what = f"{each} optimizer steps for each of verl's"
    sheet.put("loop.num_steps", num_steps, *sources, BATCH, MINI, note=what if each > 1 else "")
    sheet.put("loop.groups_per_step", mini, MINI)
    sheet.put("loop.publish_every", each, BATCH, MINI, note="as often as verl samples")
    sheet.put(
        "loop.max_staleness",
        each - 1,
        BATCH,
        MINI,
        note="all of a round is sampled before the first of its optimizer steps",
    )
    mode = "trainer.v1.trainer_mode"
    if c.get(mode) not in (None, "sync"):
        sheet.gap(
            mode,
            why=f"{c.get(mode)!r}: what follows here is the schedule of 'sync'; set "
            "loop.max_staleness and loop.publish_every to what was meant",
        )
    drawn = c.count("data.gen_batch_size")
    if drawn not in (None, batch):
        sheet.gap(
            "data.gen_batch_size",
            why=f"verl draws {drawn} prompts for each of its steps, for a batch of {batch}; set "
            "loop.groups_per_step and loop.publish_every to what was meant",
        )
    if (epochs := c.count(f"{A}ppo_epochs")) not in (None, 1):
        sheet.gap(
            f"{A}ppo_epochs",
            why=f"{epochs} passes over the same samples: here each is trained on once; raise "
            "loop.num_steps, or leave it",
        )
    return Rhythm(num_steps=num_steps, per_verl_step=each, per_schedule_step=each)


def _async(c: Composed, sheet: Sheet) -> Rhythm:
    needed = {
        "total_rollout_steps": c.count(PROMPTS),
        "ppo_mini_batch_size": c.count(MINI),
        "require_batches": c.count(f"{_ASYNC}require_batches"),
        "staleness_threshold": c.number(f"{_ASYNC}staleness_threshold"),
        "trigger_parameter_sync_step": c.count(f"{_ASYNC}trigger_parameter_sync_step"),
    }
    keys = (PROMPTS, MINI, *(f"{_ASYNC}{name}" for name in list(needed)[2:]))
    partial = f"{_ASYNC}partial_rollout"
    try:
        settings = VerlAsyncSettings(
            total_rollout_steps=_whole(needed, "total_rollout_steps"),
            ppo_mini_batch_size=_whole(needed, "ppo_mini_batch_size"),
            require_batches=_whole(needed, "require_batches"),
            staleness_threshold=float(_given(needed, "staleness_threshold")),
            trigger_parameter_sync_step=_whole(needed, "trigger_parameter_sync_step"),
            partial_rollout=c.get(partial) is not False,
        )
        run = from_verl(settings)
    except ValueError as error:
        sheet.gap(*keys, why=f"no schedule follows: {error}")
        return Rhythm(num_steps=None, per_verl_step=1, per_schedule_step=1)
    schedule = run.schedule
    sheet.put("loop.num_steps", schedule.num_steps, PROMPTS, MINI, note="prompts / prompts a step")
    sheet.put("loop.groups_per_step", schedule.groups_per_step, MINI)
    timing = (f"{_ASYNC}trigger_parameter_sync_step", f"{_ASYNC}require_batches")
    sheet.put("loop.publish_every", run.publish_every, *timing)
    lead = schedule.max_lead_groups
    sheet.put(
        "loop.max_staleness",
        schedule.max_staleness,
        f"{_ASYNC}staleness_threshold",
        *timing,
        note=""
        if lead is None
        else f"verl stops at {lead} prompts ahead, between two steps; here at "
        f"{(schedule.max_staleness + 1) * schedule.groups_per_step}",
    )
    for remark in run.remarks:
        sheet.gap(_subject(remark, partial), why=remark, decide=False)
    if run.in_flight == "abort":
        why = "on, as here: a publish interrupts running requests, which go on from their prefix"
        sheet.same(partial, why=why)
    if EPOCHS in c.set_here:
        sheet.gap(
            EPOCHS,
            why=f"a second bound on {PROMPTS}; it acts only if the data has fewer prompts",
            decide=False,
        )
    if c.get(BATCH) != 0:
        sheet.gap(BATCH, why="verl asserts that it is 0 in a fully asynchronous run")
    elif BATCH in c.set_here:
        why = "the only value that verl takes here; it says nothing about the run"
        sheet.same(BATCH, "data.gen_batch_size", why=why)
    return Rhythm(
        num_steps=schedule.num_steps,
        per_verl_step=run.publish_every,
        per_schedule_step=settings.require_batches,
    )


def _given(needed: dict[str, int | None] | dict[str, float | None], name: str) -> float:
    value = needed[name]
    if value is None:
        raise ValueError(f"{name} is not known")
    return value


def _whole(needed: dict[str, int | None] | dict[str, float | None], name: str) -> int:
    return int(_given(needed, name))


def _subject(remark: str, partial: str) -> str:
    """The setting of verl that a remark is about; the run as a whole for others."""
    for name, key in (
        ("total_rollout_steps", PROMPTS),
        ("require_batches", f"{_ASYNC}require_batches"),
        ("partial_rollout", partial),
    ):
        if remark.startswith(name):
            return key
    return "async_training"
