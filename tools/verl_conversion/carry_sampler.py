"""What samples: `sampler` of a recipe."""

from typing import get_args

from rollout_vllm import VllmConfig
from rollout_vllm.device_rules import Device
from verl_conversion.composed import Composed
from verl_conversion.overrides import Value
from verl_conversion.sheet import Sheet
from verl_conversion.situations import M, R

_KWARGS = f"{R}engine_kwargs.vllm"
_NUMBERS = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "enforce_eager",
)
_OWN = {
    f"{R}disable_log_stats": "metrics are the training loop's",
    f"{R}logprobs_mode": "logprobs are those of the distribution that is sampled from",
    f"{R}load_format": "the first weights come from the model's folder, later ones from training",
    f"{R}seed": "every request has a seed of its own, which follows from loop.seed",
    f"{R}layered_summon": "weights go to the sampler layer by layer in any case",
    f"{R}checkpoint_engine.backend": "how weights travel is the recipe's matter",
    f"{R}checkpoint_engine.update_weights_bucket_megabytes": "how weights travel is the recipe's "
    "matter",
}


def carry_sampler(c: Composed, sheet: Sheet) -> None:
    """Model, memory, devices and vLLM's own arguments."""
    name = c.get(f"{R}name")
    if name not in ("vllm", "???"):
        sheet.gap(f"{R}name", why=f"{name!r}: the sampler is vLLM; its settings differ")
    elif f"{R}name" in c.set_here:
        sheet.same(f"{R}name", why="as here: the sampler is vLLM")
    if f"{R}mode" in c.set_here and c.get(f"{R}mode") == "async":
        sheet.same(f"{R}mode", why="the only legal value; sampling is asynchronous here too")
    sheet.put("sampler.model", c.text(f"{M}path"), f"{M}path")
    sheet.put("sampler.dtype", c.text(f"{R}dtype"), f"{R}dtype")
    _lengths(c, sheet)
    for field in _NUMBERS:
        value = c.get(f"{R}{field}")
        sheet.put(f"sampler.{field}", value, f"{R}{field}")
    share = c.number(f"{R}gpu_memory_utilization")
    sheet.put(
        "sampler.gpu_memory_utilization",
        None if share is None else float(share),
        f"{R}gpu_memory_utilization",
    )
    device = _device(c, sheet)
    _parallel(c, sheet)
    _sleep(c, sheet)
    _arguments(c, sheet, device)
    if c.on(f"{R}calculate_log_probs"):
        sheet.same(f"{R}calculate_log_probs", why="the sampler always reports logprobs")
    for key, why in _OWN.items():
        if key in c.set_here:
            sheet.gap(key, why=why, decide=False)
    if c.on(f"{R}ignore_eos"):
        sheet.gap(f"{R}ignore_eos", why="a completion ends where the model ends it")
    if c.on(f"{R}multi_turn.enable"):
        sheet.gap(f"{R}multi_turn.enable", why="the loop of the recipes has one turn")


def _lengths(c: Composed, sheet: Sheet) -> None:
    prompt, answer = c.count("data.max_prompt_length"), c.count("data.max_response_length")
    if prompt is None or answer is None:
        return
    key = f"{R}max_model_len"
    sheet.put(
        "sampler.max_model_len",
        prompt + answer,
        "data.max_prompt_length",
        "data.max_response_length",
        key,
        note="prompt and completion",
    )
    given = c.count(key)
    if given is not None and given != prompt + answer:
        sheet.gap(
            key,
            why=f"{given}; a recipe's is the longest prompt and completion together, "
            f"{prompt + answer}",
            decide=given < prompt + answer,
        )


def _device(c: Composed, sheet: Sheet) -> Device:
    wanted = "npu" if c.on_npu else c.get("trainer.device")
    for device in get_args(Device):
        if device == wanted:
            sheet.put("sampler.device", wanted, "trainer.device")
            chosen: Device = device
            return chosen
    sheet.put("sampler.device", "cuda", "trainer.device")
    sheet.gap(
        "trainer.device",
        why=f"{wanted!r} is no device of rollout-vllm in this release ("
        f"{', '.join(get_args(Device))}); 'cuda' stands in its place",
    )
    return "cuda"


def _parallel(c: Composed, sheet: Sheet) -> None:
    tensor_key, data_key, experts_key = (
        f"{R}tensor_model_parallel_size",
        f"{R}data_parallel_size",
        f"{R}expert_parallel_size",
    )
    tensor, data = c.count(tensor_key) or 1, c.count(data_key) or 1
    experts = c.count(experts_key) or 1
    place = "rollout" if c.is_async else "trainer"
    ranks = (f"{place}.n_gpus_per_node", f"{place}.nnodes")
    devices = (c.count(ranks[0]) or 0) * (c.count(ranks[1]) or 0)
    replicas = devices // (tensor * data)
    sheet.put("sampler.tensor_parallel_size", tensor, tensor_key)
    sheet.put("sampler.expert_parallel_size", experts, experts_key)
    if replicas > 1 and experts == 1:
        sheet.put(
            "sampler.data_parallel_size",
            replicas * data,
            data_key,
            tensor_key,
            *ranks,
            note=f"{replicas} servers in verl, copies of one engine here",
        )
        return
    sheet.put("sampler.data_parallel_size", data, data_key)
    if replicas > 1:
        sheet.put(
            "num_samplers",
            replicas,
            experts_key,
            *ranks,
            note=f"servers of {tensor * data} devices, each with all experts",
        )
    elif devices and tensor * data > devices:
        sheet.gap(*ranks, why=f"{devices} devices are fewer than one server needs")


def _sleep(c: Composed, sheet: Sheet) -> None:
    free, mode = f"{R}free_cache_engine", f"{R}enable_sleep_mode"
    if c.is_async:
        if c.on(free) and free in c.set_here:
            sheet.gap(
                free,
                why="training and sampling have devices of their own, so nothing is to be freed",
                decide=False,
            )
        sheet.put("sampler.enable_sleep", False, mode, free)
        return
    sheet.put("sampler.enable_sleep", c.on(free) and c.get(mode) is not False, free, mode)


def _arguments(c: Composed, sheet: Sheet, device: Device) -> None:
    """Hand on those of vLLM's own arguments that `VllmConfig` takes."""
    given: dict[str, Value] = {}
    keys: dict[str, list[str]] = {}
    for path, value in c.below(_KWARGS).items():
        name, _, rest = path.partition(".")
        keys.setdefault(name, []).append(f"{_KWARGS}.{path}")
        if not rest:
            given[name] = value
        else:
            table = given.setdefault(name, {})
            if isinstance(table, dict):
                table[rest] = value
    for name, value in given.items():
        if name in {"enable_expert_parallel", "mm_processor_cache_gb"}:
            continue
        try:
            VllmConfig(
                model="model",
                max_model_len=2,
                gpu_memory_utilization=0.5,
                device=device,
                engine_args={name: value},
            )
        except ValueError as error:
            sheet.gap(*keys[name], why=str(error))
        else:
            sheet.put(f"sampler.engine_args.{name}", value, *keys[name])
