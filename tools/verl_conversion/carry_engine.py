"""What trains: `engine` of a recipe."""

from verl_conversion.composed import GROUP, Composed
from verl_conversion.rhythm import Rhythm
from verl_conversion.sheet import Sheet
from verl_conversion.situations import A, M, R, has_engine_workers, is_dynamic

_OPTIM = f"{A}optim."
_FSDP = f"{A}fsdp_config."
_VEOMNI = f"{A}veomni."
_RANKS = ("trainer.n_gpus_per_node", "trainer.nnodes")


def carry_engine(c: Composed, sheet: Sheet, rhythm: Rhythm) -> None:
    """Model, optimizer, ranks and memory of the training engine."""
    kind = "fsdp" if c.engine == "dp" else "veomni"
    sheet.put("engine.kind", kind, GROUP, f"{A}strategy", note="FSDP2" if kind == "fsdp" else "")
    sheet.put("engine.model_path", c.text(f"{M}path"), f"{M}path")
    sheet.put("engine.temperature", c.number(f"{R}temperature"), f"{R}temperature")
    _optim(c, sheet, rhythm)
    if c.engine == "dp":
        sheet.put("engine.compute_dtype", c.text(f"{_FSDP}dtype"), f"{_FSDP}dtype")
    _parallel(c, sheet)
    _memory(c, sheet)
    _micro_batches(c, sheet)
    _model(c, sheet)
    _refused(c, sheet)


def _optim(c: Composed, sheet: Sheet, rhythm: Rhythm) -> None:
    optim = "engine.optim."
    rate = c.number(f"{_OPTIM}lr")
    sheet.put(f"{optim}learning_rate", None if rate is None else float(rate), f"{_OPTIM}lr")
    decay = c.number(f"{_OPTIM}weight_decay")
    sheet.put(
        f"{optim}weight_decay", None if decay is None else float(decay), f"{_OPTIM}weight_decay"
    )
    betas = c.get(f"{_OPTIM}betas")
    if isinstance(betas, list):
        sheet.put(f"{optim}betas", betas, f"{_OPTIM}betas")
    clip = f"{_OPTIM}clip_grad" if has_engine_workers(c) else f"{A}grad_clip"
    norm = c.number(clip)
    sheet.put(f"{optim}max_grad_norm", None if norm is None else float(norm), clip)
    if str(c.get(f"{_OPTIM}optimizer", "adamw")).lower() != "adamw":
        sheet.gap(
            f"{_OPTIM}optimizer",
            why=f"{c.get(f'{_OPTIM}optimizer')}: here it is AdamW, with moments in 8 bits in "
            "engine.eight_bit_moments, and Muon in engine.muon",
        )
    _schedule(c, sheet, rhythm)


def _schedule(c: Composed, sheet: Sheet, rhythm: Rhythm) -> None:
    kind_key, warmup_key, ratio_key = (
        f"{_OPTIM}lr_scheduler_type",
        f"{_OPTIM}lr_warmup_steps",
        f"{_OPTIM}lr_warmup_steps_ratio",
    )
    older = f"{_OPTIM}warmup_style"
    if c.get(older) is not None:
        kind_key = older
    kind = c.get(kind_key)
    if kind_key not in c.set_here and kind != "constant":
        sheet.gap(
            kind_key,
            why=f"not set in the launch: verl's default for this engine is {kind}, where that for "
            "FSDP is constant",
            trap=True,
        )
    each = rhythm.per_schedule_step
    steps = c.count(warmup_key) or -1
    if steps > 0 and c.engine == "dp":
        sheet.put("engine.optim.warmup_steps", steps * each, warmup_key, note=_times(each))
    elif (ratio := c.number(ratio_key)) and rhythm.num_steps is not None:
        total = rhythm.num_steps // each
        sheet.put("engine.optim.warmup_steps", int(ratio * total) * each, ratio_key)
    if kind not in ("constant", "cosine"):
        sheet.gap(kind_key, why=f"{kind!r}: choose engine.optim.schedule")
        return
    sheet.put("engine.optim.schedule", kind, kind_key)
    if kind == "constant":
        return
    sheet.put(
        "engine.optim.total_steps",
        rhythm.num_steps,
        kind_key,
        "trainer.total_training_steps",
        note="verl's falls once a step of its own, in stairs" if each > 1 else "",
    )
    lowest = _lowest(c)
    if lowest:
        key = f"{_OPTIM}min_lr_ratio" if c.engine == "dp" else f"{_OPTIM}lr_min"
        sheet.put("engine.optim.final_learning_rate", lowest, key)
    for key, usual in ((f"{_OPTIM}num_cycles", 0.5), (f"{_OPTIM}lr_decay_ratio", 1.0)):
        if c.number(key) not in (None, usual):
            sheet.gap(key, why="the rate falls once, over all steps")


def _times(each: int) -> str:
    return f"optimizer steps, {each} for each of verl's" if each > 1 else ""


def _lowest(c: Composed) -> float | None:
    if c.engine == "veomni":
        return c.number(f"{_OPTIM}lr_min")
    ratio, rate = c.number(f"{_OPTIM}min_lr_ratio"), c.number(f"{_OPTIM}lr")
    return None if not ratio or rate is None else ratio * rate


def _parallel(c: Composed, sheet: Sheet) -> None:
    here = "engine.parallel."
    world = (c.count(_RANKS[0]) or 0) * (c.count(_RANKS[1]) or 0)
    if not world:
        sheet.gap(*_RANKS, why="how many devices train is not known; set engine.parallel.dp_size")
        return
    shared_key = _ulysses_key(c)
    shared = c.count(shared_key) or 1
    if world % shared:
        sheet.gap(shared_key, why=f"{shared} does not divide the {world} devices that train")
        return
    sheet.put(f"{here}dp_size", world // shared, *_RANKS, shared_key)
    if shared > 1 and c.engine == "veomni":
        sheet.gap(shared_key, why="engine-veomni does not share sequences; use engine-fsdp, or 1")
    elif shared > 1:
        sheet.put(f"{here}ulysses_size", shared, shared_key)
    size_key = f"{_FSDP if c.engine == 'dp' else _VEOMNI}fsdp_size"
    size = c.count(size_key)
    spread = world if c.engine == "dp" else world // shared
    if size is not None and 0 < size < spread:
        sheet.put(
            f"{here}dp_replicate_size",
            spread // size,
            size_key,
            *_RANKS,
            note=f"copies of the model, each over {size} ranks",
        )
    elif size_key in c.set_here:
        sheet.same(size_key, why="as here: weights are spread over all ranks")
    if c.engine == "veomni":
        experts = f"{_VEOMNI}expert_parallel_size"
        sheet.put(f"{here}extra_parallel_sizes.ep", c.count(experts), experts)


def _ulysses_key(c: Composed) -> str:
    """The setting that sequence parallelism really follows."""
    if c.engine == "veomni":
        return f"{_VEOMNI}ulysses_parallel_size"
    older = f"{A}ulysses_sequence_parallel_size"
    return older if (c.count(older) or 1) > 1 else f"{_FSDP}ulysses_sequence_parallel_size"


def _memory(c: Composed, sheet: Sheet) -> None:
    checkpointing = f"{M}enable_gradient_checkpointing"
    on = c.on(checkpointing)
    if c.engine == "veomni":
        sheet.put("engine.activation_checkpointing", on, checkpointing)
    else:
        sheet.put("engine.activation_checkpointing", "full" if on else "none", checkpointing)
    _activations(c, sheet, f"{M}enable_activation_offload", checkpointing)
    base = _FSDP if c.engine == "dp" else _VEOMNI
    _offload(c, sheet, f"{base}param_offload", f"{base}optimizer_offload")
    if c.engine == "dp" and c.on(f"{_FSDP}offload_policy"):
        sheet.put("engine.offload", "parameters", f"{_FSDP}offload_policy")
    reference = "actor_rollout_ref.ref." + base.removeprefix(A)
    for key in (f"{reference}param_offload", f"{reference}optimizer_offload"):
        if key in c.set_here:
            why = "where the reference's weights lie follows from the engine's"
            sheet.gap(key, why=why, decide=False)


def _activations(c: Composed, sheet: Sheet, key: str, checkpointing: str) -> None:
    if not c.on(key):
        sheet.same(key, why="off, as here: activations stay on the device")
    elif c.engine == "veomni":
        sheet.gap(
            key,
            why="engine-veomni keeps activations on the device; engine-fsdp has "
            "engine.offload_activations",
        )
    elif c.on(checkpointing):
        sheet.put("engine.offload_activations", True, key, checkpointing)
    else:
        sheet.gap(
            key,
            checkpointing,
            why="verl sends all that a layer keeps to the host; engine.offload_activations sends "
            "the inputs of checkpointed blocks: set it with engine.activation_checkpointing = "
            "'full'",
        )


def _offload(c: Composed, sheet: Sheet, weights: str, optimizer: str) -> None:
    on = [key for key in (weights, optimizer) if c.on(key)]
    if on and c.engine == "veomni":
        sheet.gap(
            *on,
            why="engine-veomni keeps weights and optimizer on the device; spread them over more "
            "ranks, or use engine-fsdp, which has engine.offload",
        )
    elif len(on) == 1:
        sheet.gap(
            weights,
            optimizer,
            why="only one of the two is on: engine.offload moves weights, gradient and optimizer "
            "together ('parameters') or nothing ('none')",
        )
    elif on:
        sheet.put(
            "engine.offload",
            "parameters",
            *on,
            note="verl moves all to the host between phases; here they stay there, and a block's "
            "weights come when it computes",
        )
    elif c.engine == "dp":
        sheet.same(weights, optimizer, why="off, as here: engine.offload is 'none'")
    else:
        sheet.same(weights, optimizer, why="off, as here: nothing lies in the host's memory")


def _micro_batches(c: Composed, sheet: Sheet) -> None:
    budget = "loop.max_tokens_per_micro_batch"
    prompt, answer = c.count("data.max_prompt_length"), c.count("data.max_response_length")
    if prompt is None or answer is None:
        return
    lengths = ("data.max_prompt_length", "data.max_response_length")
    shared_key = _ulysses_key(c)
    shared = c.count(shared_key) or 1
    tokens_key, rows_key = f"{A}ppo_max_token_len_per_gpu", f"{A}ppo_micro_batch_size_per_gpu"
    switch = f"{A}use_dynamic_bsz"
    if is_dynamic(c):
        tokens = (c.count(tokens_key) or 0) * shared
        sources = (tokens_key, switch, *((shared_key,) if shared > 1 else ()))
        note = f"{c.get(tokens_key)} x {shared} ranks that share sequences" if shared > 1 else ""
        if tokens < prompt + answer:
            note = f"raised from {tokens} to the longest row, which verl would refuse"
            sources = (*sources, *lengths)
        sheet.put(budget, max(tokens, prompt + answer), *sources, note=note)
        return
    rows = c.count(rows_key)
    if rows is None:
        sheet.put(budget, prompt + answer, *lengths, note="room for the longest row")
        return
    sheet.put(
        budget,
        rows * (prompt + answer),
        rows_key,
        *lengths,
        note=f"room for {rows} of the longest rows",
    )
    if switch in c.set_here:
        sheet.gap(switch, why="off: here micro-batches are always cut by tokens", decide=False)


def _model(c: Composed, sheet: Sheet) -> None:
    rank = f"{M}lora_rank"
    if (c.count(rank) or 0) > 0 and c.engine == "veomni":
        sheet.gap(rank, why="engine-veomni trains whole weights; engine-fsdp has engine.lora")
    elif (c.count(rank) or 0) > 0:
        alpha = c.number(f"{M}lora_alpha")
        sheet.put("engine.lora.rank", c.count(rank), rank)
        sheet.put("engine.lora.alpha", None if alpha is None else float(alpha), f"{M}lora_alpha")
    if c.on(f"{M}trust_remote_code"):
        sheet.put("sampler.trust_remote_code", True, f"{M}trust_remote_code")
    if c.engine == "dp" and c.on(f"{_FSDP}full_determinism"):
        sheet.put("engine.deterministic", True, f"{_FSDP}full_determinism")
    packed = "rows are packed without padding, which changes no result"
    if c.on(f"{M}use_remove_padding"):
        sheet.same(f"{M}use_remove_padding", why=f"as here: {packed}")
    else:
        sheet.gap(f"{M}use_remove_padding", why=packed, decide=False)
    for name, value in c.below(f"{M}override_config").items():
        key = f"{M}override_config.{name}"
        dropout = "dropout is off, so that logprobs depend on weights and tokens alone"
        if "dropout" not in name and not name.endswith("pdrop"):
            sheet.gap(
                key,
                why="the model runs as its folder says; write the value into its config.json, for "
                "trainer and sampler alike",
            )
        elif value in (0, 0.0, None):
            sheet.same(key, why=f"as here: {dropout}")
        else:
            sheet.gap(key, why=dropout)


def _refused(c: Composed, sheet: Sheet) -> None:
    """Switches about speed or memory that this engine has no setting for."""
    fsdp2 = "FSDP2 fetches the next block's weights by itself"
    reasons = {
        f"{_FSDP}forward_prefetch": fsdp2,
        f"{_VEOMNI}forward_prefetch": fsdp2,
        f"{_FSDP}model_dtype": "master weights are float32 in any case",
        f"{_FSDP}reshard_after_forward": "weights are spread again after each block",
        f"{_FSDP}use_torch_compile": "it compiles verl's entropy and logprobs, which are kernels "
        "of their own here; engine.compile_blocks compiles the model's blocks",
        f"{_VEOMNI}use_torch_compile": "it compiles verl's entropy, which is not computed here",
        f"{A}use_fused_kernels": "the head computes logprobs in pieces in any case",
        f"{M}use_fused_kernels": "the head computes logprobs in pieces in any case",
        f"{M}use_liger": "the head computes logprobs in pieces in any case",
        f"{A}entropy_checkpointing": "the entropy has no gradient here",
        f"{A}entropy_from_logits_with_chunking": "the head computes in pieces in any case",
        f"{A}use_rollout_log_probs": "as here: the ratio is against the sampler's logprobs",
        f"{R}log_prob_micro_batch_size": "one token budget holds for every forward pass",
        f"{R}log_prob_micro_batch_size_per_gpu": "one token budget holds for every forward pass",
        f"{R}log_prob_use_dynamic_bsz": "one token budget holds for every forward pass",
        f"{R}log_prob_max_token_len_per_gpu": "one token budget holds for every forward pass",
        "actor_rollout_ref.ref.log_prob_micro_batch_size": "one token budget holds for all",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": "one token budget holds for "
        "every forward pass",
        "actor_rollout_ref.ref.log_prob_use_dynamic_bsz": "one token budget holds for all",
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": "one token budget holds for all",
        "actor_rollout_ref.ref.strategy": "the reference is of the engine's kind",
    }
    for key, why in reasons.items():
        if key in c.set_here:
            sheet.gap(key, why=why, decide=False)
