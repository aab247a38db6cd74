"""Problems that a program makes: the generators of reasoning-gym as a source.

reasoning-gym (Stojanovski et al. 2025, https://arxiv.org/abs/2505.24760, Apache-2.0) also brings a
scorer with each generator. It is not used here: several of them (``puzzle24``, ``countdown``) hand
what a model wrote to a parser that evaluates it, in the process that grades.
"""

import json
from collections.abc import Mapping
from typing import Literal

from rl_tasks.errors import TaskError
from rl_tasks.problem import ChatMessage, JsonValue, Problem

_NEEDS_REASONING_GYM = "generated problems need reasoning-gym; install rl-tasks[generators]"


def generated_problems(
    generator: str,
    *,
    num_problems: int,
    seed: int,
    settings: Mapping[str, JsonValue] | None = None,
    instruction: str = "",
    own_scorer: Literal["error", "ignore"] = "error",
) -> tuple[Problem, ...]:
    r"""Problems of one of reasoning-gym's generators; the same for the same arguments.

    The data source is ``reasoning_gym/<generator>``, the ground truth the generator's answer, and
    `Problem.extra_info` its metadata.

    Args:
        generator: its name, such as ``"gcd"``.
        num_problems: how many, at least 1.
        seed: of the generator.
        settings: the generator's own, such as ``{"max_value": 100}``.
        instruction: put behind each question, with a blank line between; say here how the answer
            is to be written, such as in ``\boxed{}``.
        own_scorer: what happens with a generator whose answers reasoning-gym compares in its own
            way, which is not used here: they may be right in more than one form. ``ignore`` says
            that the reward in use can do with the one answer that is given.

    Raises:
        ImportError: without reasoning-gym; names the extra.
        TaskError: for a generator, or a setting, that does not exist, or as `own_scorer` says.
    """
    if num_problems < 1:
        message = f"generated_problems: expected at least 1 problem, got {num_problems}"
        raise TaskError(message)
    try:
        import reasoning_gym  # type: ignore[import-untyped]  # noqa: PLC0415 - an extra
        from reasoning_gym.dataset import (  # type: ignore[import-untyped]  # noqa: PLC0415
            ProceduralDataset,
        )
        from reasoning_gym.factory import DATASETS  # type: ignore[import-untyped]  # noqa: PLC0415
    except ImportError as error:
        raise ImportError(_NEEDS_REASONING_GYM) from error
    if generator not in DATASETS:
        message = (
            f"unknown generator {generator!r}; reasoning-gym has {', '.join(sorted(DATASETS))}"
        )
        raise TaskError(message)
    try:
        made = reasoning_gym.create_dataset(
            generator, size=num_problems, seed=seed, **(settings or {})
        )
    except (TypeError, ValueError, AssertionError) as error:
        message = f"generator {generator!r}, settings {dict(settings or {})}: {error}"
        raise TaskError(message) from error
    if own_scorer == "error" and type(made).score_answer is not ProceduralDataset.score_answer:
        message = (
            f"generator {generator!r} has a scorer of its own, which is not used here; where its "
            "answer is the only one that your reward needs to know, choose own_scorer='ignore'"
        )
        raise TaskError(message)
    return tuple(
        _problem(generator, seed, index, made[index], instruction) for index in range(num_problems)
    )


def _problem(
    generator: str, seed: int, index: int, entry: Mapping[str, object], instruction: str
) -> Problem:
    question, answer = entry["question"], entry["answer"]
    behind = f"\n\n{instruction}" if instruction else ""
    return Problem(
        problem_id=f"reasoning_gym/{generator}/{seed}/{index}",
        messages=(ChatMessage(role="user", content=f"{question}{behind}"),),
        ground_truth=str(answer),
        data_source=f"reasoning_gym/{generator}",
        # tuples become lists; what JSON lacks, such as a fraction, its text
        extra_info=json.loads(json.dumps(entry["metadata"], default=str)),
    )
