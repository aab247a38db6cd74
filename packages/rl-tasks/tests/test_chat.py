"""Chat templates."""

from collections import UserDict

import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from rl_tasks import (
    ChatMessage,
    NothingLeftError,
    Problem,
    TaskError,
    decode_completion,
    encode_problems,
    encode_prompt,
)
from rl_tasks.chat import ToolSchema

HELLO = (ChatMessage(role="user", content="hello"),)


class StubTokenizer:
    """Returns what it is told to: one id per character of the messages, and one per tool name."""

    bos_token_id: int | None = None

    def __init__(self, result: object = None) -> None:
        self.result = result

    def apply_chat_template(
        self,
        conversation: list[dict[str, str]],
        tools: list[ToolSchema] | None = None,
        *,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
    ) -> object:
        assert add_generation_prompt
        assert tokenize
        if self.result is not None:
            return self.result
        text = "".join(message["content"] for message in conversation)
        for tool in tools or ():
            assert isinstance(tool, dict)
            text += str(tool["name"])
        return [ord(character) for character in text]

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:  # noqa: FBT001, FBT002
        return "".join(chr(i) for i in token_ids if i or not skip_special_tokens)


def problem(name: str, content: str) -> Problem:
    return Problem(
        problem_id=name,
        messages=(ChatMessage(role="user", content=content),),
        ground_truth="",
        data_source="test",
    )


def real_tokenizer(*, adds_bos: bool) -> PreTrainedTokenizerFast:
    """A transformers tokenizer whose template writes a BOS."""
    vocabulary = {"<s>": 0, "user": 1, "hello": 2, "assistant": 3, "<unk>": 4, "</s>": 5}
    rust = RustTokenizer(WordLevel(vocabulary, unk_token="<unk>"))  # noqa: S106 - no password
    rust.pre_tokenizer = Whitespace()
    if adds_bos:
        rust.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=rust, **special)
    tokenizer.chat_template = (
        "{{ bos_token }} {% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
        "{% if add_generation_prompt %}assistant{% endif %}"
    )
    return tokenizer


@pytest.mark.parametrize("adds_bos", [False, True])
def test_a_prompt_begins_once(*, adds_bos: bool) -> None:
    """A27, A31: transformers' own tokenizer, mapping result and BOS in the template included."""
    assert encode_prompt(real_tokenizer(adds_bos=adds_bos), HELLO) == (0, 1, 2, 3)


def test_a_tokenizer_that_adds_bos_to_the_templates_own_gives_one() -> None:
    """A27: two BOS become one; without a BOS in the model nothing is taken away."""
    tokenizer = StubTokenizer([7, 7, 9, 7, 7])
    assert encode_prompt(tokenizer, HELLO) == (7, 7, 9, 7, 7)
    tokenizer.bos_token_id = 7
    assert encode_prompt(tokenizer, HELLO) == (7, 9, 7, 7)


@pytest.mark.parametrize("wrap", [dict, UserDict])
def test_a_mapping_is_as_long_as_its_ids(wrap: type) -> None:
    """A31: 600 ids in a mapping of 2 keys are over a limit of 512."""
    tokenizer = StubTokenizer(wrap(input_ids=[5] * 600, attention_mask=[1] * 600))
    assert len(encode_prompt(tokenizer, HELLO)) == 600
    with pytest.raises(NothingLeftError, match="0 of 1 problems left"):
        encode_problems(tokenizer, [problem("a", "x")], max_prompt_tokens=512, overlong="drop")


@pytest.mark.parametrize(
    "result",
    ["rendered text", ["a", "b"], [[1, 2]], {"ids": [1]}, b"ids", 3, {"input_ids": "text"}],
)
def test_what_is_no_list_of_ids_is_refused(result: object) -> None:
    """A31: strings, batches and mappings without ids never become token ids."""
    with pytest.raises(TypeError, match="apply_chat_template: expected"):
        encode_prompt(StubTokenizer(result), HELLO)


def test_a_template_that_renders_nothing_is_an_error() -> None:
    """An empty prompt could not be sampled from."""
    with pytest.raises(ValueError, match="1 messages to no token at all"):
        encode_prompt(StubTokenizer([]), HELLO)


def test_tools_count_towards_the_length() -> None:
    """A32: a prompt of 500 with a tool schema of 100 is over a limit of 512, not under it."""
    problems = [problem("long", "x" * 500), problem("short", "x" * 400)]
    alone = encode_problems(StubTokenizer(), problems, max_prompt_tokens=512, overlong="drop")
    assert alone.num_overlong == 0
    with_tools = encode_problems(
        StubTokenizer(),
        problems,
        max_prompt_tokens=512,
        overlong="drop",
        tools=[{"name": "t" * 100}],
    )
    assert [encoded.problem.problem_id for encoded in with_tools.problems] == ["short"]
    assert len(with_tools.problems[0].prompt_ids) == 500
    assert with_tools.num_overlong == 1


def test_the_limit_itself_is_allowed() -> None:
    """A prompt of exactly the limit stays; it is whole, since nothing is ever truncated."""
    encoded = encode_problems(
        StubTokenizer(), [problem("a", "x" * 8)], max_prompt_tokens=8, overlong="error"
    )
    assert encoded.problems[0].prompt_ids == (ord("x"),) * 8


def test_nothing_left_is_an_error_at_load() -> None:
    """A32: a set in which every prompt is too long says how long the shortest is."""
    problems = [problem("a", "x" * 30), problem("b", "x" * 20)]
    with pytest.raises(
        NothingLeftError,
        match=r"0 of 2 problems left .* max_prompt_tokens = 10; the shortest prompt has 20 tokens",
    ):
        encode_problems(StubTokenizer(), problems, max_prompt_tokens=10, overlong="drop")


def test_overlong_may_be_an_error() -> None:
    """A32: without dropping, the first long prompt is named with both numbers."""
    with pytest.raises(TaskError, match=r"problem a: its prompt has 30 tokens, the limit is .* 10"):
        encode_problems(
            StubTokenizer(), [problem("a", "x" * 30)], max_prompt_tokens=10, overlong="error"
        )


def test_special_tokens_are_left_out_of_the_text() -> None:
    """The end of the turn is not part of what is graded."""
    assert decode_completion(StubTokenizer(), (72, 105, 0)) == "Hi"
    assert decode_completion(real_tokenizer(adds_bos=False), (2, 5)) == "hello"


def test_a_decode_that_returns_no_text_is_refused() -> None:
    """What is graded is text."""

    class Batched(StubTokenizer):
        def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> list[str]:  # type: ignore[override]  # noqa: ARG002, FBT001, FBT002
            return ["a"]

    with pytest.raises(TypeError, match="expected text for one list of token ids, got list"):
        decode_completion(Batched(), (1,))
