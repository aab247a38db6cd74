"""What a training step takes of a GPU's memory, before anything is loaded."""

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from transformers import LlamaConfig, Qwen3MoeConfig

from engine_fsdp import FsdpConfig, LoraConfig, MemoryPlan, MuonConfig, OptimConfig, plan
from engine_fsdp.live_bytes import LiveBytes
from parallel_state import ParallelState

HIDDEN, LAYERS, VOCAB, FEED = 64, 3, 512, 96
BLOCK = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * FEED + 2 * HIDDEN
WEIGHTS = LAYERS * BLOCK + VOCAB * HIDDEN + HIDDEN
"""By hand: attention, feed-forward and two norms; a tied embedding; the last norm."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with config.json alone."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": FEED,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "architectures": ["LlamaForCausalLM"],
    }
    LlamaConfig(**sizes).save_pretrained(tmp_path)
    return tmp_path


def _config(folder: Path, **changes: Any) -> FsdpConfig:  # noqa: ANN401
    return FsdpConfig(model_path=str(folder), optim=OptimConfig(learning_rate=1e-6), **changes)


def test_live_bytes_by_hand() -> None:
    """100 floats, 50 more, both at once while the first are doubled, and none at the end."""
    with LiveBytes() as live:
        first = torch.empty(100, device="meta")
        second = torch.empty(50, device="meta")
        view = first[:10]
        assert (live.now, live.peak) == (600, 600)
        doubled = first * 2.0
        del first
        assert live.now == 1000  # the view holds the whole
        del view, doubled
        assert (live.now, live.peak) == (200, 1000)
        del second
    assert live.now == 0


def test_weights_gradient_and_moments_by_hand(folder: Path) -> None:
    """Float32 each, two moments; a tied weight once; all weights gathered if there is one shard."""
    planned = plan(_config(folder), tokens=256)
    assert planned.weights == planned.gradient == 4 * WEIGHTS
    assert planned.moments == 8 * WEIGHTS
    assert planned.gathered == 2 * WEIGHTS
    assert planned.peak == sum(attrs.astuple(planned))


def test_shards_divide_what_is_kept_and_not_what_is_at_work(folder: Path) -> None:
    """On four shards a quarter; embedding, last norm and three blocks are gathered. Copies do not
    divide anything.
    """
    parallel = ParallelState(dp_size=8, dp_replicate_size=2)
    alone, sharded = (
        plan(_config(folder), tokens=64),
        plan(_config(folder, parallel=parallel), tokens=64),
    )
    assert sharded.weights == alone.weights // 4
    assert sharded.moments == alone.moments // 4
    assert sharded.gathered == 2 * WEIGHTS
    assert sharded.activations == alone.activations


def test_what_is_not_trained_has_no_gradient(folder: Path) -> None:
    """A frozen embedding has neither gradient nor moments; Muon keeps one moment per matrix."""
    frozen = plan(_config(folder, freeze=("model.embed_tokens.*",)), tokens=64)
    assert frozen.weights == 4 * WEIGHTS
    assert frozen.gradient == 4 * (WEIGHTS - VOCAB * HIDDEN)
    muon = plan(_config(folder, muon=MuonConfig()), tokens=64)
    matrices = LAYERS * (BLOCK - 2 * HIDDEN)
    assert muon.moments == 4 * (2 * WEIGHTS - matrices)


def test_adapters_have_a_gradient_and_nothing_else_does(folder: Path) -> None:
    """Rank 2 on q_proj: two matrices of 2 times 64 per layer."""
    pytest.importorskip("peft")
    planned = plan(_config(folder, lora=LoraConfig(rank=2, target_modules=("q_proj",))), tokens=64)
    num_adapters = LAYERS * 2 * 2 * HIDDEN
    assert planned.gradient == 4 * num_adapters
    assert planned.weights == 4 * (WEIGHTS + num_adapters)


def test_checkpointed_blocks_keep_their_inputs(folder: Path) -> None:
    """With full checkpointing one more token costs its bfloat16 hidden states: one per layer, and
    some for the embedding, the rotary angles and the last norm, whatever the depth.
    """

    def kept(tokens: int, layers: int) -> int:
        LlamaConfig(
            **{**LlamaConfig.from_pretrained(folder).to_dict(), "num_hidden_layers": layers}
        ).save_pretrained(folder)
        return plan(_config(folder, activation_checkpointing="full"), tokens=tokens).activations

    per_layer = [kept(512, 5) - kept(512, 4), kept(1024, 5) - kept(1024, 4)]
    assert per_layer == [512 * HIDDEN * 2, 1024 * HIDDEN * 2]


def test_of_inputs_on_the_host_one_is_on_the_device(folder: Path) -> None:
    """Whatever the depth: the last one, before the backward pass, and the next one in it, since a
    block is done with its own where it takes most.
    """

    def planned(layers: int, *, offloaded: bool) -> MemoryPlan:
        sizes = {"num_hidden_layers": layers, "vocab_size": 32}  # less in the head than in a block
        LlamaConfig(**{**LlamaConfig.from_pretrained(folder).to_dict(), **sizes}).save_pretrained(
            folder
        )
        config = _config(folder, activation_checkpointing="full", offload_activations=offloaded)
        return plan(config, tokens=4096)

    one_input = 4096 * HIDDEN * 2
    there, away, deeper = (
        planned(5, offloaded=False),
        planned(5, offloaded=True),
        planned(8, offloaded=True),
    )
    assert there.activations - away.activations == 4 * one_input
    assert deeper.activations == away.activations
    at_work = [p.activations + p.head + p.working for p in (there, away, deeper)]
    assert at_work[0] - at_work[1] == 4 * one_input
    assert at_work[2] == at_work[1]


def test_kept_activations_grow_with_what_is_kept(folder: Path) -> None:
    """Full checkpointing keeps least, selective more, none most; each token as much as another."""
    kept = {
        kind: [
            plan(_config(folder, activation_checkpointing=kind), tokens=tokens).activations
            for tokens in (512, 1024, 1536)
        ]
        for kind in ("full", "selective", "none")
    }
    assert kept["full"][0] < kept["selective"][0] < kept["none"][0]
    for first, second, third in kept.values():
        assert third - second == pytest.approx(second - first, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"compute_dtype": "float32"}, r"plan: compute_dtype = 'float32': .* plan with bfloat16"),
        ({"compile_blocks": True}, r"plan: compile_blocks = True: .* compile_blocks = False"),
    ],
)
def test_what_cannot_be_run_without_data_is_refused(
    folder: Path, changes: dict[str, Any], text: str
) -> None:
    """With the setting to plan with instead."""
    with pytest.raises(ValueError, match=text):
        plan(_config(folder, **changes), tokens=64)


def test_experts_are_refused(tmp_path: Path) -> None:
    """Their memory depends on the tokens."""
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_experts": 4,
        "architectures": ["Qwen3MoeForCausalLM"],
    }
    Qwen3MoeConfig(**sizes).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"a model with experts, whose memory depends on which"):
        plan(_config(tmp_path), tokens=64)
