"""What a machine lacks for a job, said before anything starts."""

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
import torch
from safetensors.torch import save_file

from rollout_vllm import VllmConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from missing import what_is_missing

if TYPE_CHECKING:
    from conduct import Job


def test_room_for_the_bucket_in_the_samplers_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2^20 weights of 2 bytes take 4 MiB where they are sampled in 4, of 3 free; 2^30 at most."""
    rows = torch.zeros(1, dtype=torch.bfloat16).expand(2**10, 2**10).contiguous()
    save_file({"w": rows}, tmp_path / "model.safetensors")
    config = VllmConfig(model=str(tmp_path), dtype="float32", max_model_len=16, kv_cache_gib=1.0)
    job = cast("Job", SimpleNamespace(sampler=config, needs=[tmp_path / "train.parquet"]))
    free = SimpleNamespace(free=3 * 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    absent, room = what_is_missing(job)
    assert absent == f"expected the file {tmp_path / 'train.parquet'}, and there is none"
    assert f"0.00293 GiB are free; for {tmp_path} it takes 0.00391" in room
    free.free = 4 * 2**20
    assert len(what_is_missing(job)) == 1
    monkeypatch.setattr("missing.num_weights", lambda _: 2**40)
    free.free = 2**30
    assert len(what_is_missing(job)) == 1


def test_on_gpus_no_room_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights never leave the devices."""
    config = VllmConfig(model=str(tmp_path), device="cuda", max_model_len=16, kv_cache_gib=1.0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    monkeypatch.setattr("missing.num_weights", lambda _: 2**40)
    assert what_is_missing(cast("Job", SimpleNamespace(sampler=config, needs=[]))) == []
