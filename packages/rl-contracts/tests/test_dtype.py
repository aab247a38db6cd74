"""Names of floating-point types."""

import attrs
import pytest

from rl_contracts import DType, known_dtype


@attrs.frozen(kw_only=True)
class Config:
    """A setting with a type, and one that may be left open."""

    compute_dtype: DType = attrs.field(default="bfloat16", validator=known_dtype)
    export_dtype: DType | None = attrs.field(default=None, validator=known_dtype)


def test_unknown_names_are_refused() -> None:
    """The message holds the field, the known names and what came; None passes."""
    assert Config().export_dtype is None
    with pytest.raises(
        ValueError, match=r"^compute_dtype: expected float32 or bfloat16, got 'float16'$"
    ):
        Config(compute_dtype="float16")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"export_dtype.*got 'fp8'"):
        Config(export_dtype="fp8")  # type: ignore[arg-type]
