"""The degrees of one distributed run, checked against each other when they are put together.

A rank's place is its index in a row-major grid of the axes

    pipeline x dp_replicate x dp_shard x ulysses x tensor

so neighbouring ranks differ in the last axis first. Parameters are sharded over `fsdp`, which is
dp_shard x ulysses; an extra axis such as `ep` splits those same ranks into `ep_fsdp` x `ep`, with
`ep` the inner one. This is the order of VeOmni 0.1.12 (veomni/distributed/parallel_state.py,
`init_parallel_state`) and, without the extra axes, of torchtitan.
"""

import bisect
import math
from typing import Any, Generic, Literal, cast, final, overload

import attrs

from parallel_state.sizes import AxisT, ExtraParallelSizes, check_count

DENSE_AXES = ("pipeline", "dp_replicate", "dp_shard", "ulysses", "tensor")
"""The axes whose product is the world, outermost first."""

FLAT_AXES = ("fsdp", "data")
"""Names for several of these axes taken as one: see `parallel_state.layout`."""

_MOST_TRIED = 2**32
"""Larger numbers are not taken apart for a message, which would take seconds."""

_MOST_LISTED = 16
"""Divisors in a message; 4096 has 13."""


def _is_degree(_: object, attribute: "attrs.Attribute[Any]", value: int) -> None:
    check_count(f"ParallelState.{attribute.name}", value)


def _is_extra_sizes(_: object, attribute: "attrs.Attribute[Any]", value: object) -> None:
    if isinstance(value, ExtraParallelSizes):
        return
    hint = ""
    if isinstance(value, dict):
        hint = f"; write ExtraParallelSizes({value!r})"
    elif isinstance(value, tuple | list) and len(value) == 1:
        hint = f"; write ExtraParallelSizes.of(ep={value[0]!r})"
    message = (
        f"ParallelState.{attribute.name}: expected ExtraParallelSizes, "
        f"got {value!r} ({type(value).__name__}){hint}"
    )
    raise TypeError(message)


def _ep_off() -> ExtraParallelSizes[Any]:
    # `Any`: the default belongs to the default axes, which the checkers infer without it.
    return cast("ExtraParallelSizes[Any]", ExtraParallelSizes.of(ep=1))


def divisors(number: int) -> tuple[int, ...]:
    """All numbers that divide `number`, in rising order; `number` is at most `_MOST_TRIED`."""
    low = [candidate for candidate in range(1, math.isqrt(number) + 1) if number % candidate == 0]
    return tuple(sorted({*low, *(number // candidate for candidate in low)}))


def _usable(number: int, wanted: int) -> str:
    """What may stand in place of `wanted`, which does not divide `number`; ends a message."""
    if number > _MOST_TRIED:
        return f"use a divisor of {number}"
    found = divisors(number)
    # The nearest ones, where there are many.
    middle = bisect.bisect(found, wanted)
    first = max(0, min(middle - _MOST_LISTED // 2, len(found) - _MOST_LISTED))
    near = found[first : first + _MOST_LISTED]
    if len(near) == 1:
        return f"use {near[0]}"
    such_as = "such as " if len(near) < len(found) else ""
    return f"use {such_as}{', '.join(map(str, near[:-1]))} or {near[-1]}"


@final
@attrs.frozen(kw_only=True)
class ParallelState(Generic[AxisT]):
    """Degrees of parallelism of one run; a value, so nothing in it depends on the process.

    Name the extra axes where there are more than `ep`: the default of `extra_parallel_sizes` has
    `ep` alone, whatever axes the annotation promises.

    Raises:
        TypeError: for a degree that is no int, or extra sizes that are no `ExtraParallelSizes`.
        ValueError: for a degree below 1, a rule of divisibility that is broken, or an extra axis
            whose name is taken; the message holds the rule and its numbers.
    """

    dp_size: int = attrs.field(default=1, validator=_is_degree)
    """Ranks that read different data, replicas included. Default: no data parallelism."""

    dp_replicate_size: int = attrs.field(default=1, validator=_is_degree)
    """Copies of the sharded model (HSDP), of which `dp_size` is a multiple. Default: one copy."""

    ulysses_size: int = attrs.field(default=1, validator=_is_degree)
    """Ranks that share each sequence (Ulysses, arXiv:2309.14509). Default: whole sequences."""

    tensor_size: int = attrs.field(default=1, validator=_is_degree)
    """Ranks that share each dense matrix product. Default: off."""

    pipeline_size: int = attrs.field(default=1, validator=_is_degree)
    """Stages that the layers are cut into. Default: off."""

    extra_parallel_sizes: ExtraParallelSizes[AxisT] = attrs.field(
        factory=_ep_off, validator=_is_extra_sizes
    )
    """Further axes, each within the ranks of `fsdp`. Default: `ep` of size 1, which is off."""

    def __attrs_post_init__(self) -> None:
        """Check the degrees against each other."""
        if self.dp_size % self.dp_replicate_size:
            message = (
                f"dp_replicate_size {self.dp_replicate_size} must divide dp_size {self.dp_size}; "
                f"{_usable(self.dp_size, self.dp_replicate_size)}"
            )
            raise ValueError(message)
        taken = {*DENSE_AXES, *FLAT_AXES}
        for axis, size in self.extra_parallel_sizes.items():
            names = {str(axis), f"{axis}_fsdp"}
            if clash := names & taken:
                message = (
                    f"extra parallel axis {axis!r} needs the axis names {axis!r} and "
                    f"'{axis}_fsdp', of which {min(clash)!r} is taken; choose another name"
                )
                raise ValueError(message)
            taken |= names
            if self.fsdp_size % size:
                message = (
                    f"extra_parallel_sizes[{axis!r}] = {size} must divide "
                    f"dp_shard_size * ulysses_size = {self.dp_shard_size} * {self.ulysses_size} "
                    f"= {self.fsdp_size}; {_usable(self.fsdp_size, size)}"
                )
                raise ValueError(message)

    @overload
    @staticmethod
    def for_world(
        world_size: int,
        *,
        dp_replicate_size: int = ...,
        ulysses_size: int = ...,
        tensor_size: int = ...,
        pipeline_size: int = ...,
    ) -> "ParallelState[Literal['ep']]": ...
    @overload
    @staticmethod
    def for_world(
        world_size: int,
        *,
        dp_replicate_size: int = ...,
        ulysses_size: int = ...,
        tensor_size: int = ...,
        pipeline_size: int = ...,
        extra_parallel_sizes: ExtraParallelSizes[AxisT],
    ) -> "ParallelState[AxisT]": ...

    @staticmethod
    def for_world(
        world_size: int,
        *,
        dp_replicate_size: int = 1,
        ulysses_size: int = 1,
        tensor_size: int = 1,
        pipeline_size: int = 1,
        extra_parallel_sizes: ExtraParallelSizes[Any] | None = None,
    ) -> "ParallelState[Any]":
        """Fill a world of `world_size` ranks: what the other degrees leave becomes `dp_size`.

        Raises:
            TypeError: as the constructor does.
            ValueError: if the given degrees do not divide the world, or as the constructor does.
        """
        given = {
            "world_size": world_size,
            "ulysses_size": ulysses_size,
            "tensor_size": tensor_size,
            "pipeline_size": pipeline_size,
        }
        for name, value in given.items():
            check_count(f"ParallelState.for_world: {name}", value)
        ranks_per_replica = ulysses_size * tensor_size * pipeline_size
        if world_size % ranks_per_replica:
            message = (
                f"ulysses_size * tensor_size * pipeline_size = {ulysses_size} * {tensor_size} * "
                f"{pipeline_size} = {ranks_per_replica} must divide world_size {world_size}"
            )
            raise ValueError(message)
        return ParallelState(
            dp_size=world_size // ranks_per_replica,
            dp_replicate_size=dp_replicate_size,
            ulysses_size=ulysses_size,
            tensor_size=tensor_size,
            pipeline_size=pipeline_size,
            extra_parallel_sizes=_ep_off()
            if extra_parallel_sizes is None
            else extra_parallel_sizes,
        )

    @property
    def dp_shard_size(self) -> int:
        """Ranks with different data within one replica of the model."""
        return self.dp_size // self.dp_replicate_size

    @property
    def fsdp_size(self) -> int:
        """Ranks that each dense parameter is sharded over: dp_shard_size * ulysses_size."""
        return self.dp_shard_size * self.ulysses_size

    @property
    def data_size(self) -> int:
        """Ranks that a sum over all tokens runs over: dp_size * ulysses_size.

        It is also what FSDP divides a gradient by: see `collectives.share_of_mean`.
        """
        return self.dp_size * self.ulysses_size

    @property
    def world_size(self) -> int:
        """Ranks of the whole run."""
        return math.prod(self.dense_sizes.values())

    @property
    def dense_sizes(self) -> dict[str, int]:
        """Size of each of `DENSE_AXES`, outermost first."""
        return {
            "pipeline": self.pipeline_size,
            "dp_replicate": self.dp_replicate_size,
            "dp_shard": self.dp_shard_size,
            "ulysses": self.ulysses_size,
            "tensor": self.tensor_size,
        }

    def extra_fsdp_size(self, axis: AxisT) -> int:
        """Ranks that one slice along `axis` is sharded over, such as the experts of an `ep` rank.

        Raises:
            UnknownAxisError: if this state has no such extra axis.
        """
        return self.fsdp_size // self.extra_parallel_sizes[axis]

    def check_world(self, world_size: int) -> None:
        """Refuse a world that these degrees do not fill exactly.

        Raises:
            TypeError: for a number that is no int.
            ValueError: for another number, with both.
        """
        check_count("check_world: world_size", world_size)
        if world_size != self.world_size:
            factors = " * ".join(f"{name} {size}" for name, size in self.dense_sizes.items())
            message = (
                f"this ParallelState needs {self.world_size} ranks ({factors}), "
                f"got a world of {world_size}; ParallelState.for_world({world_size}, ...) derives "
                "dp_size from the world"
            )
            raise ValueError(message)

    def check_model(
        self, *, num_attention_heads: int, num_key_value_heads: int, num_experts: int | None = None
    ) -> None:
        """Refuse a model that cannot be spread over these degrees.

        Ulysses gives each rank whole query heads. Where there are fewer key-value heads than
        Ulysses ranks, each is repeated, a whole number of times.

        Args:
            num_attention_heads: query heads of a layer.
            num_key_value_heads: key-value heads of a layer.
            num_experts: routed experts of a layer; None for a dense model.

        Raises:
            TypeError: for a number that is no int.
            ValueError: with the rule and its numbers.
        """
        check_count("check_model: num_attention_heads", num_attention_heads)
        check_count("check_model: num_key_value_heads", num_key_value_heads)
        heads_over = self.ulysses_size * self.tensor_size
        if num_attention_heads % heads_over:
            message = (
                f"ulysses_size * tensor_size = {self.ulysses_size} * {self.tensor_size} = "
                f"{heads_over} must divide the {num_attention_heads} attention heads"
            )
            raise ValueError(message)
        if num_key_value_heads % heads_over and heads_over % num_key_value_heads:
            message = (
                f"ulysses_size * tensor_size = {self.ulysses_size} * {self.tensor_size} = "
                f"{heads_over} must divide the {num_key_value_heads} key-value heads, "
                "or be a multiple of them"
            )
            raise ValueError(message)
        ep_size = self.extra_parallel_sizes.as_dict().get("ep", 1)
        if ep_size == 1:
            return
        if num_experts is None:
            message = (
                f"extra_parallel_sizes['ep'] = {ep_size} has no effect on a model without experts; "
                "set it to 1"
            )
            raise ValueError(message)
        check_count("check_model: num_experts", num_experts)
        if num_experts % ep_size:
            message = (
                f"extra_parallel_sizes['ep'] = {ep_size} must divide the {num_experts} experts; "
                f"{_usable(num_experts, ep_size)}"
            )
            raise ValueError(message)
