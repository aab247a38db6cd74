"""ExtraParallelSizes as a value: what it holds, what it refuses, where it survives."""

import copy
import enum
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, Literal, cast

import attrs
import cattrs
import pytest
import torch

from parallel_state import ExtraParallelSizes, ParallelState, UnknownAxisError

EP_EMB: ExtraParallelSizes[Literal["ep", "emb"]] = ExtraParallelSizes({"ep": 8, "emb": 2})


def test_it_is_a_mapping_in_the_order_given() -> None:
    """Iteration, length, membership, get and items are those of a mapping."""
    assert isinstance(EP_EMB, Mapping)
    assert list(EP_EMB) == ["ep", "emb"]
    assert list(EP_EMB.items()) == [("ep", 8), ("emb", 2)]
    assert len(EP_EMB) == 2
    assert "ep" in EP_EMB
    assert "epp" not in EP_EMB
    assert EP_EMB.get("emb") == 2
    assert EP_EMB["ep"] == 8
    assert ExtraParallelSizes.of(ep=8) == ExtraParallelSizes({"ep": 8})


def test_its_repr_builds_it_again() -> None:
    """What a log shows can be pasted."""
    assert repr(EP_EMB) == "ExtraParallelSizes({'ep': 8, 'emb': 2})"
    assert eval(repr(EP_EMB)) == EP_EMB  # noqa: S307  # our own repr


def test_order_is_part_of_the_value() -> None:
    """The same axes in another order are another layout; a plain dict is never equal."""
    assert ExtraParallelSizes({"emb": 2, "ep": 8}) != EP_EMB
    assert EP_EMB != {"ep": 8, "emb": 2}
    assert {EP_EMB: 1}[ExtraParallelSizes({"ep": 8, "emb": 2})] == 1
    assert len({EP_EMB, ExtraParallelSizes({"emb": 2, "ep": 8})}) == 2


def test_what_it_was_made_from_can_change_afterwards() -> None:
    """The value keeps a copy, and hands out copies."""
    source: dict[Literal["ep"], int] = {"ep": 8}
    sizes = ExtraParallelSizes(source)
    source["ep"] = 1
    sizes.as_dict()["ep"] = 2
    assert sizes["ep"] == 8


def test_it_is_frozen() -> None:
    """Neither an axis nor an attribute can be set."""
    with pytest.raises(TypeError, match="does not support item assignment"):
        EP_EMB["ep"] = 3  # type: ignore[index]
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        EP_EMB._sizes = {}  # type: ignore[misc]


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (
            (8,),
            TypeError,
            (
                "ExtraParallelSizes: expected a mapping from axis names to sizes, got the "
                "tuple (8,), which does not say which axis a size belongs to; "
                "write ExtraParallelSizes({'ep': 8})"
            ),
        ),
        (
            [8, 2],
            TypeError,
            (
                "ExtraParallelSizes: expected a mapping from axis names to sizes, got the "
                "list [8, 2], which does not say which axis a size belongs to; "
                "write ExtraParallelSizes({'ep': 8, 'emb': 2})"
            ),
        ),
        (
            [("ep", 8)],
            TypeError,
            (
                "ExtraParallelSizes: expected a mapping from axis names to sizes, got the "
                "list [('ep', 8)], which does not say which axis a size belongs to; "
                "write ExtraParallelSizes({'ep': 8, 'emb': 2})"
            ),
        ),
        (
            8,
            TypeError,
            (
                "ExtraParallelSizes: expected a mapping from axis names to sizes such as "
                "{'ep': 8}, got 8 (int)"
            ),
        ),
        (
            {},
            ValueError,
            (
                "ExtraParallelSizes: expected at least one axis, got none; an axis that is not "
                "used has size 1, as in ExtraParallelSizes.of(ep=1)"
            ),
        ),
        (
            {3: 8},
            TypeError,
            "ExtraParallelSizes: expected axis names of type str, got 3 (int)",
        ),
        (
            {"e p": 8},
            ValueError,
            (
                "ExtraParallelSizes: expected an axis name that is an identifier such as 'ep', "
                "got 'e p'"
            ),
        ),
        (
            {"ep": 0},
            ValueError,
            "ExtraParallelSizes['ep']: expected an int of at least 1, got 0",
        ),
        (
            {"ep": -1},
            ValueError,
            "ExtraParallelSizes['ep']: expected an int of at least 1, got -1",
        ),
        (
            {"ep": True},
            TypeError,
            "ExtraParallelSizes['ep']: expected an int of at least 1, got True (bool)",
        ),
        (
            {"ep": "8"},
            TypeError,
            "ExtraParallelSizes['ep']: expected an int of at least 1, got '8' (str)",
        ),
        (
            {"ep": 8.0},
            TypeError,
            "ExtraParallelSizes['ep']: expected an int of at least 1, got 8.0 (float)",
        ),
    ],
)
def test_what_is_no_set_of_sizes_is_refused(
    value: object, error: type[Exception], message: str
) -> None:
    """Each wrong value gets its own words, from the constructor and from a configuration file."""
    with pytest.raises(error) as caught:
        ExtraParallelSizes(cast("Mapping[str, int]", value))
    assert str(caught.value) == message
    with pytest.raises(error) as caught:
        ExtraParallelSizes.from_config(value)
    assert str(caught.value) == message


def test_enums_are_kept_as_what_they_stand_for() -> None:
    """Names and sizes become plain, so that a log shows them and no pickle needs their class."""

    class Axis(enum.StrEnum):
        EP = "ep"

    class Size(enum.IntEnum):
        NODE = 8

    sizes = ExtraParallelSizes[str]({Axis.EP: Size.NODE})
    assert repr(sizes) == "ExtraParallelSizes({'ep': 8})"
    assert [(type(axis), type(size)) for axis, size in sizes.items()] == [(str, int)]


def test_a_default_has_ep_alone_whatever_the_annotation_says() -> None:
    """What no type checker sees fails at the first look, with the names that there are."""
    state = ParallelState[Literal["ep", "emb"]](dp_size=2)
    with pytest.raises(UnknownAxisError, match=r"^unknown axis 'emb'; .* has: ep$"):
        state.extra_parallel_sizes["emb"]


def test_an_unknown_axis_is_a_key_error_that_names_the_nearest() -> None:
    """Without a type checker the error still says what there is; `get` stays a mapping's."""
    sizes = cast("ExtraParallelSizes[str]", EP_EMB)
    with pytest.raises(UnknownAxisError) as caught:
        sizes["epp"]
    assert isinstance(caught.value, KeyError)
    assert (
        str(caught.value)
        == "unknown axis 'epp'; ExtraParallelSizes has: ep, emb; did you mean 'ep'?"
    )
    with pytest.raises(
        UnknownAxisError, match=r"unknown axis 'zz'; ExtraParallelSizes has: ep, emb$"
    ):
        sizes["zz"]
    assert sizes.get("epp") is None
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)  # noqa: S301


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickle_gives_an_equal_value(protocol: int) -> None:
    """Every pickle protocol brings it back, order and all."""
    state = ParallelState(dp_size=8, extra_parallel_sizes=EP_EMB)
    assert pickle.loads(pickle.dumps(EP_EMB, protocol)) == EP_EMB  # noqa: S301
    assert pickle.loads(pickle.dumps(state, protocol)) == state  # noqa: S301


def test_a_pickle_from_another_process_is_found_in_a_dict() -> None:
    """Hashes differ between processes, so none may travel inside a pickle."""
    program = (
        "import pickle, sys; from parallel_state import ExtraParallelSizes; "
        "sizes = ExtraParallelSizes.of(ep=8); hash(sizes); "
        "sys.stdout.buffer.write(pickle.dumps((sizes, hash(sizes))))"
    )
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            check=True,
            timeout=60,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        sizes, foreign_hash = pickle.loads(done.stdout)  # noqa: S301  # written just above
        assert {ExtraParallelSizes.of(ep=8): "found"}[sizes] == "found"
        assert hash(sizes) != foreign_hash


def test_copies_are_equal() -> None:
    """Shallow and deep copies equal the original."""
    assert copy.copy(EP_EMB) == EP_EMB
    assert copy.deepcopy(EP_EMB) == EP_EMB


def test_evolve_makes_a_checked_value() -> None:
    """`attrs.evolve` works on the sizes and on the state that holds them, checks included."""
    assert attrs.evolve(EP_EMB) == EP_EMB  # type: ignore[misc]  # its constructor is overloaded
    state = ParallelState(dp_size=8, extra_parallel_sizes=EP_EMB)
    smaller = attrs.evolve(state, extra_parallel_sizes=ExtraParallelSizes({"ep": 4, "emb": 2}))
    assert smaller.extra_parallel_sizes["ep"] == 4
    assert state.extra_parallel_sizes["ep"] == 8
    with pytest.raises(ValueError, match=r"extra_parallel_sizes\['ep'\] = 8 must divide"):
        attrs.evolve(state, dp_size=4)


def _converter() -> cattrs.Converter:
    """A converter that gives `from_config` and `to_config` the word, generic classes included."""

    def origin(target: Any) -> Any:  # noqa: ANN401  # a type or an alias of one
        return getattr(target, "__origin__", target)

    converter = cattrs.Converter(forbid_extra_keys=True)
    converter.register_structure_hook_func(
        lambda target: hasattr(origin(target), "from_config"),
        lambda value, target: origin(target).from_config(value),
    )
    converter.register_unstructure_hook_func(
        lambda target: hasattr(origin(target), "to_config"), lambda value: value.to_config()
    )
    return converter


def test_round_trip_through_a_configuration() -> None:
    """A state becomes plain tables and comes back equal; private fields do not show."""
    state = ParallelState(dp_size=8, extra_parallel_sizes=EP_EMB)
    converter = _converter()
    plain = converter.unstructure(state)
    assert plain == {
        "dp_size": 8,
        "dp_replicate_size": 1,
        "ulysses_size": 1,
        "tensor_size": 1,
        "pipeline_size": 1,
        "extra_parallel_sizes": {"ep": 8, "emb": 2},
    }
    assert converter.structure(plain, ParallelState[Literal["ep", "emb"]]) == state
    assert converter.structure(plain, ParallelState) == state
    assert converter.structure({"dp_size": 2}, ParallelState) == ParallelState(dp_size=2)
    with pytest.raises(cattrs.ClassValidationError):
        converter.structure({"extra_parallel_sizes": {"ep": "8"}}, ParallelState)


@pytest.mark.slow
def test_lookup_inside_a_compiled_function() -> None:
    """Sizes and state are read in one graph, without a break."""
    state = ParallelState(dp_size=8, extra_parallel_sizes=EP_EMB)

    def scale(x: torch.Tensor) -> torch.Tensor:
        sizes = state.extra_parallel_sizes
        if "ep" in sizes and sizes.get("emb", 1) == 2:
            x = x * sizes["ep"]
        return x * state.fsdp_size + len(sizes)

    compiled = torch.compile(scale, fullgraph=True)
    assert compiled(torch.ones(2)).tolist() == [66.0, 66.0]
