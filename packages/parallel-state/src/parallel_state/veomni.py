"""Reading and writing VeOmni's parallel state, in every shape that it has had.

VeOmni itself is not imported: a state is read by its attributes, and what its
`init_parallel_state` takes is told by the function's signature.

| | 0.0.1, 0.0.3 | 0.1.0, 0.1.4 | 0.1.9a1, a2 | 0.1.9a4 to 0.1.11 | 0.1.12 |
| --- | --- | --- | --- | --- | --- |
| the state has | `ep_size` | `ep_size` | a dict | a dict, and `ep_size` | the same |
| init takes | `ep_size` | and `ep_outside` | a tuple and names | the same | and `name` |
| replicas (HSDP) | no | yes | yes | yes | yes |
| mesh of `ep` | `ep_device_mesh` | `ep_fsdp_device_mesh` | a dict by axis | the same | the same |
| `ep_fsdp` spans | the world | the world | the world | the world | one replica |

Source: `veomni/distributed/parallel_state.py` in the wheels of these releases. The dict is called
`extra_parallel_sizes` in the state, and so is the tuple that init takes; a state that holds the
tuple, as callers have set it (verl#6323), is read as well. "The world": `ep_fsdp` is world / ep
there, so with replicas the experts of one replica lie on several, which no `ParallelState` says.
"""

import enum
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, cast, final, overload

from parallel_state.layout import axis_groups
from parallel_state.sizes import AxisT, ExtraParallelSizes
from parallel_state.state import ParallelState

KeywordValue = int | str | bool | None | tuple[int, ...] | tuple[bool, ...] | tuple[str, ...]
"""What VeOmni's `init_parallel_state` takes."""

_MISSING = object()

_DENSE_AXES = {
    "pp": "pipeline",
    "dp_replicate": "dp_replicate",
    "dp_shard": "dp_shard",
    "ulysses": "ulysses",
    "tp": "tensor",
    # 0.0.3: all ranks but those of the axes pp and tp
    "dp": "data",
}


@final
class VeomniShape(enum.Enum):
    """How a VeOmni state holds the sizes of its extra axes."""

    EP_SIZE = "attribute ep_size"
    """Up to 0.1.4: expert parallelism alone."""

    TUPLE = "extra_parallel_sizes as tuple, with extra_parallel_names"
    """No release; what init takes, kept as it is."""

    DICT = "extra_parallel_sizes as dict"
    """0.1.9a1 and a2."""

    DICT_AND_EP_SIZE = "extra_parallel_sizes as dict, with ep_size"
    """From 0.1.9a4 on."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class VeomniReading(Generic[AxisT]):
    """What was found in a VeOmni state."""

    state: ParallelState[AxisT]
    """The same degrees."""

    shape: VeomniShape
    """Which of its shapes the state has."""

    compared_axes: tuple[str, ...]
    """Axes of `state` whose groups were compared with VeOmni's meshes.

    Others have size 1, or VeOmni built no mesh for them.
    """


class _Grid(Protocol):
    """What is used of the tensor of ranks inside a mesh."""

    @property
    def shape(self) -> Sequence[int]: ...
    def movedim(self, source: int, destination: int, /) -> "_Grid": ...
    def reshape(self, *shape: int) -> "_Grid": ...
    def tolist(self) -> list[list[int]]: ...


class _Mesh(Protocol):
    """What is used of torch's DeviceMesh."""

    mesh_dim_names: Sequence[str]
    mesh: _Grid


@overload
def from_veomni(raw: object) -> VeomniReading[Literal["ep"]]: ...
@overload
def from_veomni(raw: object, *, axes: Sequence[AxisT]) -> VeomniReading[AxisT]: ...


def from_veomni(raw: object, *, axes: Sequence[str] = ("ep",)) -> VeomniReading[Any]:
    """Read VeOmni's parallel state; where it has meshes, their groups are compared too.

    Args:
        raw: what VeOmni's `get_parallel_state` returns.
        axes: the extra axes that it has to have, in any order. For a literal type of their names,
            declare it: ``axes: tuple[Literal["ep", "emb"], ...] = ("ep", "emb")``.

    Raises:
        TypeError: if it is no parallel state of VeOmni, or holds sizes in a shape that is not
            known.
        ValueError: if it has other axes, contradicts itself, or means what no `ParallelState`
            says; the message has VeOmni's word and ours.
    """
    sizes, shape = _extra_sizes(raw)
    if set(sizes) != set(axes):
        message = (
            f"from_veomni: expected the extra axes {', '.join(axes)}, got {', '.join(sizes)}; "
            "give `axes` those that there are"
        )
        raise ValueError(message)
    _refuse_what_has_no_name(raw)
    has_replicas = _has(raw, "dp_replicate_size")
    state = ParallelState(
        dp_size=_int(raw, "dp_size"),
        dp_replicate_size=_int(raw, "dp_replicate_size") if has_replicas else 1,
        ulysses_size=_int(raw, "ulysses_size"),
        tensor_size=_int(raw, "tp_size"),
        pipeline_size=_int(raw, "pp_size"),
        extra_parallel_sizes=ExtraParallelSizes[Any](sizes),
    )
    if has_replicas and _int(raw, "dp_shard_size") != state.dp_shard_size:
        message = (
            f"from_veomni: expected dp_size {state.dp_size} = dp_replicate_size "
            f"{state.dp_replicate_size} * dp_shard_size, got dp_shard_size "
            f"{_int(raw, 'dp_shard_size')}"
        )
        raise ValueError(message)
    compared: dict[str, None] = {}
    for mesh, names in _meshes(raw, tuple(sizes)):
        compared |= dict.fromkeys(_compare(state, mesh, names))
    return VeomniReading(state=state, shape=shape, compared_axes=tuple(compared))


def to_veomni_kwargs(
    state: ParallelState[AxisT], *, device_type: str, signature: inspect.Signature
) -> dict[str, KeywordValue]:
    """Write the arguments of VeOmni's `init_parallel_state` for the release at hand.

    Every degree is given, whatever its default. Where the function registers states by name, the
    name is None: under a name it hands back the state that it made first, whatever is asked for.

    Args:
        state: ours.
        device_type: `cuda`, `npu` or `cpu`.
        signature: ``inspect.signature(init_parallel_state)``.

    Raises:
        TypeError: if the function names neither shape of the extra axes or both, does not name
            another keyword (one that it would swallow counts as unknown), or requires more.
        ValueError: if this release cannot do what the state says.
    """
    known = {
        name: parameter.default is parameter.empty
        for name, parameter in signature.parameters.items()
        if parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    }
    _refuse_what_veomni_cannot(state, known)
    kwargs: dict[str, KeywordValue] = {
        "dp_size": state.dp_size,
        "ulysses_size": state.ulysses_size,
        "cp_size": 1,
        "tp_size": state.tensor_size,
        "pp_size": state.pipeline_size,
        "dp_mode": "fsdp2",
        "device_type": device_type,
    }
    if "dp_replicate_size" in known:
        kwargs["dp_replicate_size"] = state.dp_replicate_size
        kwargs["dp_shard_size"] = state.dp_shard_size
    kwargs |= _extra_kwargs(state, known)
    if "name" in known:
        kwargs["name"] = None
    unknown = [name for name in kwargs if name not in known]
    missing = [name for name, is_required in known.items() if is_required and name not in kwargs]
    if unknown or missing:
        what = [
            *([f"does not know {', '.join(unknown)}"] if unknown else []),
            *([f"requires {', '.join(missing)}"] if missing else []),
        ]
        message = (
            f"to_veomni_kwargs: VeOmni's init_parallel_state {' and '.join(what)}; it takes "
            f"{', '.join(known)}: this release has another shape than those that are known"
        )
        raise TypeError(message)
    return kwargs


def _extra_kwargs(
    state: ParallelState[AxisT], known: Mapping[str, bool]
) -> dict[str, KeywordValue]:
    sizes = state.extra_parallel_sizes.as_dict()
    by_name, by_ep = "extra_parallel_sizes" in known, "ep_size" in known
    if by_name == by_ep:
        message = (
            "to_veomni_kwargs: expected VeOmni's init_parallel_state to take ep_size or "
            f"extra_parallel_sizes, it takes {'both' if by_name else 'neither'} of them among "
            f"{', '.join(known)}: this release has another shape than those that are known"
        )
        raise TypeError(message)
    if by_name:
        # Tuples: the function takes them and stores a dict.
        return {
            "extra_parallel_sizes": tuple(sizes.values()),
            "extra_parallel_names": tuple(sizes),
            "extra_parallel_placement_innermost": (False,) * len(sizes),
        }
    if others := [axis for axis, size in sizes.items() if axis != "ep" and size > 1]:
        message = (
            f"to_veomni_kwargs: this release of VeOmni has the extra axis ep alone, got "
            f"{', '.join(f'{axis} {sizes[axis]}' for axis in others)}; 0.1.9a1 is the first "
            "release with others"
        )
        raise ValueError(message)
    kwargs: dict[str, KeywordValue] = {"ep_size": sizes.get("ep", 1)}
    if "ep_outside" in known:
        kwargs["ep_outside"] = False
    return kwargs


def _refuse_what_veomni_cannot(state: ParallelState[AxisT], known: Mapping[str, bool]) -> None:
    if state.dp_replicate_size > 1 and "dp_replicate_size" not in known:
        message = (
            "to_veomni_kwargs: this release of VeOmni has no replicas, got dp_replicate_size "
            f"{state.dp_replicate_size}; 0.1.0 is the first release with them"
        )
        raise ValueError(message)
    used = {axis: size for axis, size in state.extra_parallel_sizes.items() if size > 1}
    if not used:
        return
    axis, size = next(iter(used.items()))
    if state.tensor_size > 1 or state.pipeline_size > 1:
        message = (
            f"to_veomni_kwargs: VeOmni builds the mesh of {axis!r} over the whole world, got "
            f"{axis} {size} with tensor_size {state.tensor_size} and pipeline_size "
            f"{state.pipeline_size}; set both to 1"
        )
        raise ValueError(message)
    # 0.1.12 brought the keyword and the meshes within a replica.
    if state.dp_replicate_size > 1 and "name" not in known:
        message = (
            f"to_veomni_kwargs: VeOmni before 0.1.12 spreads {axis!r} over the replicas, got "
            f"dp_replicate_size {state.dp_replicate_size} with {axis} {size}; set "
            "dp_replicate_size to 1, or install veomni>=0.1.12"
        )
        raise ValueError(message)


def _extra_sizes(raw: object) -> tuple[dict[str, int], VeomniShape]:
    if not _has(raw, "extra_parallel_sizes"):
        if not _has(raw, "ep_size"):
            message = (
                "from_veomni: expected a parallel state of VeOmni, with ep_size or "
                f"extra_parallel_sizes, got {raw!r} ({type(raw).__name__})"
            )
            raise TypeError(message)
        return {"ep": _int(raw, "ep_size")}, VeomniShape.EP_SIZE
    held = _get(raw, "extra_parallel_sizes")
    names = tuple(cast("Sequence[str]", _get(raw, "extra_parallel_names", ())))
    if isinstance(held, Mapping):
        sizes = dict(held)
        if names and set(names) != set(sizes):
            raise ValueError(_contradiction("extra_parallel_names", names, sizes))
        # The property exists on the class, and fails on a state without the axis.
        if not _has(raw, "ep_size") or "ep" not in sizes:
            return sizes, VeomniShape.DICT
        if _get(raw, "ep_size") != sizes["ep"]:
            raise ValueError(_contradiction("ep_size", _get(raw, "ep_size"), sizes))
        return sizes, VeomniShape.DICT_AND_EP_SIZE
    if isinstance(held, tuple | list):
        if len(names) != len(held):
            raise ValueError(_contradiction("extra_parallel_names", names, held))
        return dict(zip(names, held, strict=True)), VeomniShape.TUPLE
    message = (
        "from_veomni: expected extra_parallel_sizes as a dict or a tuple, "
        f"got {held!r} ({type(held).__name__})"
    )
    raise TypeError(message)


def _contradiction(name: str, value: object, sizes: object) -> str:
    return f"from_veomni: {name} {value!r} contradicts extra_parallel_sizes {sizes!r}"


def _refuse_what_has_no_name(raw: object) -> None:
    if (cp_size := _int(raw, "cp_size")) > 1:
        message = (
            f"from_veomni: expected cp_size 1, got {cp_size}: a ParallelState has no axis for "
            "ring attention; ulysses_size shares sequences"
        )
        raise ValueError(message)
    if (mode := _get(raw, "dp_mode")) not in ("fsdp1", "fsdp2"):
        message = (
            f"from_veomni: expected dp_mode fsdp1 or fsdp2, got {mode!r}: in a ParallelState "
            "dp_replicate_size says which ranks hold whole copies"
        )
        raise ValueError(message)
    if _get(raw, "include_sp_in_fsdp") is not True:
        message = (
            "from_veomni: expected include_sp_in_fsdp True, got "
            f"{_get(raw, 'include_sp_in_fsdp')!r}: in a ParallelState the ranks that share a "
            "sequence hold different shards"
        )
        raise ValueError(message)


def _meshes(raw: object, axes: Sequence[str]) -> list[tuple[_Mesh, dict[str, str]]]:
    """Every mesh that there is, with our names for its axes."""
    found = [(_get(raw, "device_mesh", None), _DENSE_AXES)]
    by_axis = cast("Mapping[str, object]", _get(raw, "extra_parallel_fsdp_device_mesh", {}))
    for axis in axes:
        ours = f"{axis}_fsdp"
        names = {axis: axis, ours: ours, f"{axis}_replicate": "dp_replicate"}
        # 0.0.3 calls the complement ep_dp, and has the outer axes in the same mesh.
        names |= {f"{axis}_dp": ours, "pp": "pipeline", "tp": "tensor"}
        found.append((by_axis.get(axis), names))
        found.append((_get(raw, f"{axis}_fsdp_device_mesh", None), names))
        found.append((_get(raw, f"{axis}_device_mesh", None), names))
    return [(cast("_Mesh", mesh), names) for mesh, names in found if mesh is not None]


def _compare(state: ParallelState[AxisT], mesh: _Mesh, names: Mapping[str, str]) -> tuple[str, ...]:
    """Refuse other groups than ours; returns the axes that were compared."""
    compared = []
    for index, theirs in enumerate(mesh.mesh_dim_names):
        if theirs not in names:
            message = (
                f"from_veomni: expected mesh axes among {', '.join(names)}, got {theirs!r} in a "
                f"mesh of {', '.join(mesh.mesh_dim_names)}"
            )
            raise ValueError(message)
        ranks = mesh.mesh.movedim(index, -1).reshape(-1, mesh.mesh.shape[index])
        groups = sorted(ranks.tolist())
        expected = sorted(list(group) for group in axis_groups(state, names[theirs]))
        if groups != expected:
            message = (
                f"from_veomni: VeOmni's groups on its mesh axis {theirs!r} are {groups}, those of "
                f"a ParallelState with these degrees are {expected}. VeOmni before 0.1.12 spreads "
                "an extra axis over replicas, and ep_outside and "
                "extra_parallel_placement_innermost turn it around: no ParallelState says either"
            )
            raise ValueError(message)
        compared.append(names[theirs])
    return tuple(compared)


def _has(raw: object, name: str) -> bool:
    """Without calling a property, which may fail."""
    return inspect.getattr_static(raw, name, _MISSING) is not _MISSING


def _get(raw: object, name: str, default: object = _MISSING) -> object:
    if _has(raw, name):
        value: object = getattr(raw, name)
        return value
    if default is _MISSING:
        message = (
            f"from_veomni: expected a parallel state of VeOmni, which has {name} in every "
            f"release, got {raw!r} ({type(raw).__name__})"
        )
        raise TypeError(message)
    return default


def _int(raw: object, name: str) -> int:
    value = _get(raw, name)
    if isinstance(value, bool) or not isinstance(value, int):
        message = f"from_veomni: {name}: expected an int, got {value!r} ({type(value).__name__})"
        raise TypeError(message)
    return value
