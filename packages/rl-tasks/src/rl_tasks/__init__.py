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
    LoadedImages,
    Tokenizer,
    decode_completion,
    encode_problems,
    encode_prompt,
)
from rl_tasks.code_answer import CodeAnswer
from rl_tasks.errors import NothingLeftError, RowError, TaskError
from rl_tasks.exchange import Exchange
from rl_tasks.generated import generated_problems
from rl_tasks.judge import LlmJudge
from rl_tasks.loading import LoadedProblems, load_problems, write_parquet
from rl_tasks.math_answer import MathAnswer
from rl_tasks.order import Draw, OrderState, PromptOrder
from rl_tasks.prepare import PreparedCounts, prepare
from rl_tasks.problem import ChatMessage, JsonValue, Problem
from rl_tasks.rewards import (
    Answer,
    ExactMatch,
    LastBox,
    LastNumber,
    Reward,
    RewardResult,
    RewardSummary,
    ScaledUnlessStopped,
    WeightedSum,
    grade,
    grade_all,
    summarise,
)
from rl_tasks.sandbox import check_sandbox, run_python
from rl_tasks.sandbox_limits import (
    ProgramResult,
    SandboxFailedError,
    SandboxLimits,
    SandboxUnavailableError,
)
from rl_tasks.shape import LengthWithin, TaggedSections
from rl_tasks.tools import (
    CALCULATOR_SCHEMA,
    Tool,
    ToolCall,
    ToolError,
    answer_tool_calls,
    calculator,
    tool_calls,
)

__all__ = [
    "CALCULATOR_SCHEMA",
    "AdditionConfig",
    "AdditionProblems",
    "Answer",
    "ChatMessage",
    "CodeAnswer",
    "Draw",
    "EncodedProblem",
    "EncodedProblems",
    "ExactMatch",
    "Exchange",
    "JsonValue",
    "LastBox",
    "LastNumber",
    "LengthWithin",
    "LlmJudge",
    "LoadedImages",
    "LoadedProblems",
    "MathAnswer",
    "NothingLeftError",
    "OrderState",
    "PreparedCounts",
    "Problem",
    "ProgramResult",
    "PromptOrder",
    "Reward",
    "RewardResult",
    "RewardSummary",
    "RowError",
    "SandboxFailedError",
    "SandboxLimits",
    "SandboxUnavailableError",
    "ScaledUnlessStopped",
    "TaggedSections",
    "TaskError",
    "Tokenizer",
    "Tool",
    "ToolCall",
    "ToolError",
    "WeightedSum",
    "addition_problems",
    "addition_reward",
    "answer_tool_calls",
    "calculator",
    "check_sandbox",
    "decode_completion",
    "encode_problems",
    "encode_prompt",
    "generated_problems",
    "grade",
    "grade_all",
    "load_problems",
    "prepare",
    "run_python",
    "summarise",
    "tool_calls",
    "write_parquet",
]
