"""Gloo ranks as forks of one process that has imported everything and computed nothing yet."""

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.checkpoint.hf_storage
import torch.distributed.fsdp  # these take seconds: once for all ranks
from transformers.models.auto import modeling_auto
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3_moe import modeling_qwen3_moe

from parallel_state.process_group import init_process_group

MODULES = (torch._dynamo, modeling_auto, modeling_qwen3, modeling_qwen3_moe)
"""Imported before the forks."""

if importlib.util.find_spec("peft"):
    importlib.import_module("peft")

TIMEOUT_S = 60.0
"""How long ranks wait for each other before a test that hangs becomes one that fails."""


def run_ranks(world_size: int, meet: Path, work: Callable[[], None]) -> None:
    """Run `work` on every rank of a new group.

    Args:
        world_size: ranks, each a process of its own.
        meet: file that does not exist, where they meet.
        work: called without arguments when the group is there.

    Raises:
        RuntimeError: if a rank failed; its traceback is on stderr.
    """
    children = []
    for rank in range(world_size):
        child = os.fork()
        if child == 0:
            os._exit(_run_rank(rank, world_size, meet, work))
        children.append(child)
    failed = [rank for rank, child in enumerate(children) if os.waitpid(child, 0)[1] != 0]
    if failed:
        message = f"of {world_size} ranks, {failed} failed"
        raise RuntimeError(message)


def _run_rank(rank: int, world_size: int, meet: Path, work: Callable[[], None]) -> int:
    try:
        torch.set_num_threads(1)
        init_process_group(
            rank=rank,
            world_size=world_size,
            init_method=f"file://{os.fspath(meet)}",
            timeout_s=TIMEOUT_S,
        )
        work()
        dist.destroy_process_group()
    except BaseException:  # noqa: BLE001  # the parent is told by the exit status
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0
