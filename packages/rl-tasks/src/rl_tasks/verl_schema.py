"""One row in verl's schema to a `Problem`.

The columns, as verl's ``RLHFDataset`` and reward managers read them (verl 1dda039b)::

    data_source   str                                  chooses the reward
    prompt        list of {role: str, content: str}    chat messages
    reward_model  {style: str, ground_truth: str}
    images        list of {bytes, path}, optional    shown where <image> stands in the messages,
                                                     which is text if there are none
    extra_info    mapping, optional

What a row asks for and nothing here can do (videos, tools, an agent loop, a reward model) makes it
unusable: training on the rest of such a row would be training on another problem.
"""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from rl_tasks.errors import RowError
from rl_tasks.pictures import PLACEHOLDER, PictureError, decode_picture, read_picture
from rl_tasks.problem import ChatMessage, JsonValue, Problem
from rl_tasks.sources import data_source_problem

READ_COLUMNS = ("data_source", "prompt", "images", "reward_model", "extra_info")
"""Columns that become part of a `Problem`."""

_UNSUPPORTED_COLUMNS = ("videos", "audios", "tools")
"""Columns that would change the prompt; they must be empty."""

CHECKED_COLUMNS = (*_UNSUPPORTED_COLUMNS, "agent_name")
"""Columns that are looked at only to refuse what they ask for."""

_ROLES = frozenset({"system", "user", "assistant", "tool"})

_Fail = Callable[[str, str, str], RowError]


def parse_row(
    row: Mapping[str, object],
    *,
    path: Path,
    row_name: str,
    problem_id: str,
    known_sources: Collection[str] | None,
) -> Problem:
    """Make a problem of one row.

    Args:
        row: column to value, as Python objects.
        path: file that it came from, for messages.
        row_name: which row of it, for messages.
        problem_id: id of the problem.
        known_sources: data sources that have a reward; None does not check.

    Raises:
        RowError: names file, row, field and what is wrong.
    """

    def fail(field: str, reason: str, problem: str) -> RowError:
        return RowError(path=path, row=row_name, field=field, reason=reason, problem=problem)

    _refuse_unsupported(row, fail)
    data_source = row.get("data_source")
    if not isinstance(data_source, str):
        raise fail("data_source", "data_source", f"expected a string, got {_shown(data_source)}")
    if known_sources is not None:
        problem = data_source_problem(data_source, known_sources)
        if problem is not None:
            raise fail("data_source", "data_source", problem)
    elif not data_source.strip():
        raise fail("data_source", "data_source", f"data_source is blank ({data_source!r})")
    messages = _messages(row.get("prompt"), fail)
    return Problem(
        problem_id=problem_id,
        messages=messages,
        images=_images(row.get("images"), messages, path.parent, fail),
        ground_truth=_ground_truth(row.get("reward_model"), fail),
        data_source=data_source,
        extra_info=_extra_info(row.get("extra_info"), fail),
    )


def to_row(problem: Problem) -> dict[str, object]:
    """The row from which `parse_row` makes the same problem."""
    row: dict[str, object] = {
        "data_source": problem.data_source,
        "prompt": [
            {"role": message.role, "content": message.content} for message in problem.messages
        ],
        "reward_model": {"style": "rule", "ground_truth": problem.ground_truth},
    }
    if problem.images:
        row["images"] = [{"bytes": data, "path": None} for data in problem.images]
    if problem.extra_info:
        row["extra_info"] = dict(problem.extra_info)
    return row


def _refuse_unsupported(row: Mapping[str, object], fail: _Fail) -> None:
    for column in _UNSUPPORTED_COLUMNS:
        value = row.get(column)
        if value is not None and not (isinstance(value, list | tuple) and not value):
            raise fail(column, column, f"rows with {column} are not supported; got {_shown(value)}")
    agent = row.get("agent_name")
    if agent is not None and agent != "single_turn_agent":
        raise fail(
            "agent_name",
            "agent_name",
            f"expected no agent loop or 'single_turn_agent', got {_shown(agent)}",
        )


def _messages(prompt: object, fail: _Fail) -> tuple[ChatMessage, ...]:
    if not isinstance(prompt, list) or not prompt:
        raise fail(
            "prompt",
            "prompt",
            f"expected a non-empty list of {{role, content}} messages, got {_shown(prompt)}",
        )
    messages = []
    for index, message in enumerate(prompt):
        field = f"prompt[{index}]"
        if not isinstance(message, Mapping):
            raise fail(field, "prompt", f"expected {{role, content}}, got {_shown(message)}")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or role not in _ROLES:
            raise fail(
                f"{field}.role",
                "prompt",
                f"expected one of {', '.join(sorted(_ROLES))}, got {_shown(role)}",
            )
        if not isinstance(content, str):
            raise fail(f"{field}.content", "prompt", f"expected a string, got {_shown(content)}")
        if any("\ud800" <= character <= "\udfff" for character in content):
            raise fail(
                f"{field}.content",
                "prompt",
                f"expected text, got half a character (a lone surrogate) in {_shown(content)}",
            )
        for key in sorted(set(message) - {"role", "content"}):
            if message[key] is not None:
                raise fail(
                    f"{field}.{key}",
                    "prompt",
                    f"messages with {key} are not supported; got {_shown(message[key])}",
                )
        messages.append(ChatMessage(role=role, content=content))
    return tuple(messages)


def _images(
    value: object, messages: tuple[ChatMessage, ...], folder: Path, fail: _Fail
) -> tuple[bytes, ...]:
    """Encoded images that can be decoded, one for each placeholder."""
    if value is None or (isinstance(value, list) and not value):
        return ()  # then the placeholder is text like any other
    if not isinstance(value, list):
        raise fail("images", "images", f"expected a list of {{bytes, path}}, got {_shown(value)}")
    images = []
    for index, entry in enumerate(value):
        try:
            data = read_picture(entry, folder=folder)
            decode_picture(data)
        except PictureError as error:
            raise fail(f"images[{index}]", "images", str(error)) from error
        images.append(data)
    found = sum(message.content.count(PLACEHOLDER) for message in messages)
    if found != len(images):
        raise fail(
            "images",
            "images",
            f"expected one {PLACEHOLDER} in the prompt for each of {len(images)} images, "
            f"got {found}",
        )
    return tuple(images)


def _ground_truth(reward_model: object, fail: _Fail) -> str:
    if not isinstance(reward_model, Mapping):
        raise fail(
            "reward_model",
            "reward_model",
            f"expected {{style, ground_truth}}, got {_shown(reward_model)}",
        )
    style = reward_model.get("style")
    # published files say "rule" or "rule-lighteval/MATH_v2"; "model" asks for a reward model
    if style is not None and not (isinstance(style, str) and style.startswith("rule")):
        raise fail(
            "reward_model.style",
            "reward_model.style",
            f"expected 'rule' or 'rule-...', got {_shown(style)}; there is no reward model here",
        )
    ground_truth = reward_model.get("ground_truth")
    if not isinstance(ground_truth, str):
        raise fail(
            "reward_model.ground_truth",
            "reward_model.ground_truth",
            f"expected a string, got {_shown(ground_truth)}; write the answer as text",
        )
    return ground_truth


def _extra_info(extra_info: object, fail: _Fail) -> Mapping[str, JsonValue]:
    if extra_info is None:
        return {}
    if not isinstance(extra_info, Mapping):
        raise fail("extra_info", "extra_info", f"expected a mapping, got {_shown(extra_info)}")
    return {str(key): _json(value, f"extra_info.{key}", fail) for key, value in extra_info.items()}


def _json(value: object, field: str, fail: _Fail) -> JsonValue:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_json(item, f"{field}[{index}]", fail) for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        return {str(key): _json(item, f"{field}.{key}", fail) for key, item in value.items()}
    raise fail(field, "extra_info", f"expected what JSON can hold, got {_shown(value)}")


def _shown(value: object) -> str:
    text = repr(value)
    if len(text) > 60:  # noqa: PLR2004 - about a line of a message
        text = text[:60] + "..."
    return "nothing" if value is None else f"{text} ({type(value).__name__})"
