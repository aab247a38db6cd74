"""VeOmni's parallel state in all its shapes: hand-made ones, and that of the installed release."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Literal, assert_type

import pytest
import torch
from torch import Tensor

from parallel_state import ExtraParallelSizes, ParallelState
from parallel_state.veomni import VeomniReading, VeomniShape, from_veomni, to_veomni_kwargs

RunRanks = Callable[[str, int, list[str]], list[dict[str, Any]]]


@dataclass
class Mesh:
    """What is read of a DeviceMesh."""

    mesh: Tensor
    mesh_dim_names: tuple[str, ...]


def grid(**sizes: int) -> Mesh:
    """Ranks counted row by row."""
    count = torch.Size(sizes.values()).numel()
    return Mesh(torch.arange(count).view(*sizes.values()), tuple(sizes))


@dataclass(kw_only=True)
class Dense:
    """The fields of every release (veomni/distributed/parallel_state.py)."""

    dp_size: int = 1
    tp_size: int = 1
    pp_size: int = 1
    cp_size: int = 1
    ulysses_size: int = 1
    dp_mode: str = "fsdp2"
    include_sp_in_fsdp: bool = True
    device_mesh: Mesh | None = None


@dataclass(kw_only=True)
class State003(Dense):
    """0.0.1 and 0.0.3."""

    ep_size: int = 1
    ep_device_mesh: Mesh | None = None


@dataclass(kw_only=True)
class State014(Dense):
    """0.1.0 and 0.1.4."""

    dp_replicate_size: int = 1
    dp_shard_size: int = 1
    ep_size: int = 1
    ep_fsdp_device_mesh: Mesh | None = None


@dataclass(kw_only=True)
class State019a2(Dense):
    """0.1.9a1 and a2; with a tuple, what callers made of it."""

    dp_replicate_size: int = 1
    dp_shard_size: int = 1
    extra_parallel_names: tuple[str, ...] = ("ep",)
    extra_parallel_sizes: object = field(default_factory=lambda: {"ep": 1})
    extra_parallel_fsdp_device_mesh: dict[str, Mesh | None] = field(
        default_factory=lambda: {"ep": None}
    )


@dataclass(kw_only=True)
class State0112(State019a2):
    """0.1.9a4 to 0.1.12."""

    @property
    def ep_size(self) -> int:
        """Fails without the axis, as VeOmni's own."""
        assert isinstance(self.extra_parallel_sizes, dict)
        size: int = self.extra_parallel_sizes["ep"]
        return size


EP_4 = ParallelState(dp_size=8, extra_parallel_sizes=ExtraParallelSizes.of(ep=4))


@pytest.mark.parametrize(
    ("raw", "shape"),
    [
        (State003(dp_size=8, ep_size=4), VeomniShape.EP_SIZE),
        (State014(dp_size=8, dp_shard_size=8, ep_size=4), VeomniShape.EP_SIZE),
        (
            State019a2(dp_size=8, dp_shard_size=8, extra_parallel_sizes=(4,)),
            VeomniShape.TUPLE,
        ),
        (
            State019a2(dp_size=8, dp_shard_size=8, extra_parallel_sizes={"ep": 4}),
            VeomniShape.DICT,
        ),
        (
            State0112(dp_size=8, dp_shard_size=8, extra_parallel_sizes={"ep": 4}),
            VeomniShape.DICT_AND_EP_SIZE,
        ),
    ],
)
def test_every_shape_is_read_and_named(raw: object, shape: VeomniShape) -> None:
    """The same degrees in five shapes are the same value; without meshes nothing is compared."""
    assert from_veomni(raw) == VeomniReading(state=EP_4, shape=shape, compared_axes=())


def test_several_axes() -> None:
    """Axes that are asked for become the state's type; a dict without ep has no ep_size."""
    axes: tuple[Literal["ep", "emb"], ...] = ("ep", "emb")
    raw = State0112(
        dp_size=8,
        dp_shard_size=8,
        extra_parallel_names=("ep", "emb"),
        extra_parallel_sizes={"ep": 4, "emb": 2},
    )
    reading = from_veomni(raw, axes=axes)
    assert_type(reading, VeomniReading[Literal["ep", "emb"]])
    assert reading.state.extra_parallel_sizes == ExtraParallelSizes({"ep": 4, "emb": 2})
    emb = State0112(extra_parallel_names=("emb",), extra_parallel_sizes={"emb": 1})
    assert from_veomni(emb, axes=("emb",)).shape is VeomniShape.DICT
    with pytest.raises(ValueError, match=r"expected the extra axes ep, got ep, emb; give `axes`"):
        from_veomni(raw)


def test_groups_of_the_meshes_are_compared() -> None:
    """2 replicas x 2 shards x 2 Ulysses ranks with ep 2, as 0.1.12 lays them out."""
    raw = State0112(
        dp_size=4,
        dp_replicate_size=2,
        dp_shard_size=2,
        ulysses_size=2,
        extra_parallel_sizes={"ep": 2},
        device_mesh=grid(dp_replicate=2, dp_shard=2, ulysses=2),
        extra_parallel_fsdp_device_mesh={"ep": grid(ep_replicate=2, ep_fsdp=2, ep=2)},
    )
    reading = from_veomni(raw)
    assert reading.compared_axes == ("dp_replicate", "dp_shard", "ulysses", "ep_fsdp", "ep")
    assert (reading.state.dp_shard_size, reading.state.extra_fsdp_size("ep")) == (2, 2)


def test_groups_of_the_first_releases() -> None:
    """0.0.3 has all data ranks in one axis, and stages in the mesh of the experts."""
    raw = State003(
        dp_size=4,
        pp_size=2,
        ep_size=2,
        device_mesh=grid(pp=2, dp=4, tp=1),
        ep_device_mesh=grid(pp=2, ep_dp=2, ep=2, tp=1),
    )
    assert from_veomni(raw).compared_axes == ("pipeline", "data", "tensor", "ep_fsdp", "ep")


def test_experts_over_replicas_are_refused() -> None:
    """0.1.4 to 0.1.11 shard the experts of two replicas of 2 ranks over all 4 of them."""
    inner = Mesh(torch.arange(4).view(2, 2).T, ("ep", "ep_fsdp"))
    raw = State014(
        dp_size=4, dp_replicate_size=2, dp_shard_size=2, ep_size=2, ep_fsdp_device_mesh=inner
    )
    with pytest.raises(ValueError, match=r"mesh axis 'ep_fsdp' are \[\[0, 2\], \[1, 3\]\], those "):
        from_veomni(raw)
    same = State014(dp_size=4, dp_shard_size=4, ep_size=2, ep_fsdp_device_mesh=inner)
    assert from_veomni(same).compared_axes == ("ep", "ep_fsdp")


def test_experts_that_are_placed_outside_are_refused() -> None:
    """`ep_outside` puts the ranks of an ep group apart from each other."""
    raw = State014(dp_size=4, dp_shard_size=4, ep_size=2, ep_fsdp_device_mesh=grid(ep=2, ep_fsdp=2))
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # the text is compared below
        from_veomni(raw)
    assert str(caught.value) == (
        "from_veomni: VeOmni's groups on its mesh axis 'ep' are [[0, 2], [1, 3]], those of a "
        "ParallelState with these degrees are [[0, 1], [2, 3]]. VeOmni before 0.1.12 spreads an "
        "extra axis over replicas, and ep_outside and extra_parallel_placement_innermost turn it "
        "around: no ParallelState says either"
    )


@pytest.mark.parametrize(
    ("raw", "error", "message"),
    [
        (
            3,
            TypeError,
            (
                "from_veomni: expected a parallel state of VeOmni, with ep_size or "
                "extra_parallel_sizes, got 3 (int)"
            ),
        ),
        (
            State019a2(extra_parallel_sizes=8),
            TypeError,
            "from_veomni: expected extra_parallel_sizes as a dict or a tuple, got 8 (int)",
        ),
        (
            State019a2(extra_parallel_sizes=(8, 2)),
            ValueError,
            "from_veomni: extra_parallel_names ('ep',) contradicts extra_parallel_sizes (8, 2)",
        ),
        (
            State019a2(extra_parallel_names=("emb",)),
            ValueError,
            "from_veomni: extra_parallel_names ('emb',) contradicts extra_parallel_sizes {'ep': 1}",
        ),
        (
            State014(ep_size=True),
            TypeError,
            "from_veomni: ep_size: expected an int, got True (bool)",
        ),
        (
            State019a2(extra_parallel_sizes={"ep": "8"}),
            TypeError,
            "ExtraParallelSizes['ep']: expected an int of at least 1, got '8' (str)",
        ),
        (
            State014(cp_size=2),
            ValueError,
            (
                "from_veomni: expected cp_size 1, got 2: a ParallelState has no axis for ring "
                "attention; ulysses_size shares sequences"
            ),
        ),
        (
            State014(dp_mode="ddp"),
            ValueError,
            (
                "from_veomni: expected dp_mode fsdp1 or fsdp2, got 'ddp': in a ParallelState "
                "dp_replicate_size says which ranks hold whole copies"
            ),
        ),
        (
            State014(include_sp_in_fsdp=False),
            ValueError,
            (
                "from_veomni: expected include_sp_in_fsdp True, got False: in a ParallelState the "
                "ranks that share a sequence hold different shards"
            ),
        ),
        (
            State014(dp_size=4, dp_replicate_size=2, dp_shard_size=4),
            ValueError,
            (
                "from_veomni: expected dp_size 4 = dp_replicate_size 2 * dp_shard_size, "
                "got dp_shard_size 4"
            ),
        ),
        (
            State014(device_mesh=grid(dp_shard=1, cp=1)),
            ValueError,
            (
                "from_veomni: expected mesh axes among pp, dp_replicate, dp_shard, ulysses, tp, "
                "dp, got 'cp' in a mesh of dp_shard, cp"
            ),
        ),
    ],
)
def test_what_is_no_state_is_refused(raw: object, error: type[Exception], message: str) -> None:
    """What came, what was expected, and why it cannot be said."""
    with pytest.raises(error) as caught:
        from_veomni(raw)
    assert str(caught.value) == message


def test_a_missing_field_is_named() -> None:
    """An object with `ep_size` alone is no parallel state."""

    class Lonely:
        ep_size = 8

        def __repr__(self) -> str:
            return "Lonely()"

    with pytest.raises(TypeError, match=r"which has cp_size in every release, got Lonely\(\) "):
        from_veomni(Lonely())


def test_a_state_that_contradicts_itself_is_refused() -> None:
    """A dict of ep 4 with an attribute ep_size of 8 says two things."""

    @dataclass(kw_only=True)
    class Both(State019a2):
        ep_size: int

    raw = Both(dp_size=8, dp_shard_size=8, extra_parallel_sizes={"ep": 4}, ep_size=8)
    with pytest.raises(ValueError, match=r"ep_size 8 contradicts extra_parallel_sizes {'ep': 4}"):
        from_veomni(raw)


def signature(*names: str, required: tuple[str, ...] = ()) -> inspect.Signature:
    """A function that takes these keywords."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Signature(
        [
            *(inspect.Parameter(name, kind) for name in required),
            *(inspect.Parameter(name, kind, default=1) for name in names),
        ]
    )


COMMON = ("dp_size", "tp_size", "pp_size", "cp_size", "ulysses_size", "dp_mode", "device_type")
REPLICAS = ("dp_replicate_size", "dp_shard_size")
EXTRA = ("extra_parallel_sizes", "extra_parallel_placement_innermost", "extra_parallel_names")

# 0.0.3 has defaults for none of its degrees.
INIT_003 = signature("include_sp_in_fsdp", "device_type", required=(*COMMON[:-1], "ep_size"))
INIT_014 = signature(*COMMON, *REPLICAS, "ep_size", "ep_outside", "include_sp_in_fsdp")
INIT_019 = signature(*COMMON, *REPLICAS, *EXTRA, "include_sp_in_fsdp", "async_enabled")
INIT_0112 = signature(*COMMON, *REPLICAS, *EXTRA, "include_sp_in_fsdp", "async_enabled", "name")

WRITTEN_COMMON = {
    "dp_size": 8,
    "ulysses_size": 1,
    "cp_size": 1,
    "tp_size": 1,
    "pp_size": 1,
    "dp_mode": "fsdp2",
    "device_type": "cpu",
}
WRITTEN_REPLICAS = {"dp_replicate_size": 1, "dp_shard_size": 8}
WRITTEN_EXTRA = {
    "extra_parallel_sizes": (4,),
    "extra_parallel_names": ("ep",),
    "extra_parallel_placement_innermost": (False,),
}


@pytest.mark.parametrize(
    ("init", "rest"),
    [
        (INIT_003, {"ep_size": 4}),
        (INIT_014, {**WRITTEN_REPLICAS, "ep_size": 4, "ep_outside": False}),
        (INIT_019, {**WRITTEN_REPLICAS, **WRITTEN_EXTRA}),
        (INIT_0112, {**WRITTEN_REPLICAS, **WRITTEN_EXTRA, "name": None}),
    ],
)
def test_keywords_of_every_shape(init: inspect.Signature, rest: dict[str, object]) -> None:
    """A tuple with names where the function takes one, `ep_size` where it takes that."""
    kwargs = to_veomni_kwargs(EP_4, device_type="cpu", signature=init)
    assert kwargs == {**WRITTEN_COMMON, **rest}
    init.bind(**kwargs)


def swallows(dp_size: int, ep_size: int, **rest: object) -> None:
    """Takes everything, and does nothing with most of it."""


@pytest.mark.parametrize(
    ("init", "message"),
    [
        (
            inspect.signature(swallows),
            (
                "to_veomni_kwargs: VeOmni's init_parallel_state does not know ulysses_size, "
                "cp_size, tp_size, pp_size, dp_mode, device_type; it takes dp_size, ep_size: this "
                "release has another shape than those that are known"
            ),
        ),
        (
            signature(*COMMON, "ep_size", required=("backend",)),
            (
                "to_veomni_kwargs: VeOmni's init_parallel_state requires backend; it takes "
                "backend, dp_size, tp_size, pp_size, cp_size, ulysses_size, dp_mode, device_type, "
                "ep_size: this release has another shape than those that are known"
            ),
        ),
        (
            signature("dp_size"),
            (
                "to_veomni_kwargs: expected VeOmni's init_parallel_state to take ep_size or "
                "extra_parallel_sizes, it takes neither of them among dp_size: this release has "
                "another shape than those that are known"
            ),
        ),
        (
            signature("ep_size", "extra_parallel_sizes"),
            (
                "to_veomni_kwargs: expected VeOmni's init_parallel_state to take ep_size or "
                "extra_parallel_sizes, it takes both of them among ep_size, extra_parallel_sizes: "
                "this release has another shape than those that are known"
            ),
        ),
    ],
)
def test_a_function_of_another_shape_is_refused(init: inspect.Signature, message: str) -> None:
    """A keyword that would be swallowed counts as unknown."""
    with pytest.raises(TypeError) as caught:
        to_veomni_kwargs(EP_4, device_type="cpu", signature=init)
    assert str(caught.value) == message


def test_what_a_release_cannot_do_is_refused() -> None:
    """Replicas before 0.1.0, with experts before 0.1.12; other axes before 0.1.9a1; tensor ranks.

    For all of them VeOmni would start, and run something else.
    """

    def refusal(state: ParallelState[Any], init: inspect.Signature) -> str:
        with pytest.raises(ValueError) as caught:  # noqa: PT011  # the text is compared below
            to_veomni_kwargs(state, device_type="cpu", signature=init)
        return str(caught.value)

    ep_2 = ExtraParallelSizes.of(ep=2)
    replicas = ParallelState(dp_size=4, dp_replicate_size=2, extra_parallel_sizes=ep_2)
    assert refusal(replicas, INIT_003) == (
        "to_veomni_kwargs: this release of VeOmni has no replicas, got dp_replicate_size 2; "
        "0.1.0 is the first release with them"
    )
    for init in (INIT_014, INIT_019):
        assert refusal(replicas, init) == (
            "to_veomni_kwargs: VeOmni before 0.1.12 spreads 'ep' over the replicas, got "
            "dp_replicate_size 2 with ep 2; set dp_replicate_size to 1, or install veomni>=0.1.12"
        )
    assert to_veomni_kwargs(replicas, device_type="cpu", signature=INIT_0112)["name"] is None
    two = ParallelState(dp_size=4, extra_parallel_sizes=ExtraParallelSizes({"ep": 2, "emb": 4}))
    assert refusal(two, INIT_014) == (
        "to_veomni_kwargs: this release of VeOmni has the extra axis ep alone, got emb 4; 0.1.9a1 "
        "is the first release with others"
    )
    tensor = ParallelState(dp_size=2, tensor_size=2, extra_parallel_sizes=ep_2)
    assert refusal(tensor, INIT_0112) == (
        "to_veomni_kwargs: VeOmni builds the mesh of 'ep' over the whole world, got ep 2 with "
        "tensor_size 2 and pipeline_size 1; set both to 1"
    )


@pytest.mark.slow
@pytest.mark.skipif(find_spec("veomni") is None, reason="veomni is not installed")
def test_the_installed_veomni(run_ranks: RunRanks) -> None:
    """Five states through its own init on 4 gloo ranks, back equal, group by group."""
    for result in run_ranks("veomni_state", 4, ["round_trips"]):
        assert result["round_trips"] == {
            "shards": [True, "DICT_AND_EP_SIZE", ["dp_shard", "ep", "ep_fsdp"]],
            "replicas": [True, "DICT_AND_EP_SIZE", ["dp_replicate", "dp_shard", "ep", "ep_fsdp"]],
            "ulysses": [True, "DICT_AND_EP_SIZE", ["dp_shard", "ep", "ep_fsdp", "ulysses"]],
            "two axes": [
                True,
                "DICT_AND_EP_SIZE",
                ["dp_shard", "emb", "emb_fsdp", "ep", "ep_fsdp"],
            ],
            "tensor": [True, "DICT_AND_EP_SIZE", ["dp_shard", "tensor"]],
        }
