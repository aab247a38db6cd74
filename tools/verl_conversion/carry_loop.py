"""Prompts, loop and run folder: `data`, `loop` and `run` of a recipe."""

from collections.abc import Mapping

from verl_conversion.composed import Composed
from verl_conversion.overrides import Value
from verl_conversion.rhythm import Rhythm
from verl_conversion.sheet import Sheet
from verl_conversion.situations import (
    A,
    M,
    R,
    has_overlong_penalty,
    reward_kwargs,
    reward_manager,
)

_AGGREGATIONS: Mapping[str, str] = {
    "token-mean": "token_mean",
    "seq-mean-token-sum": "sequence_mean_token_sum",
    "seq-mean-token-mean": "sequence_mean_token_mean",
    "seq-mean-token-sum-norm": "fixed_normaliser",
}
_ESTIMATORS: Mapping[str, str] = {
    "low_var_kl": "k3",
    "k3": "k3",
    "mse": "k2",
    "k2": "k2",
    "abs": "abs",
    "low_var_kl+": "k3+",
    "k3+": "k3+",
    "kl+": "k1+",
    "k1+": "k1+",
    "abs+": "abs+",
}
_VALIDATION = f"{R}val_kwargs."


_INTERPOLATION = (
    "${...} is hydra's own here, and names a setting of verl, not a variable of the shell; it is "
    "left as it stands: put the path in its place"
)


def carry_data(c: Composed, sheet: Sheet) -> None:
    """Which prompts."""
    sheet.put("data.kind", "files", "data.train_files")
    _files(c, sheet)
    sheet.put("data.max_prompt_tokens", c.count("data.max_prompt_length"), "data.max_prompt_length")
    drops = c.on("data.filter_overlong_prompts")
    sheet.put("data.overlong", "drop" if drops else "error", "data.filter_overlong_prompts")
    if not drops:
        sheet.gap(
            "data.filter_overlong_prompts",
            why="off: verl would cut longer prompts on the left; no prompt is cut here, so one "
            "that is too long is an error; set data.overlong to 'drop' to leave such prompts out",
            decide="data.filter_overlong_prompts" in c.set_here,
        )
    for key, only, why in (
        ("data.prompt_key", "prompt", "the column of the prompts is called prompt here"),
        ("data.reward_fn_key", "data_source", "the column is called data_source here"),
        ("data.shuffle", True, "prompts are always drawn in an order of their own, by loop.seed"),
    ):
        value = c.get(key)
        if value != only:
            sheet.gap(key, why=f"{why}; {value!r} has no counterpart")
        elif key in c.set_here:
            sheet.same(key, why=f"as here: {why}")
    for key in (
        "data.custom_cls.path",
        "reward.custom_reward_function.path",
        "custom_reward_function.path",
    ):
        if c.get(key):
            sheet.gap(
                key,
                why="code of your own, which is not run: write a reward or a reader of prompts "
                "against rl-tasks, in your copy of the recipe",
            )
    for key in ("data.train_max_samples", "data.val_max_samples"):
        if (c.count(key) or -1) > 0:
            sheet.gap(key, why="all rows of a file are read; put the first ones into a file")


def _files(c: Composed, sheet: Sheet) -> None:
    for ours, theirs in (("train", "data.train_files"), ("heldout", "data.val_files")):
        value = c.get(theirs)
        files: list[Value] = value if isinstance(value, list) else [value]
        if all(isinstance(file, str) and file for file in files):
            sheet.put(f"data.{ours}", files, theirs)
        else:
            sheet.gap(theirs, why=f"expected a path or a list of paths, got {value!r}")
    for key in ("data.train_files", "data.val_files", f"{M}path", "trainer.default_local_dir"):
        if key in c.set_here and "${" in str(c.get(key)):
            sheet.gap(key, why=_INTERPOLATION)


def carry_loop(c: Composed, sheet: Sheet, rhythm: Rhythm) -> None:
    """Sampling, advantages, loss and evaluation."""
    size = c.count(f"{R}n")
    sheet.put("loop.group_size", size, f"{R}n")
    if size is not None and size < 2:  # noqa: PLR2004 - a group has two
        sheet.gap(f"{R}n", why=f"{size} completion has no siblings to be compared with; raise it")
    longest = c.count("data.max_response_length")
    sheet.put("loop.max_new_tokens", longest, "data.max_response_length")
    sheet.put("loop.temperature", c.number(f"{R}temperature"), f"{R}temperature")
    for key, only in ((f"{R}top_p", 1), (f"{R}top_k", -1)):
        if c.number(key) not in (None, only):
            sheet.gap(key, why="the loop samples from the whole distribution, which it trains")
        elif key in c.set_here:
            sheet.same(key, why="as here: the whole distribution is sampled from")
    sheet.put("loop.seed", c.count("data.seed"), "data.seed")
    _advantages(c, sheet)
    _loss(c, sheet, longest)
    _overlong(c, sheet, longest)
    _evaluation(c, sheet, rhythm)


def carry_run(c: Composed, sheet: Sheet, rhythm: Rhythm) -> None:
    """Run folder and checkpoints."""
    folder = c.text("trainer.default_local_dir")
    if "trainer.default_local_dir" in c.set_here and folder:
        sheet.put("run.folder", folder, "trainer.default_local_dir")
    saves = c.count("trainer.save_freq")
    if saves is not None and saves > 0:
        sheet.put(
            "run.checkpoint_every", saves * rhythm.per_verl_step, "trainer.save_freq", note="steps"
        )
    elif rhythm.num_steps is not None:
        sheet.put(
            "run.checkpoint_every",
            rhythm.num_steps,
            "trainer.save_freq",
            note="off in verl; here at the end, to go on from; none leaves that out too",
        )


def _advantages(c: Composed, sheet: Sheet) -> None:
    estimator, std = "algorithm.adv_estimator", "algorithm.norm_adv_by_std_in_grpo"
    match c.get(estimator):
        case "grpo" | "grpo_vectorized":
            kind = "grpo" if c.get(std) is not False else "dr_grpo"
            sheet.put("loop.advantages.kind", kind, estimator, std)
        case "rloo" | "rloo_vectorized":
            sheet.put("loop.advantages.kind", "rloo", estimator)
        case other:
            sheet.gap(
                estimator,
                why=f"{other!r} is no estimator of this loop, which has no critic; choose "
                "loop.advantages.kind (grpo, dr_grpo, rloo, gpg, maxrl)",
            )
    if c.on("algorithm.use_kl_in_reward"):
        sheet.gap(
            "algorithm.use_kl_in_reward",
            why="the loop has no KL in the reward; a KL term in the loss is loop.loss.kl",
        )
    if c.on("algorithm.filter_groups.enable"):
        sheet.gap(
            "algorithm.filter_groups.enable",
            why="groups of equal rewards carry no gradient and are left out of the batch, not "
            "replaced by others",
        )
        rest = ("metric", "max_num_gen_batches", "max_inflight_gen_batches")
        keys = (f"algorithm.filter_groups.{name}" for name in rest)
        sheet.gap(*keys, why="see algorithm.filter_groups.enable", decide=False)


def _loss(c: Composed, sheet: Sheet, longest: int | None) -> None:
    mode = f"{A}policy_loss.loss_mode"
    kinds = {"vanilla": "grpo", "gspo": "gspo"}
    kind = kinds.get(str(c.get(mode)))
    if kind is None:
        sheet.gap(mode, why=f"{c.get(mode)!r}: set loop.loss.kind and its numbers yourself")
        return
    loss = "loop.loss."
    sheet.put(f"{loss}kind", kind, mode)
    for name in ("low", "high"):
        key = f"{A}clip_ratio_{name}"
        plain = key if c.get(key) is not None else f"{A}clip_ratio"
        sheet.put(f"{loss}clip_{name}", c.number(plain), plain)
    dual = f"{A}clip_ratio_c"
    if kind == "grpo":
        sheet.put(f"{loss}dual_clip", c.number(dual), dual)
    elif dual in c.set_here:
        sheet.gap(dual, why="GSPO has no dual clip; verl does not read it there", decide=False)
    _aggregation(c, sheet, longest)
    if (entropy := c.number(f"{A}entropy_coeff")) in (None, 0):
        sheet.same(f"{A}entropy_coeff", why="as here: no loss has an entropy bonus")
    else:
        sheet.gap(
            f"{A}entropy_coeff",
            why=f"{entropy:g}: no loss here has an entropy bonus; leave it out, or choose a higher "
            "loop.loss.clip_high, which keeps the entropy up",
        )
    _kl(c, sheet)
    if c.get("algorithm.rollout_correction.rollout_is") is not None:
        sheet.gap(
            "algorithm.rollout_correction.rollout_is",
            why="the loop takes the ratio against the sampler's own logprobs, so a correction "
            "between the two would always be 1",
        )
    if not c.is_async:
        sheet.gap(
            "algorithm.rollout_correction.bypass_mode",
            why="off: verl computes the old logprobs again with the trainer; the loop takes those "
            "that the sampler reported, which differ by rounding and are watched as mismatch/...",
            decide=False,
        )


def _aggregation(c: Composed, sheet: Sheet, longest: int | None) -> None:
    mode, scale = f"{A}loss_agg_mode", f"{A}loss_scale_factor"
    kind = _AGGREGATIONS.get(str(c.get(mode)))
    if kind is None:
        sheet.gap(
            mode, why=f"{c.get(mode)!r} has no counterpart; choose loop.loss.aggregation.kind"
        )
        return
    sheet.put("loop.loss.aggregation.kind", kind, mode)
    if kind == "fixed_normaliser":
        factor = c.number(scale)
        normaliser = longest if factor is None else factor
        sheet.put(
            "loop.loss.aggregation.normaliser",
            None if normaliser is None else float(normaliser),
            mode,
            scale if factor is not None else "data.max_response_length",
        )


def _kl(c: Composed, sheet: Sheet) -> None:
    switch, coefficient, estimator = (
        f"{A}use_kl_loss",
        f"{A}kl_loss_coef",
        f"{A}kl_loss_type",
    )
    if not c.on(switch):
        if switch in c.set_here:
            sheet.same(switch, why="off, as here: loop.loss.kl is none")
        return
    value = c.number(coefficient)
    ours = _ESTIMATORS.get(str(c.get(estimator)))
    if not value:
        sheet.gap(
            switch,
            coefficient,
            why="a KL term with the coefficient 0 costs a reference policy and changes nothing; "
            "it is left out",
            decide=False,
        )
    elif ours is None:
        sheet.gap(
            estimator,
            why=f"{c.get(estimator)!r}: as a loss it has a gradient that ignores the reference; "
            "choose loop.loss.kl.estimator k2 or k3",
        )
    else:
        sheet.put("loop.loss.kl.coefficient", float(value), switch, coefficient)
        sheet.put("loop.loss.kl.estimator", ours, estimator)


def _overlong(c: Composed, sheet: Sheet, longest: int | None) -> None:
    overlong = f"{reward_kwargs(c)}overlong_buffer_cfg."
    switch, buffer = f"{overlong}enable", f"{overlong}len"
    end = f"{reward_kwargs(c)}max_resp_len"
    older, newer = "reward_model.reward_manager", "reward.reward_manager.name"
    manager = older if c.get(older) is not None else newer
    if reward_manager(c) not in {"naive", "dapo"}:
        sheet.gap(manager, why=f"{c.get(manager)!r} has no counterpart; see rl-tasks' rewards")
    elif manager in c.set_here:
        sheet.gap(
            manager,
            why="answers are graded by data.reward, and length by loop.overlong; verl chooses the "
            "grader by the rows' data_source",
            decide=False,
        )
    if not has_overlong_penalty(c):
        if switch in c.set_here:
            sheet.same(switch, why="off, as here: loop.overlong is none")
        return
    sheet.put("loop.overlong.max_length", c.count(end), end, switch)
    sheet.put("loop.overlong.buffer", c.count(buffer), buffer)
    factor = c.number(f"{overlong}penalty_factor")
    sheet.put(
        "loop.overlong.factor",
        None if factor is None else float(factor),
        f"{overlong}penalty_factor",
    )
    if c.count(end) != longest:
        sheet.gap(
            end,
            why=f"{c.get(end)} where data.max_response_length is {longest}: the punishment would "
            "not end where completions are cut off; set both to the same length",
        )
    if f"{overlong}log" in c.set_here:
        sheet.gap(
            f"{overlong}log", why="a matter of the log; the punishment is a metric", decide=False
        )


def _evaluation(c: Composed, sheet: Sheet, rhythm: Rhythm) -> None:
    tests = c.count("trainer.test_freq")
    if tests is not None and tests > 0:
        sheet.put(
            "loop.evaluate_every", tests * rhythm.per_verl_step, "trainer.test_freq", note="steps"
        )
    elif rhythm.num_steps is not None:
        sheet.put(
            "loop.evaluate_every",
            rhythm.num_steps,
            "trainer.test_freq",
            note="off in verl; here the held-out problems are answered before and after",
        )
    if "trainer.val_before_train" in c.set_here:
        answered = "the held-out problems are answered before the first step"
        if c.on("trainer.val_before_train"):
            sheet.same("trainer.val_before_train", why=f"on, as here: {answered}")
        else:
            why = f"off; not so here: {answered}"
            sheet.gap("trainer.val_before_train", why=why, decide=False)
    sheet.put("loop.evaluation_samples", c.count(f"{_VALIDATION}n"), f"{_VALIDATION}n")
    here: Mapping[str, Value] = {
        "temperature": c.get(f"{R}temperature"),
        "top_p": 1,
        "top_k": -1,
        "do_sample": True,
    }
    for name, value in here.items():
        key = f"{_VALIDATION}{name}"
        if key not in c.set_here:
            continue
        if c.get(key) == value:
            sheet.same(key, why="as here: evaluations sample as training does")
        else:
            sheet.gap(
                key,
                why=f"{c.get(key)} in verl, {value} here: evaluations sample as training does, so "
                "their numbers are not verl's",
            )


def carry_names(c: Composed, sheet: Sheet) -> None:
    """What is about names, logs and places only."""
    reasons = {
        "trainer.project_name": "a name for trackers; a run folder is named after its recipe",
        "trainer.experiment_name": "a name for trackers; a run folder is named after its recipe",
        "trainer.logger": "metrics go to the terminal and to metrics.jsonl in the run folder; "
        "rl-metrics has writers for trackers",
        "trainer.resume_mode": "a run is resumed by the command that started it",
        "trainer.log_val_generations": "answers before and after are in the run folder",
        "trainer.balance_batch": "packing spreads the rows over ranks by tokens",
        "trainer.rollout_data_dir": "completions are not kept on disk",
        "trainer.validation_data_dir": "answers before and after are in the run folder",
        "trainer.max_critic_ckpt_to_keep": "there is no critic",
        f"{A}checkpoint.save_contents": "a checkpoint holds all that a resume needs, and the model "
        "is saved at the end",
        "ray_kwargs.ray_init.num_cpus": "a matter of the machine",
        "trainer.max_actor_ckpt_to_keep": "how many checkpoints stay is the run folder's matter",
        "data.filter_overlong_prompts_workers": "a matter of speed",
        "data.dataloader_num_workers": "a matter of speed",
        "data.val_batch_size": "a matter of speed; verl evaluates all at once by default",
        "actor_rollout_ref.hybrid_engine": "which devices train and which sample is the recipe's "
        "matter",
        f"{M}use_shm": "a matter of speed",
        f"{R}agent.num_workers": "a matter of speed",
    }
    for key, why in reasons.items():
        if key in c.set_here:
            sheet.gap(key, why=why, decide=False)
