"""The recipes: every one to its end at tiny size, and what each says of its full size."""

import functools
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import attrs
import pytest
import torch
from safetensors.torch import load_file

from rl_contracts import ConfigError, load_config
from rl_metrics import StepRecord, read_metrics

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from grpo_trainer.run_qwen3_30b_veomni import full
from launch import main
from recipe import Recipe, make_job
from run_folder import RunFolder
from tiny_models import model_folder, tiny_model

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
RECIPES = (
    "grpo_trainer/run_qwen3_30b_veomni.py",
    "grpo_trainer/run_qwen3_1_7b_fsdp.py",
    "gspo_trainer/run_qwen3_32b_fsdp.py",
    "dapo_trainer/run_qwen3_30b_a3b_fsdp_async.py",
    "grpo_trainer/run_qwen3_vl_30b_veomni.py",
)


def run_here(recipe: str, *arguments: str) -> int:
    """What the recipe's `main` does, without a process of its own."""
    module = importlib.import_module(recipe.removesuffix(".py").replace("/", "."))
    return main(
        Recipe,
        functools.partial(make_job, name=module.NAME, title="", loop=module.train),
        name=module.NAME,
        description=module.__doc__ or "",
        sizes=module.SIZES,
        argv=arguments,
    )


def finished(recipe: str, tmp_path: Path, *arguments: str) -> tuple[Path, list[StepRecord]]:
    """Run folder and records of a tiny run of 20 steps."""
    done = subprocess.run(
        [
            *(sys.executable, EXAMPLES / recipe, "--size", "tiny", f"run.folder={tmp_path}"),
            *("loop.num_steps=20", "loop.evaluate_every=10", *arguments),
        ],
        check=False,
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "PYTHONPATH": str(EXAMPLES)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = tmp_path.iterdir()
    return folder, read_metrics(folder / "metrics.jsonl")


def heldout(records: list[StepRecord]) -> list[float]:
    return [r.values["reward/heldout/mean"] for r in records if "reward/heldout/mean" in r.values]


def column(records: list[StepRecord], name: str) -> Iterator[float]:
    return (record.values[name] for record in records[1:])


@pytest.mark.slow
def test_experts_learn_and_sampler_and_trainer_agree(tmp_path: Path) -> None:
    """Two ranks that each hold half of the experts learn to sort; logprobs agree to 1e-4 nats.

    In turn (`--sync`), so that every batch was sampled from the very weights that it meets in the
    trainer: a weight that was transferred wrongly would show as nats, not as 1e-4. The divergence
    from the reference begins at exactly 0, and grows.
    """
    folder, records = finished(RECIPES[0], tmp_path, "--sync")
    assert heldout(records)[-1] > heldout(records)[0] + 0.2
    assert max(column(records, "mismatch/logprob/mean")) < 1e-4
    assert max(column(records, "staleness/trajectory/max")) == 0
    divergence = list(column(records, "kl/ref/mean"))
    assert divergence[0] == 0.0
    assert divergence[-1] > 1e-3
    effective = (folder / "effective_config.toml").read_text(encoding="utf-8")
    assert "extra_parallel_sizes = { ep = 2 }  # default; read by parallel_state" in effective
    assert (folder / "model" / "model.safetensors").is_file()


@pytest.mark.slow
def test_two_ranks_that_share_sequences_learn(tmp_path: Path) -> None:
    """GSPO with Ulysses over two ranks: both get the same rows, and the policy learns.

    A KL term takes effect if it is asked for, though the recipe has none; without checkpoints the
    last step is measured and recorded all the same.
    """
    folder, records = finished(
        RECIPES[2], tmp_path, "loop.loss.kl.coefficient=0.001", "run.checkpoint_every=none"
    )
    assert [record.step for record in records] == list(range(21))
    assert "reward/heldout/mean" in records[-1].values
    assert RunFolder(path=folder).store.latest() is None
    assert next(column(records, "kl/ref/mean")) == pytest.approx(0.0, abs=1e-6)
    assert list(column(records, "kl/ref/mean"))[-1] > 0.0
    assert heldout(records)[-1] > heldout(records)[0] + 0.1
    assert max(column(records, "staleness/trajectory/max")) == 1


@pytest.mark.slow
def test_asynchronous_groups_learn_within_their_bound(tmp_path: Path) -> None:
    """DAPO up to three steps late, published every second step: it learns, and no later.

    Steps are full, of groups with a signal; the best checkpoint stays beside the newest.
    """
    folder, records = finished(
        RECIPES[3], tmp_path, "run.keep_best=true", "run.checkpoint_every=10"
    )
    assert heldout(records)[-1] > heldout(records)[0] + 0.1
    assert 1 <= max(column(records, "staleness/trajectory/max")) <= 3
    assert set(column(records, "batch/trained/sequences")) == {16 * 8}
    best = RunFolder(path=folder).store.best()
    assert best is not None
    assert best.value == max(heldout(records)[1:])
    published = [r.step for r in records[1:] if "time/publish/seconds" in r.values]
    assert published == list(range(2, 21, 2))


@pytest.mark.slow
def test_a_small_model_learns(tmp_path: Path) -> None:
    """GRPO with a KL term through engine-fsdp; TensorBoard gets the metrics too."""
    folder, records = finished(RECIPES[1], tmp_path, 'run.trackers=[{kind="tensorboard"}]')
    assert heldout(records)[-1] > heldout(records)[0] + 0.1
    assert next(column(records, "kl/ref/mean")) == pytest.approx(0.0, abs=1e-6)
    (events,) = (folder / "tensorboard").iterdir()
    assert events.stat().st_size > 0
    effective = (folder / "effective_config.toml").read_text(encoding="utf-8")
    assert 'trackers = [{ kind = "tensorboard" }]  # command line' in effective


@pytest.mark.slow
def test_a_model_that_sees_learns(tmp_path: Path) -> None:
    """Pictures reach sampler and trainer alike: logprobs agree to 1e-4 nats, colours are learnt.

    In turn (`--sync`), over two ranks with half of the experts each; the vision tower is trained
    and published too, or the logprobs would part after the first step.
    """
    folder, records = finished(RECIPES[4], tmp_path, "--sync")
    assert heldout(records)[-1] > heldout(records)[0] + 0.2
    assert max(column(records, "mismatch/logprob/mean")) < 1e-4
    assert next(column(records, "kl/ref/mean")) == 0.0
    begin = load_file(model_folder("qwen3_vl_moe") / "model.safetensors")
    end = load_file(folder / "model" / "model.safetensors")
    assert end.keys() == begin.keys()
    towers = [name for name in begin if name.startswith("model.visual.")]
    assert all(not torch.equal(begin[name], end[name]) for name in towers)
    assert (folder / "model" / "processor_config.json").is_file()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_slice_is_the_recipe_on_one_device(
    recipe: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """What the algorithm is stays as it is; a prediction needs no model, and refuses nothing."""
    module = importlib.import_module(recipe.removesuffix(".py").replace("/", "."))
    whole: Recipe = module.full()
    part: Recipe = module.SIZES["slice"]()
    assert part.engine.parallel.world_size == 1
    assert part.sampler.num_devices == 1
    assert part.sampler.enable_sleep
    assert part.loop.loss == whole.loop.loss
    assert part.loop.group_size == whole.loop.group_size
    assert part.loop.max_staleness == whole.loop.max_staleness
    assert part.loop.num_steps >= 2 * part.loop.publish_every
    assert attrs.evolve(part.engine, model_path="", parallel=whole.engine.parallel) == (
        attrs.evolve(whole.engine, model_path="")
    )
    assert run_here(recipe, "--size", "slice", "--dry-run", f"run.folder={tmp_path}") == 0
    shown = capsys.readouterr().out
    assert "no prediction" not in shown
    assert "refused" not in shown.split("# refused on this machine")[0]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_laptop_shows_the_full_size(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--dry-run` loads nothing, prints a configuration that reads back, and says what is missing.

    The same without it is refused with the same words, before anything starts.
    """
    assert run_here(recipe, "--dry-run") == 0
    shown = capsys.readouterr().out
    file = tmp_path / "recipe.toml"
    file.write_text(shown, encoding="utf-8")
    assert load_config(Recipe, file=file).value.sampler.device == "cuda"
    assert "# the trainer's ranks\n" in shown
    assert "# predicted for h200\n" in shown
    assert "# memory of a device, GiB" in shown
    assert "# refused\n" not in shown  # it fits
    assert run_here(recipe, f"run.folder={tmp_path / 'runs'}") == 2
    refused = capsys.readouterr().err
    assert all(f"# {line}\n" in shown for line in refused.splitlines())
    assert "expected the file models/Qwen3-" in refused
    assert "sampler.device = 'cuda', and this machine has cpu (" in refused
    assert not (tmp_path / "runs").exists()


def test_a_layout_that_does_not_fit_is_found_on_a_laptop(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Eight devices of 80 GB hold no 30B-A3B whose optimizer stays on them beside a sampler."""
    assert run_here(RECIPES[0], "--dry-run", "--device", "h100-80g") == 0
    shown = capsys.readouterr().out
    assert "#   - does not fit by " in shown
    assert "#     do: " in shown
    assert "# what is predicted for h100-80g: see `refused` above" in shown
    assert run_here(RECIPES[0], "--dry-run", "--device", "b300") == 0
    assert "# device 'b300': expected one of h200, " in capsys.readouterr().out


def test_a_tiny_run_that_cannot_be_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """Three ranks cannot share four heads, on a CPU as elsewhere."""
    tiny_model("qwen3")  # whose sizes the prediction reads
    three = ("--size", "tiny", "--dry-run", "engine.parallel.ulysses_size=3")
    assert run_here(RECIPES[2], *three) == 0
    assert "# what is predicted for cpu: see `refused` above" in capsys.readouterr().out
    assert run_here(RECIPES[2], "--size", "tiny", "--dry-run") == 0
    assert "# nothing: it would run" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loop.temperature": "0.7"}, "engine.temperature = 1.0 and loop.temperature = 0.7"),
        ({"sampler.model": "elsewhere"}, "and sampler.model = 'elsewhere'"),
        (
            {"sampler.dtype": "float16"},
            "the engine's export_dtype = 'bfloat16' and sampler.dtype = 'float16'",
        ),
        (
            {"loop.max_new_tokens": "4096"},
            "data.max_prompt_tokens + loop.max_new_tokens = 2048 + 4096 = 6144; set it to 6144",
        ),
        (
            {"loop.max_tokens_per_micro_batch": "1024"},
            "loop.max_tokens_per_micro_batch = 1024 holds no row of 10240 tokens",
        ),
        ({"sampler.engine_args.enable_expert_parallel": "true"}, "use VllmConfig.expert_parallel"),
        ({"engine.parallel.extra_parallel_sizes.epp": "8"}, "epp"),
        ({"engine.strategy": "fsdp2"}, "unknown setting"),
        (
            {"num_samplers": "2", "sampler.server.port": "8000"},
            "sampler.server.port = 8000 with num_samplers = 2: one port has one server",
        ),
        ({"engine.router_replay": "logprobs"}, "there are no routes to replay"),
        ({"engine.router_statistics": "true"}, "the loop records none of them"),
        ({"sampler.load_format": "dummy"}, "which would be with random weights"),
        (
            {"num_samplers": "2", "sampler.server.port": "8000"},
            "they cannot share a port; set it to 0",
        ),
        (
            {
                "sampler.lora.rank": "8",
                "sampler.lora.alpha": "16",
                "sampler.lora.target_modules": '["q_proj"]',
                "sampler.enable_sleep": "false",
                "sampler.data_parallel_size": "1",
                "sampler.expert_parallel_size": "1",
            },
            "the trainer sends whole weights, with adapters merged into them",
        ),
        (
            {"run.keep_best": "true", "run.checkpoint_every": "none"},
            "run.keep_best = True keeps one of the checkpoints, and run.checkpoint_every says",
        ),
        ({"sampler.seed": "1"}, "which follows from loop.seed; set that"),
        (
            {"run.keep_best": "true", "run.checkpoint_every": "70"},
            "no step before the last of 200 is both evaluated (loop.evaluate_every = 50)",
        ),
        (
            {"run.trackers": '[{kind="tensorboard"}, {kind="tensorboard"}]'},
            "trackers: expected each kind at most once, got tensorboard again",
        ),
    ],
)
def test_parts_that_do_not_agree_are_refused(
    changes: Mapping[str, str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What two configurations must agree on is compared before anything starts."""
    overrides = [f"{name}={value}" for name, value in changes.items()]
    assert run_here(RECIPES[0], "--dry-run", *overrides) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("engine.offload=parameters",), "engine.offload = 'parameters': on a CPU"),
        (
            ("engine.offload_activations=true", "engine.activation_checkpointing=full"),
            "engine.offload_activations = True is for GPUs; set it to False",
        ),
        (
            ("engine.compile_blocks=true", "engine.compute_dtype=bfloat16"),
            "engine.compile_blocks = True is for GPUs",
        ),
    ],
)
def test_what_the_cpu_leaves_without_effect_is_refused(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not by the engine in its process, half a minute later."""
    assert run_here(RECIPES[1], "--size", "tiny", "--dry-run", *arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--resume", "--size", "tiny"), "leave --size out"),
        (("--size", "tiny", "--device", "h200"), "--device is for the predictions of --dry-run"),
    ],
)
def test_an_option_without_effect_is_refused(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A resumed run has its configuration, and a run needs no prediction."""
    with pytest.raises(SystemExit, match="2"):
        run_here(RECIPES[1], *arguments)
    assert message in capsys.readouterr().err


def test_a_run_of_another_recipe_is_not_gone_on_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its configuration would be accepted, and another loop would go on with it."""
    assert run_here(RECIPES[1], "--size", "tiny", "--dry-run") == 0
    folder = RunFolder.create(tmp_path, "grpo")
    folder.write_config(capsys.readouterr().out)
    folder.check_identity({"example": "grpo-qwen3-1.7b-fsdp"})
    assert run_here(RECIPES[2], "--resume", str(folder.path)) == 2
    message = "example was 'grpo-qwen3-1.7b-fsdp' and is 'gspo-qwen3-32b-fsdp' now"
    assert message in capsys.readouterr().err


def test_another_engine_is_one_value() -> None:
    """The mixture of experts goes to engine-fsdp by another engine configuration alone."""
    made = load_config(
        Recipe,
        overrides=[
            "engine.kind=fsdp",
            "engine.model_path=models/Qwen3-30B-A3B",
            "engine.optim.learning_rate=1e-6",
        ],
        defaults=full(),
    ).value
    assert type(made.engine).__name__ == "FsdpConfig"
    assert made.sampler == full().sampler
    with pytest.raises(ConfigError, match=r"engine\.model_path: required setting is missing"):
        load_config(Recipe, overrides=["engine.kind=fsdp"], defaults=full())
