"""Models that see, on real gloo ranks, compared with plain transformers in another process."""

import functools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
import veomni_ranks
from safetensors.torch import load_file
from transformers import Qwen3VLConfig, Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

from engine_veomni import OptimConfig, VeomniConfig
from engine_veomni.build import check_model_config
from engine_veomni.devices import check_vision_settings
from engine_veomni.vision import Vision, VisionShape, rope_positions, vision_shape
from parallel_state import ExtraParallelSizes, ParallelState
from rl_contracts import PolicyVersion, Trajectory
from rl_contracts.batch_checks import inspect_batches
from rl_contracts.images import ImagePatches
from rl_contracts.packing import pack
from rl_contracts.train import PackedBatch

HERE = Path(__file__).parent

TIMEOUT_S = 400.0
run_reference = functools.partial(
    veomni_ranks.run_reference, HERE / "vision_reference.py", timeout_s=TIMEOUT_S
)
run_ranks = functools.partial(
    veomni_ranks.run_ranks, HERE / "vision_process.py", timeout_s=TIMEOUT_S
)
IMAGE, MERGE = 4, 2
IDS: dict[str, Any] = {"image_token_id": IMAGE, "video_token_id": 5}
EXPERT_NAMES = ("moe_intermediate_size", "num_experts", "num_experts_per_tok")
TEXT_ARGS: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}
VISION_ARGS: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 32,
    "num_position_embeddings": 9,
    "deepstack_visual_indexes": [0],
}


def row(name: str, *grids: tuple[int, int, int]) -> Trajectory:
    """Two words, each picture with a word behind it, and three sampled tokens."""
    ids, shown = [6, 7], []
    for grid in grids:
        patches = np.zeros((math.prod(grid), 96), dtype=np.float32)
        count = math.prod(grid) // MERGE**2
        place = {"first_token": len(ids), "num_tokens": count}
        shown.append(ImagePatches(patches=patches, grid=grid, **place))
        ids += [IMAGE] * count + [8]
    return Trajectory(
        trajectory_id=name,
        group_id=name,
        token_ids=(*ids, 9, IMAGE, 9),  # a placeholder that the policy drew is no picture
        loss_mask=(False,) * len(ids) + (True,) * 3,
        rollout_logprobs=(0.0,) * (len(ids) + 3),
        oldest_version=PolicyVersion(0),
        newest_version=PolicyVersion(0),
        images=tuple(shown),
    )


ROWS = [
    row("one", (1, 4, 4)),
    row("none"),
    row("two", (1, 2, 6), (1, 6, 4)),
    row("frames", (2, 4, 2)),
]


def packed_rows(rows: list[Trajectory]) -> PackedBatch:
    [[packed]] = pack(rows, [0.0] * len(rows), max_tokens=999)
    return packed


def moe_config(**changes: object) -> Qwen3VLMoeConfig:
    return Qwen3VLMoeConfig(
        text_config=TEXT_ARGS | changes,
        vision_config=VISION_ARGS,
        architectures=["Qwen3VLMoeForConditionalGeneration"],
        **IDS,
    )


def veomni_config(**changes: object) -> VeomniConfig:
    config = VeomniConfig(model_path="m", optim=OptimConfig(learning_rate=1e-3))
    return attrs.evolve(config, **changes)  # type: ignore[arg-type]


def test_what_a_model_wants_of_an_image() -> None:
    """Numbers of the configuration: 3 colours, 2 frames and 4 x 4 pixels in a patch."""
    wanted = VisionShape(image_token_id=IMAGE, merge_size=MERGE, patch_values=3 * 2 * 4 * 4)
    assert vision_shape(moe_config()) == wanted
    dense = {name: value for name, value in TEXT_ARGS.items() if name not in EXPERT_NAMES}
    assert vision_shape(Qwen3VLConfig(text_config=dense, vision_config=VISION_ARGS, **IDS))
    assert vision_shape(moe_config().text_config) is None


def problem_of(batch: PackedBatch) -> str:
    model = torch.nn.ModuleDict({"model": torch.nn.ModuleDict({"visual": torch.nn.Identity()})})
    shape = VisionShape(image_token_id=IMAGE, merge_size=MERGE, patch_values=96)
    vision = Vision(model, shape, device=torch.device("cpu"))
    return inspect_batches([batch], vocab_size=61, check_images=vision.problem_of).problem


def test_images_that_were_lost_are_refused() -> None:
    """Placeholders in a prompt without their image, whether or not others have theirs."""
    one, none, two, _ = ROWS
    assert problem_of(packed_rows(ROWS)) == ""
    assert problem_of(packed_rows([none])) == ""  # its policy drew a placeholder
    for rows, found in (
        ([none, replace(one, images=())], "got 4 without one, the first at token 7; give"),
        ([one, replace(two, images=two.images[1:])], "got 3 without one, the first at token 12;"),
    ):
        problem = problem_of(packed_rows(rows))
        assert f"expected an image at every placeholder {IMAGE} of a prompt, {found}" in problem


def test_nobody_knows_where_the_prompt_of_a_masked_row_ends() -> None:
    """What its policy drew may be the placeholder; the row is not trained."""
    one, none, *_ = ROWS
    masked = replace(one, images=(), loss_mask=(False,) * len(one.loss_mask))
    assert problem_of(packed_rows([masked, none])) == ""
    assert "got 4 without one" in problem_of(
        packed_rows([masked, replace(one, trajectory_id="other", images=())])
    )


def test_positions_are_those_of_transformers() -> None:
    """Packed rows with none, one and two pictures, one of two frames; each against its own."""
    with torch.device("meta"):
        plain: Any = Qwen3VLMoeForConditionalGeneration(moe_config()).model
    packed = packed_rows(ROWS)
    found = rope_positions(packed.positions, packed.cu_seqlens, packed.images, merge_size=MERGE)
    pieces = found.split(packed.cu_seqlens.diff().tolist(), dim=1)
    for row, piece in zip(ROWS, pieces, strict=True):
        kinds = torch.zeros(1, len(row.token_ids), dtype=torch.int64)
        for image in row.images:
            kinds[0, image.first_token : image.first_token + image.num_tokens] = 1
        grids = torch.tensor([image.grid for image in row.images]) if row.images else None
        wanted, _ = plain.get_rope_index(
            torch.tensor([row.token_ids]), mm_token_type_ids=kinds, image_grid_thw=grids
        )
        assert torch.equal(piece, wanted[:, 0]), row.trajectory_id
    by_hand = [[0, 1, 2, 2, 2, 2, 4, 5], [0, 1, 2, 2, 3, 3, 4, 5], [0, 1, 2, 3, 2, 3, 4, 5]]
    assert found[:, :8].tolist() == by_hand  # two words, 2 x 2 placeholders, and on from 4


def test_text_alone_has_one_position_three_times() -> None:
    """So a model that sees reads text as one that does not."""
    packed = packed_rows([row("none")])
    found = rope_positions(packed.positions, packed.cu_seqlens, packed.images, merge_size=MERGE)
    assert found.tolist() == [packed.positions.tolist()] * 3


@pytest.mark.parametrize(
    ("changes", "parallel", "text"),
    [
        (
            {},
            ParallelState(dp_size=1, ulysses_size=2),
            "ulysses_size = 2 with a model that sees: its images",
        ),
        (
            {"moe_intermediate_size": 16},
            ParallelState(),
            "hidden_size = 32 and moe_intermediate_size = 16: whether the stacks of experts",
        ),
        ({"moe_intermediate_size": 32}, ParallelState(), "and VeOmni would guess"),
        (
            {},
            ParallelState(dp_size=3, extra_parallel_sizes=ExtraParallelSizes.of(ep=3)),
            "8 experts",
        ),
        ({"hidden_act": "gelu"}, ParallelState(), "expected hidden_act 'silu' in the model's conf"),
    ],
)
def test_models_that_would_not_run_as_configured_are_refused(
    changes: dict[str, Any], parallel: ParallelState, text: str
) -> None:
    """What is said of the language model counts, wherever it stands."""
    check_model_config(moe_config(), ParallelState())
    with pytest.raises(ValueError, match=text):
        check_model_config(moe_config(**changes), parallel)


@pytest.mark.parametrize(
    ("changes", "sees", "text"),
    [
        (
            {"freeze_vision": True},
            False,
            "freeze_vision = True has no effect: the model has no vis",
        ),
        ({"router_replay": "logprobs"}, True, "router_replay = 'logprobs' with a model that sees"),
        ({"router_statistics": True}, True, "router_statistics = True with a model that sees: VeO"),
        ({"router_aux_loss_coef": 0.1}, True, "set router_aux_loss_coef to 0.0"),
    ],
)
def test_settings_without_effect_are_refused(
    changes: dict[str, Any],
    sees: bool,  # noqa: FBT001
    text: str,
) -> None:
    """VeOmni's routers of these models tell nobody where a token goes."""
    check_vision_settings(veomni_config(), sees=sees)
    with pytest.raises(ValueError, match=text):
        check_vision_settings(veomni_config(**changes), sees=sees)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("veomni-vision")
    run_reference("make", folder)
    return folder


@pytest.mark.slow
def test_two_ranks_equal_plain_transformers(folder: Path) -> None:
    """EP 2 with pictures: logprobs, gradients, steps, a frozen tower, refusals, export and resume.

    The exported folder gives plain transformers the logprobs that the engine reported last.
    """
    run_ranks("two_ranks", 2, folder)
    run_reference("reload", folder)
    wanted = load_file(folder / "reloaded.safetensors")
    found: dict[str, torch.Tensor] = {}
    for rank in range(2):
        found |= load_file(folder / f"trained-{rank}.safetensors")
    assert found.keys() == wanted.keys()
    for name, logprobs in wanted.items():
        torch.testing.assert_close(found[name], logprobs, atol=1e-5, rtol=0.0)


@pytest.mark.slow
def test_all_experts_on_both_ranks_and_the_dense_model(folder: Path) -> None:
    """EP 1, VeOmni's own expert kernel at EP 2, and Qwen3-VL without experts."""
    run_ranks("two_ranks_unsplit", 2, folder)


@pytest.mark.slow
def test_one_rank_meets_the_contract(folder: Path) -> None:
    """All checks of `ENGINE_CHECKS` with text alone, and images with one row at a time."""
    run_ranks("one_rank", 1, folder)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_one_gpu_equals_plain_transformers(folder: Path) -> None:
    """In float32, and near to it in bfloat16."""
    run_ranks("cuda", 1, folder)
