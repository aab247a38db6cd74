"""Prompt data sets in a resumable order, chat templating and verifiable rewards."""

from rl_tasks.addition import (
    AdditionConfig,
    AdditionProblems,
    addition_problems,
    addition_reward,
)
from rl_tasks.chat import (
    EncodedProblem,
    EncodedProblems,
    Tokenizer,
    decode_completion,
    encode_problems,
    encode_prompt,
)
from rl_tasks.errors import NothingLeftError, RowError, TaskError
from rl_tasks.loading import LoadedProblems, load_problems, write_parquet
from rl_tasks.math_answer import MathAnswer
from rl_tasks.order import Draw, OrderState, PromptOrder
from rl_tasks.problem import ChatMessage, JsonValue, Problem
from rl_tasks.rewards import (
    ExactMatch,
    LastBox,
    LastNumber,
    Reward,
    RewardResult,
    RewardSummary,
    ScaledUnlessStopped,
    WeightedSum,
    grade,
    summarise,
)

__all__ = [
    "AdditionConfig",
    "AdditionProblems",
    "ChatMessage",
    "Draw",
    "EncodedProblem",
    "EncodedProblems",
    "ExactMatch",
    "JsonValue",
    "LastBox",
    "LastNumber",
    "LoadedProblems",
    "MathAnswer",
    "NothingLeftError",
    "OrderState",
    "Problem",
    "PromptOrder",
    "Reward",
    "RewardResult",
    "RewardSummary",
    "RowError",
    "ScaledUnlessStopped",
    "TaskError",
    "Tokenizer",
    "WeightedSum",
    "addition_problems",
    "addition_reward",
    "decode_completion",
    "encode_problems",
    "encode_prompt",
    "grade",
    "load_problems",
    "summarise",
    "write_parquet",
]
