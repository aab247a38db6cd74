"""Which part of a checkpoint's tensor goes where in a model, learnt from the model's own loader.

A model's `load_weights` finds the place of each tensor by name: stacks queries, keys and values,
splits over devices, puts experts into one parameter. For 18,000 expert tensors that search costs
seconds, every time, for the same answer. Here it runs once, on tensors without memory: each
`copy_` that it would do is written down instead of done. An update then is those copies alone.

Only right where a parameter in use has the layout in which it was loaded; the caller knows that.
Needs torch, and no vLLM.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast, final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rollout_vllm.headers import TensorHeader
from rollout_vllm.torch_headers import torch_dtype


class SupportsLoadWeights(Protocol):
    """What every model of vLLM has, beside being a module."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> object:
        """Load weights under their checkpoint names."""


class PlanError(Exception):
    """The loader does not only copy, or leaves something out: there is no plan, use the loader."""


class Piece(NamedTuple):
    """Some rows of one tensor of a checkpoint."""

    name: str
    """Name in the checkpoint."""

    rows: Tensor
    """Contiguous: rows `start` and following of the tensor, or all of it if it has no rows."""

    start: int
    """First row."""

    num_rows: int
    """Rows of the whole tensor; 1 for a scalar."""

    @property
    def whole(self) -> bool:
        """Whether these are all rows."""
        return self.rows.ndim == 0 or self.rows.shape[0] == self.num_rows


class _Copy(NamedTuple):
    """One copy: a view of the checkpoint's tensor to a view of a parameter, of the same size."""

    target: Tensor
    stride: tuple[int, ...]
    offset: int


@final
class CopyPlan:
    """The copies that make one version of the weights, by name in the checkpoint."""

    def __init__(self, copies: Mapping[str, Sequence[_Copy]]) -> None:
        self._copies = copies

    @property
    def num_copies(self) -> int:
        """Copies of one whole update."""
        return sum(len(copies) for copies in self._copies.values())

    def apply(self, pieces: Iterable[Piece]) -> None:
        """Copy the pieces to their places.

        On a GPU the copies are only enqueued when this returns.
        """
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for piece in pieces:
            rows = piece.rows
            for copy in self._copies[piece.name]:
                if piece.whole:
                    targets.append(copy.target)
                    sources.append(
                        rows.as_strided(
                            copy.target.shape, copy.stride, rows.storage_offset() + copy.offset
                        )
                    )
                    continue
                part = _part_in_rows(copy, piece)
                if part is not None:
                    targets.append(part[0])
                    sources.append(part[1])
        if targets:
            torch._foreach_copy_(targets, sources)


def _part_in_rows(copy: _Copy, piece: Piece) -> tuple[Tensor, Tensor] | None:
    """The part of a copy whose source lies in the piece.

    A copy reads whole steps along its longest stride, and pieces are cut between rows, so no step
    lies in two pieces.
    """
    rows = piece.rows
    row_length = rows.numel() // rows.shape[0]
    begin, end = piece.start * row_length, (piece.start + rows.shape[0]) * row_length
    size = list(copy.target.shape)
    dim = max(range(len(size)), key=lambda d: (size[d] > 1, copy.stride[d]))
    step = max(copy.stride[dim], 1)
    first = max(0, -((copy.offset - begin) // step))
    last = min(size[dim], -((copy.offset - end) // step))
    if first >= last:
        return None
    size[dim] = last - first
    offset = copy.offset + first * copy.stride[dim] - begin
    return (
        copy.target.narrow(dim, first, last - first),
        rows.as_strided(size, copy.stride, rows.storage_offset() + offset),
    )


class _Recorder(TorchDispatchMode):
    """Writes down copies out of the given tensors, which have no memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.copies: dict[str, list[_Copy]] = {}
        self.filled: list[Tensor] = []
        self._names: dict[int, str] = {}
        self._kept: list[Tensor] = []

    def add(self, name: str, header: TensorHeader) -> Tensor:
        """A tensor that stands for one of the checkpoint."""
        tensor = torch.empty(header.shape, dtype=torch_dtype(header.dtype), device="meta")
        self._names[tensor.untyped_storage()._cdata] = name  # noqa: SLF001  (identity of a storage)
        self._kept.append(tensor)  # a freed storage's identity would come again
        self.copies[name] = []
        return tensor

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401  (torch's own signature)
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Record a copy out of a checkpoint's tensor; let everything else happen."""
        if func is torch.ops.aten.copy_.default:
            target, source = cast("tuple[Tensor, Tensor]", args[:2])
            if not target.is_meta:
                self._record(target, source)
                return target
        elif func in (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default):
            # padding: it may as well be filled
            self.filled.append(cast("Tensor", args[0]))
        elif any(alias.is_write for alias in _written(func)) and any(
            isinstance(argument, Tensor) and not argument.is_meta for argument in args
        ):
            raise PlanError(f"the model's loader does {func}")
        return func(*args, **(kwargs or {}))

    def _record(self, target: Tensor, source: Tensor) -> None:
        name = (
            self._names.get(source.untyped_storage()._cdata)  # noqa: SLF001
            if source.is_meta
            else None
        )
        if name is None or source.shape != target.shape:
            raise PlanError(
                f"the model's loader computes what it copies: {list(source.shape)} to "
                f"{list(target.shape)}"
            )
        self.copies[name].append(_Copy(target, source.stride(), int(source.storage_offset())))


def _written(func: Any) -> list[Any]:  # noqa: ANN401  (torch's schema types are private)
    return [a.alias_info for a in func._schema.arguments if a.alias_info is not None]  # noqa: SLF001


def record_plan(model: nn.Module, tensors: Mapping[str, TensorHeader]) -> CopyPlan:
    """Learn the copies from the model's `load_weights`; moves no weight.

    Args:
        model: has `load_weights`, and parameters in the layout in which they are loaded.
        tensors: every tensor of the checkpoint.

    Raises:
        PlanError: if the loader does something else than copy, or if the copies do not write every
            element of every parameter exactly once.
    """
    recorder = _Recorder()
    weights = [(name, recorder.add(name, header)) for name, header in tensors.items()]
    with torch.no_grad(), recorder:
        try:
            cast("SupportsLoadWeights", model).load_weights(iter(weights))
        except (RuntimeError, ValueError) as error:
            raise PlanError(f"the model's loader reads values: {error}") from error
    targets = [copy.target for copies in recorder.copies.values() for copy in copies]
    _check_coverage(model, [*targets, *recorder.filled])
    return CopyPlan(recorder.copies)


def _check_coverage(model: nn.Module, targets: Iterable[Tensor]) -> None:
    """Every parameter is written as a whole, and nothing is written twice."""
    written: dict[int, int] = {}
    starts: set[tuple[int, int]] = set()
    for target in targets:
        if target.numel() == 0:
            continue
        storage = target.untyped_storage().data_ptr()
        start = (storage, int(target.storage_offset()))
        if start in starts:
            raise PlanError("the model's loader writes one place twice")
        starts.add(start)
        written[storage] = written.get(storage, 0) + target.numel()
    for name, parameter in model.named_parameters():
        found = written.get(parameter.untyped_storage().data_ptr(), 0)
        if found != parameter.numel():
            raise PlanError(
                f"the model's loader writes {found} of the {parameter.numel()} elements of {name}"
            )
