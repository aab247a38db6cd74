"""Finding the box."""

import pytest

from rl_tasks.boxed import last_complete_box


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{5} \boxed{7}", "7"),
        (r"\boxed{5} \boxed{7", "5"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\boxed{5} + 1}", "5"),
        (r"\fbox{3}", "3"),
        (r"\boxed {4}", "4"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{a \} b}", r"a \} b"),
        (r"\\boxed{5}", None),
        (r"} } \boxed{5} {", "5"),
        (r"\boxed{}", ""),
        (r"\boxed{5", None),
        ("none", None),
    ],
)
def test_the_last_box_that_closes(text: str, content: str | None) -> None:
    """Braces are matched, escaped ones are none, and an open box is no box."""
    assert last_complete_box(text) == content


def test_a_hostile_text_is_gone_through_once() -> None:
    """200,000 boxes that never close give no answer (a search from each would take hours)."""
    assert last_complete_box(r"\boxed{" * 200_000) is None
