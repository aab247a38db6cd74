"""Asynchronous runs of 8 to 1024 devices, simulated around the real scheduler on one core.

``published`` sets simulated seconds per step beside those that verl published for its fully
asynchronous trainer (benchmarks/published/verl_fully_async.json), in both orders of consumption.
``split`` says for a job how many devices should sample and how many train, and draws the curve::

    ./run benchmarks/async_simulation.py published --output benchmarks/results/async_published.json
    ./run benchmarks/async_simulation.py split --output benchmarks/results/async_split.json

What is modelled is described in simulator.py. Two numbers of the published runs are not published,
the median and the spread of the lengths; they were chosen so that the colocated run agrees. The
trainer's two numbers follow from the published update times, the sampler's from the sampling time
of the colocated run, which is that of its longest answers.
"""

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from simulator import Outcome, Samplers, Simulation, Training, lognormal_lengths

from async_policy import ConsumptionOrder, SchedulerConfig, VerlAsyncSettings, from_verl

PUBLISHED = Path(__file__).parent / "published" / "verl_fully_async.json"

PROMPTS = 512
"""Prompts between two publishes in the published runs."""

MINI_BATCH = 32
"""Their prompts per optimizer step (`ppo_mini_batch_size`)."""

GROUP_SIZE = 16
LONGEST = 28 * 1024

BASE_S = 0.0055
"""Seconds per token: 28672 tokens in 158 s, to which requests add what leads to 178."""

PER_REQUEST_S = 0.00003

TENSOR_SIZE = 4
"""Devices of one replica (`gen_tp`)."""

PER_FETCH_S = 7.0
"""From the update times: 181, 128 and 95 s with 16, 8 and 4 batches of the same prompts."""

PER_PROMPT_S = 0.13
"""The rest of those 95 s, for 512 prompts on 64 devices."""

PUBLISH_S = 4.0
"""Sending 7B parameters, and starting again."""


def lengths(path: Path | None) -> Callable[[int], list[int]]:
    """Lengths of a group's samples: from a file of measured ones, or as in the published runs.

    Raises:
        ValueError: if the file holds no lists of lengths.
    """
    if path is None:
        return lognormal_lengths(
            median=900.0, sigma=1.0, longest=LONGEST, group_size=GROUP_SIZE, spread=0.5, seed=0
        )
    groups: list[list[int]] = json.loads(path.read_text(encoding="utf-8"))
    if not groups or not all(
        isinstance(group, list) and group and all(isinstance(n, int) and n > 0 for n in group)
        for group in groups
    ):
        message = f"{path}: expected a JSON list of groups, each a list of lengths in tokens"
        raise ValueError(message)
    return lambda index: groups[index % len(groups)]


def colocated(num_devices: int, sample_lengths: Callable[[int], list[int]]) -> Outcome:
    """Sampling and training in turn on all devices, with the published training times."""
    numbers = json.loads(PUBLISHED.read_text(encoding="utf-8"))["colocated"]
    return Simulation(
        SchedulerConfig(num_steps=5, groups_per_step=PROMPTS),
        samplers(num_devices),
        Training(
            per_step_s=0.0,
            per_group_s=(numbers["logprobs"] + numbers["update"]) / PROMPTS,
            publish_s=10.0,
            colocated=True,
        ),
        lengths=sample_lengths,
    ).run()


def samplers(num_devices: int) -> Samplers:
    """Replicas on as many devices."""
    return Samplers(
        num_replicas=max(1, num_devices // TENSOR_SIZE),
        max_requests=256,
        base_s=BASE_S,
        per_request_s=PER_REQUEST_S,
    )


def separate(
    *,
    sampling: int,
    training: int,
    threshold: float,
    require_batches: int,
    order: ConsumptionOrder,
    sample_lengths: Callable[[int], list[int]],
    num_periods: int = 10,
) -> tuple[float, Outcome]:
    """Seconds per `PROMPTS` prompts of a run with devices of its own for each side.

    A scheduler step is what the published trainer takes at once, `require_batches` mini-batches.
    """
    fetch = MINI_BATCH * require_batches
    publish_every = PROMPTS // fetch
    translated = from_verl(
        VerlAsyncSettings(
            total_rollout_steps=num_periods * PROMPTS,
            ppo_mini_batch_size=fetch,
            staleness_threshold=threshold,
            trigger_parameter_sync_step=publish_every,
        )
    )
    outcome = Simulation(
        SchedulerConfig(
            num_steps=translated.schedule.num_steps,
            groups_per_step=fetch,
            max_staleness=translated.schedule.max_staleness,
            max_lead_groups=translated.schedule.max_lead_groups,
            order=order,
        ),
        samplers(sampling),
        Training(
            per_step_s=PER_FETCH_S,
            per_group_s=PER_PROMPT_S * 64 / training,
            publish_every=translated.publish_every,
            publish_s=PUBLISH_S,
        ),
        lengths=sample_lengths,
    ).run()
    return publish_every * outcome.seconds_per_step(skip=2 * publish_every), outcome


def published(sample_lengths: Callable[[int], list[int]]) -> dict[str, object]:
    """The published tables, simulated in both orders."""
    numbers = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    rows: list[dict[str, object]] = []
    in_turn = colocated(128, sample_lengths).seconds_per_step(skip=0)
    rows.append({"run": "colocated", "published_s": numbers["colocated"]["seconds"],
                 "completion_s": in_turn, "data_s": in_turn})  # fmt: skip
    cases = [
        (f"staleness_threshold {x}", 64, float(x), 4, seconds)
        for x, seconds in numbers["staleness_threshold"].items()
    ]
    cases += [
        (f"require_batches {x}", 64, 0.5, int(x), seconds)
        for x, seconds in numbers["require_batches"].items()
    ]
    cases += [
        (f"{x} sample, {x} train", int(x), 0.5, 4, seconds)
        for x, seconds in numbers["devices_sampling_and_training"].items()
    ]
    for name, devices, threshold, require_batches, seconds in cases:
        row: dict[str, object] = {"run": name, "published_s": seconds}
        orders: Sequence[ConsumptionOrder] = ("completion", "data")
        for order in orders:
            simulated, outcome = separate(
                sampling=devices,
                training=devices,
                threshold=threshold,
                require_batches=require_batches,
                order=order,
                sample_lengths=sample_lengths,
            )
            row |= {
                f"{order}_s": simulated,
                f"{order}_trainer_idle": outcome.trainer_idle,
                f"{order}_staleness": {str(k): n for k, n in outcome.staleness.items()},
            }
        rows.append(row)
    print(f"{'':26}{'published':>10}{'completion order':>18}{'data order':>12}   seconds per step")
    for row in rows:
        print(
            f"{row['run']:26}{row['published_s']:10.0f}{row['completion_s']:18.0f}"
            f"{row['data_s']:12.0f}"
        )
    return {"source": numbers["source"], "unit": numbers["unit"], "rows": rows}


def split(
    devices: Sequence[int], sample_lengths: Callable[[int], list[int]], plot: Path | None
) -> dict[str, object]:
    """For each number of devices, the seconds per step of every split, and the best one."""
    results: dict[str, Mapping[str, object]] = {}
    for total in devices:
        seconds = {}
        for eighth in range(1, 8):
            sampling = total * eighth // 8 // TENSOR_SIZE * TENSOR_SIZE
            if not 0 < sampling < total:
                continue
            seconds[sampling], _ = separate(
                sampling=sampling,
                training=total - sampling,
                threshold=0.5,
                require_batches=4,
                order="completion",
                sample_lengths=sample_lengths,
                num_periods=6,
            )
        best = min(seconds, key=lambda count: seconds[count])
        results[str(total)] = {
            "best_sampling_devices": best,
            "seconds_per_step": {str(count): s for count, s in seconds.items()},
        }
        print(
            f"{total:5} devices: {best} sample and {total - best} train, "
            f"{seconds[best]:.1f} s per step (with {min(seconds)} sampling "
            f"{seconds[min(seconds)]:.1f} s, with {max(seconds)} {seconds[max(seconds)]:.1f} s)"
        )
    if plot is not None:
        draw(results, plot)
    return {"splits": results}


def draw(results: Mapping[str, Mapping[str, object]], path: Path) -> None:
    """Speed over the share of devices that sample, one line for each number of devices."""
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for total, result in results.items():
        seconds = result["seconds_per_step"]
        assert isinstance(seconds, dict)  # noqa: S101
        shares = [int(count) / int(total) for count in seconds]
        rates = [PROMPTS / s / int(total) for s in seconds.values()]
        axes.plot(shares, rates, marker="o", label=f"{total} devices")
    axes.set_xlabel("share of the devices that sample")
    axes.set_ylabel("prompts per second and device")
    axes.set_ylim(bottom=0.0)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("published", "split"))
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 32, 128, 512, 1024])
    parser.add_argument("--lengths", type=Path, help="JSON list of groups, each a list of tokens")
    parser.add_argument("--plot", type=Path, help="PNG of the splits")
    parser.add_argument("--output", type=Path, help="JSON")
    arguments = parser.parse_args()
    begin = time.process_time()
    sample_lengths = lengths(arguments.lengths)
    if arguments.what == "published":
        result = published(sample_lengths)
    else:
        result = split(arguments.devices, sample_lengths, arguments.plot)
    result["cpu_s"] = time.process_time() - begin
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
