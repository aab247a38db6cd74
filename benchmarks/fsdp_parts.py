"""What the GPU benchmarks of engine-fsdp share: models, tokens, the engine's step, and clocks."""

import json
import os
import shutil
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final
from unittest import mock

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from engine_fsdp import FsdpConfig, FsdpEngine, OptimConfig, model
from rl_contracts import PolicyVersion, Trajectory
from rl_contracts.packing import pack
from rl_contracts.train import LossOutput, PackedBatch

SIZES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3-1.7b": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
    },
}
"""Of Qwen/Qwen3-0.6B, -1.7B and -8B (their config.json), and one to see that it runs."""


def model_config(sizes: str, layers: int | None = None) -> Qwen3Config:
    """Sizes as a transformers config, with another number of blocks if asked for."""
    given = {
        "vocab_size": 151936,
        "head_dim": 128,
        "num_key_value_heads": 8,
        "max_position_embeddings": 40960,
        "dtype": "bfloat16",
        **SIZES[sizes],
    }
    if layers is not None:
        given["num_hidden_layers"] = layers
    return Qwen3Config.from_dict(given)


def random_model(config: Qwen3Config, device: torch.device, **given: object) -> Any:  # noqa: ANN401
    """A model of transformers in bfloat16; the weights depend on the config alone."""
    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, **given)


@contextmanager
def model_folder(config: Qwen3Config, device: torch.device) -> Iterator[Path]:
    """A folder with `random_model` for all ranks of this host; in memory if there is room."""
    written: Any = random_model(config, device) if dist.get_rank() == 0 else None
    num_bytes = sum(weight.nbytes for weight in written.parameters()) if written else 0
    shared = Path("/dev/shm")  # noqa: S108  # the folder in it has a random name
    in_memory = shared.is_dir() and shutil.disk_usage(shared).free > 1.5 * num_bytes
    with tempfile.TemporaryDirectory(dir=shared if in_memory else None) as temporary:
        name = [temporary]
        if written is not None:
            written.save_pretrained(temporary)
            del written
            if device.type == "cuda":
                torch.cuda.empty_cache()
        if dist.get_world_size() > 1:
            dist.broadcast_object_list(name, device=torch.device("cpu"))
        yield Path(name[0])
        if dist.get_world_size() > 1:
            dist.barrier()


def token_rows(vocab_size: int, num_rows: int, length: int) -> list[list[int]]:
    """Token ids of every row of this rank."""
    generator = torch.Generator().manual_seed(1 + int(os.environ.get("RANK", "0")))
    rows: list[list[int]] = torch.randint(
        vocab_size, (num_rows, length), generator=generator
    ).tolist()
    return rows


def packed(rows: list[list[int]], *, max_tokens: int) -> list[PackedBatch]:
    """The rows as micro-batches in which every token but the first is learnt from."""
    trajectories = [
        Trajectory(
            trajectory_id=str(index),
            group_id="g",
            token_ids=tuple(row),
            loss_mask=(False,) + (True,) * (len(row) - 1),
            rollout_logprobs=(-1.0,) * len(row),
            oldest_version=PolicyVersion(0),
            newest_version=PolicyVersion(0),
        )
        for index, row in enumerate(rows)
    ]
    (batches,) = pack(trajectories, [1.0] * len(rows), max_tokens=max_tokens)
    return batches


@final
class EngineRun:
    """engine-fsdp on given rows."""

    def __init__(
        self,
        folder: Path,
        rows: list[list[int]],
        device: torch.device,
        *,
        max_tokens: int,
        **settings: Any,  # noqa: ANN401  # fields of FsdpConfig
    ) -> None:
        """Load the engine and pack the rows for it."""
        config = FsdpConfig(
            model_path=str(folder), optim=OptimConfig(learning_rate=1e-6), **settings
        )
        self.engine = FsdpEngine(config, device=device)
        self._batches = packed(rows, max_tokens=max_tokens)
        self._num_scored = sum(len(row) - 1 for row in rows) * config.parallel.dp_size

    def forward_backward(self) -> None:
        """The gradient of the mean negative log-probability."""
        self.engine.forward_backward(self._batches, self._loss)

    def train(self) -> float:
        """A whole training step; the gradient's norm."""
        self.forward_backward()
        return self.engine.optim_step().grad_norm

    def logprobs(self) -> None:
        """A forward pass."""
        self.engine.logprobs(self._batches)

    def _loss(self, policy_logprobs: Float[Tensor, " tokens"], _: PackedBatch) -> LossOutput:
        return LossOutput(loss=-policy_logprobs.sum() / self._num_scored, metrics={})


@contextmanager
def without_head() -> Iterator[None]:
    """engine-fsdp with the mean of each hidden state where the head would be, and its gradient.

    For models whose head is the embedding: another's would have no gradient, nor memory for it.
    """

    def mean(
        hidden: Float[Tensor, "rows hidden"],
        weight: Float[Tensor, "vocab hidden"],
        targets: Int[Tensor, " rows"],
        **_: object,
    ) -> Float[Tensor, " rows"]:
        del weight, targets
        return hidden.mean(-1, dtype=torch.float32)

    with mock.patch.object(model, "linear_logprobs", mean):
        yield


def seconds_of(work: Callable[[], object], *, repeats: int, warmup: int) -> float:
    """Median wall time."""
    for _ in range(warmup):
        work()
    measured = []
    for _ in range(repeats):
        synchronize()
        begin = time.perf_counter()
        work()
        synchronize()
        measured.append(time.perf_counter() - begin)
    return statistics.median(measured)


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def ceiling(device: torch.device) -> float:
    """Operations per second of a large product of bfloat16 matrices of random numbers.

    Many in a row, after a second of them: clocks follow the load within tenths of a second.
    """
    size, in_a_row = (8192, 100) if device.type == "cuda" else (256, 2)
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))

    def products() -> None:
        for _ in range(in_a_row):
            left @ right

    return in_a_row * 2 * size**3 / seconds_of(products, repeats=5, warmup=7)


def operations_per_token(config: Any, length: int) -> float:  # noqa: ANN401  # transformers' own
    """Of a training step: six per weight that is multiplied, and causal attention."""
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    weights = sum(parameter.numel() for parameter in empty.parameters())
    if not config.tie_word_embeddings:
        weights -= config.vocab_size * config.hidden_size
    width = config.num_attention_heads * config.head_dim
    return float(6 * weights + 6 * config.num_hidden_layers * width * length)


def peak(device: torch.device, who: str) -> dict[str, float]:
    """The most memory in use since the last call, if it is a GPU's."""
    if device.type != "cuda":
        return {}
    most = torch.cuda.max_memory_allocated() / 1e9
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return {f"{who}_peak_GB": most}


@final
class Report:
    """What was found so far, printed and written at once: the machine may be taken away."""

    def __init__(self, output: Path | None) -> None:
        self.found: dict[str, object] = {}
        self._output = output
        self._failed: list[str] = []

    def __call__(self, **new: object) -> None:
        """Add to it."""
        self.found.update({name.replace("_", " "): value for name, value in new.items()})
        if dist.get_rank() != 0:
            return
        for name, value in new.items():
            shown = f"{value:.4g}" if isinstance(value, float) else value
            print(f"{name.replace('_', ' '):44} {shown}", flush=True)
        if self._output is not None:
            self._output.parent.mkdir(parents=True, exist_ok=True)
            self._output.write_text(json.dumps(self.found, indent=2) + "\n")

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Something whose failure leaves the other parts; see `finish`."""
        begin = time.perf_counter()
        try:
            yield
        except Exception:  # noqa: BLE001  # raised again by `finish`
            traceback.print_exc()
            self._failed.append(name)
        print(f"-- {name}: {time.perf_counter() - begin:.0f} s", flush=True)

    def finish(self) -> None:
        """Raise if a part failed."""
        if self._failed:
            raise SystemExit(f"failed, see above: {', '.join(self._failed)}")
