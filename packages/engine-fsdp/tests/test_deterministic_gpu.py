"""Deterministic training on one GPU, over processes that know nothing of each other.

Two processes for each kind of model, which this file is also the program of, train at the same
time: one straight through, one that stops half way and goes on in a new engine from its checkpoint.
Each writes a digest of its whole state after every step. They train in bfloat16, with several
micro-batches a step, blocks that are computed again, and other tokens in every step.
"""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jaxtyping import Float
from safetensors.torch import save
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from engine_fsdp import FsdpConfig, FsdpEngine, OptimConfig
from parallel_state.process_group import init_process_group
from rl_contracts.packing import pack
from rl_contracts.rollout import PolicyVersion, Trajectory
from rl_contracts.train import LossOutput, PackedBatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]

KINDS = ("qwen3", "qwen3_moe")
RUNS = ("straight", "resumed")
LENGTHS = (300, 7, 513, 64, 129, 1000, 2, 90)
"""Several blocks of an attention kernel's queries, and rows that end inside of one."""

NUM_STEPS = 4
STOP = 2
"""Steps before the checkpoint of the run that is resumed."""

VOCAB_SIZE = 4096
TIMEOUT_S = 120.0

Finished = dict[tuple[str, str], Path | str]
"""File of digests, or what a process that failed said, by kind and run."""


def save_model(folder: Path, kind: str) -> None:
    """Small, but with whole tiles of a matrix product, and tokens that repeat within a batch."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "tie_word_embeddings": True,
    }
    experts: dict[str, Any] = {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
    }
    config = Qwen3Config(**settings) if kind == "qwen3" else Qwen3MoeConfig(**settings, **experts)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def batches(step: int) -> list[PackedBatch]:
    """Other tokens in every step, in several micro-batches."""
    generator = torch.Generator().manual_seed(step)
    rows = [
        Trajectory(
            trajectory_id=str(index),
            group_id="g",
            token_ids=tuple(torch.randint(64, (n,), generator=generator).tolist()),
            loss_mask=(False,) + (True,) * (n - 1),
            rollout_logprobs=(-1.0,) * n,
            oldest_version=PolicyVersion(0),
            newest_version=PolicyVersion(0),
        )
        for index, n in enumerate(LENGTHS)
    ]
    return pack(rows, [1.0, -2.0, 0.5, 3.0, -1.0, 1.5, 2.0, -0.5], max_tokens=1100)[0]


def loss_fn(policy_logprobs: Float[Tensor, " tokens"], batch: PackedBatch) -> LossOutput:
    """Advantage-weighted log-probabilities."""
    per_token = batch.advantages.repeat_interleave(batch.cu_seqlens.diff())
    return LossOutput(loss=-(policy_logprobs * per_token).sum() / sum(LENGTHS), metrics={})


def digest(engine: FsdpEngine) -> str:
    """Of the bits of weights, moments and version."""
    state = engine._state.tensors(engine.policy_version)
    whole = {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in state.items()
    }
    return hashlib.sha256(save({n: t.cpu().contiguous() for n, t in whole.items()})).hexdigest()


def train(folder: Path, device: torch.device, *, checkpoint: Path | None) -> list[str]:
    """Digests of the start and after every step; stops and resumes if given where to save."""
    config = FsdpConfig(
        model_path=str(folder),
        optim=OptimConfig(learning_rate=0.01),
        activation_checkpointing="full",
        deterministic=True,
    )
    engine = FsdpEngine(config, device=device)
    digests = [digest(engine)]
    for step in range(NUM_STEPS):
        if checkpoint is not None and step == STOP:
            engine.save_checkpoint(checkpoint)
            engine = FsdpEngine(config, device=device)
            engine.load_checkpoint(checkpoint)
        engine.forward_backward(batches(step), loss_fn)
        engine.optim_step()
        digests.append(digest(engine))
    return digests


def main(kind: str, run: str, folder: Path, device_name: str) -> None:
    """One process's part: write its digests to a file."""
    device = torch.device(device_name)
    init_process_group(backend="cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    checkpoint = folder / f"{kind}-checkpoint" if run == "resumed" else None
    found = train(folder / kind, device, checkpoint=checkpoint)
    (folder / f"{kind}-{run}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """All runs of all kinds at once: where each left its digests, or why it failed."""
    folder = tmp_path_factory.mktemp("deterministic")
    for kind in KINDS:
        save_model(folder / kind, kind)
    # What torch asks for, before cuBLAS is there.
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    processes = {
        (kind, run): subprocess.Popen(
            [sys.executable, __file__, kind, run, folder, "cuda:0"],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for kind in KINDS
        for run in RUNS
    }
    found: Finished = {}
    try:
        for (kind, run), process in processes.items():
            _, error = process.communicate(timeout=TIMEOUT_S)
            written = folder / f"{kind}-{run}.json"
            found[kind, run] = error if process.returncode else written
    finally:
        for process in processes.values():
            process.kill()
    return found


def digests(finished: Finished, kind: str) -> list[list[str]]:
    """Of the run that went straight through, and of the one that was resumed."""
    found = []
    for run in RUNS:
        written = finished[kind, run]
        assert isinstance(written, Path), written
        found.append(json.loads(written.read_text()))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_train_alike(finished: Finished, kind: str) -> None:
    """Bit for bit after every step; and every step changed something."""
    straight, resumed = digests(finished, kind)
    assert len(set(straight)) == NUM_STEPS + 1
    assert resumed[: STOP + 1] == straight[: STOP + 1]


@pytest.mark.parametrize("kind", KINDS)
def test_resuming_is_not_having_stopped(finished: Finished, kind: str) -> None:
    """The steps of a new engine after a checkpoint are those of the one that went on."""
    straight, resumed = digests(finished, kind)
    assert resumed[STOP + 1 :] == straight[STOP + 1 :]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4])
