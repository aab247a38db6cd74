"""What a script hands to verl, without running it."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))

from verl_conversion.arithmetic import with_arithmetic_done
from verl_conversion.launches import LaunchError, launch_of, notes_of, read_launches

SCRIPT = r"""#!/usr/bin/env bash
set -xeuo pipefail
ENGINE=${1:-vllm}
DEVICE=${DEVICE:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}
NNODES=${NNODES:-1}
prompt=$((1024 * 2))
answer=$((1024 * 8))
budget=$(((prompt + answer) * 3))
case "${DEVICE}" in
    gpu) devices=8 ;;
    npu)
        export HCCL_BUFFSIZE=610
        export CKPT_DIR=./ckpt
        devices=16
        ;;
    *) exit 1 ;;
esac
DATA=(
    data.train_files=a.parquet
    "data.val_files=['b.parquet', 'c.parquet']"   # a list
    data.max_prompt_length=${prompt}
)
ROLLOUT=(actor_rollout_ref.rollout.name=$ENGINE)
if [ "$DEVICE" = npu ]; then
    ROLLOUT+=(+actor_rollout_ref.rollout.enable_sleep_mode=False)
fi
PLACES="trainer.nnodes=$NNODES trainer.n_gpus_per_node=$devices"
export VLLM_USE_V1=1
uv run --frozen python3 -m verl.trainer.main_ppo \
    --config-name='ppo_trainer.yaml' \
    "${DATA[@]}" "${ROLLOUT[@]}" $PLACES \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$budget \
    trainer.default_local_dir=$CKPT_DIR \
    trainer.logger=['console','tensorboard'] \
    "$@" 2>&1 | tee run.log
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "run.sh"
    file.write_text(SCRIPT, encoding="utf-8")
    return file


def test_arrays_variables_arithmetic_and_lists_are_resolved(script: Path) -> None:
    (found,) = read_launches(script, caller={"DEVICE": "npu"})
    assert [argument.text for argument in found.overrides] == [
        "data.train_files=a.parquet",
        "data.val_files=['b.parquet', 'c.parquet']",
        "data.max_prompt_length=2048",
        "actor_rollout_ref.rollout.name=vllm",
        "+actor_rollout_ref.rollout.enable_sleep_mode=False",
        "trainer.nnodes=1",
        "trainer.n_gpus_per_node=16",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=30720",
        "trainer.default_local_dir=./ckpt",
        "trainer.logger=[console,tensorboard]",
    ]
    assert all(argument.known for argument in found.overrides)
    assert found.environ == {"HCCL_BUFFSIZE": "610", "CKPT_DIR": "./ckpt", "VLLM_USE_V1": "1"}
    assert found.program == "main_ppo"


def test_a_variable_that_one_way_leaves_unset_is_not_known(script: Path) -> None:
    (found,) = read_launches(script, caller={"DEVICE": "gpu"})
    (unknown,) = (argument for argument in found.overrides if not argument.known)
    assert unknown.text == "trainer.default_local_dir=?"
    (given,) = read_launches(script, caller={"DEVICE": "gpu", "CKPT_DIR": ""})
    assert "trainer.default_local_dir=" in [argument.text for argument in given.overrides]


def test_every_way_is_followed_where_nobody_says_which(script: Path) -> None:
    ways = read_launches(script)
    devices = {
        argument.text
        for way in ways
        for argument in way.overrides
        if argument.text.startswith("trainer.n_gpus_per_node")
    }
    assert devices == {"trainer.n_gpus_per_node=8", "trainer.n_gpus_per_node=16"}
    assert any("says nothing" in note or "without any NPU" in note for note in notes_of(script))


def test_arguments_take_the_place_of_the_callers(script: Path) -> None:
    (found,) = read_launches(script, more=["data.seed=1"], caller={"DEVICE": "npu"})
    assert found.overrides[-1].text == "data.seed=1"
    assert found.dropped == ()
    script.write_text("python -m verl.trainer.main_ppo a=1\n", encoding="utf-8")
    with pytest.raises(LaunchError, match=r'expected one "\$@" among the arguments'):
        read_launches(script, more=["data.seed=1"])


@pytest.mark.parametrize(
    "command",
    [
        "nohup python3 -u -m verl.trainer.main_ppo a=1 > log &",
        "HYDRA_FULL_ERROR=1 python3 -m verl.trainer.main_ppo a=1",
        "torchrun --nproc 1 verl/trainer/main_ppo.py a=1",
        "ray job submit --working-dir . -- python3 -m verl.trainer.main_ppo a=1",
        "/opt/conda/bin/python3 -m verl.trainer.main_ppo a=1",
        'P=python3\n"$P" -m verl.trainer.main_ppo \\\n  a=1',
        "run() { python -m verl.trainer.main_ppo $1; }\nrun a=1",
        'L=(python3)\n[ "$U" = 0 ] || L=(uv run python3)\n"${L[@]}" -m verl.trainer.main_ppo a=1',
        "for x in 1; do python -m verl.trainer.main_ppo a=$x; done",
    ],
)
def test_ways_to_start_it(command: str, tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text(command + "\n", encoding="utf-8")
    (found,) = read_launches(file)
    assert [argument.text for argument in found.overrides] == ["a=1"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("echo hello\n", "no launch of verl was found"),
        ("python -m verl.trainer.main_ppo 'a\n", "the quote ' is not closed"),
        ("python -m verl.trainer.main_ppo --config-name=mine a=1\n", "expected ppo_trainer"),
    ],
)
def test_scripts_that_cannot_be_read(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(LaunchError, match=message):
        read_launches(file)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{", "is not valid JSON"),
        (json.dumps({"env": {}}), "expected a list of arguments"),
        (json.dumps([1]), "expected a list of arguments"),
        (json.dumps({"argv": [], "env": {"A": 1}}), "expected env to be a table of texts"),
        (json.dumps(["python3", "train.py"]), "expected the arguments of a launch of verl"),
    ],
)
def test_json_that_is_no_launch(value: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "argv.json"
    file.write_text(value, encoding="utf-8")
    with pytest.raises(LaunchError, match=message):
        read_launches(file)


def test_the_program_decides_which_defaults_count() -> None:
    argv = ["-m", "verl.experimental.fully_async_policy.fully_async_main", "--config-path=config"]
    assert launch_of(argv).program == "fully_async"


def test_arithmetic_is_that_of_a_shell() -> None:
    assert with_arithmetic_done("a=7\nb=$((a / 2 - 5))\nc=$((b % 3))") == "a=7\nb=-2\nc=-2"
    assert with_arithmetic_done("N=${N:-4}\nx=$((N*$N))") == "N=${N:-4}\nx=16"
    # assigned twice, or not at all, or no number: not known
    wide = "a=$((9223372036854775807 * 2))"  # a shell would wrap it around
    for text in (
        wide,
        "a=1\na=2\nb=$((a))",
        "b=$((a))",
        "b=$((1 / 0))",
        "b=$((2 ** 3))",
        "b=$((a++))",
    ):
        assert with_arithmetic_done(text) == text
