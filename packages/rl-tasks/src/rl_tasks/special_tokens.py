"""Text that a tokenizer reads as a special token, such as ``<|im_end|>``, where it is only text.

A chat template writes special tokens and contents into one text, which is then tokenised: what a
user or a tool wrote ends a turn, or begins one of the system's, if it looks like that. Nothing in
the ids tells them apart afterwards.

In a prompt it is an error, since a data set that holds it is broken, or already has a template's
text in it. In what a tool says during a run it cannot be one, since the model chooses what its
tools repeat: there it is broken up by a zero-width space, so that it reads the same and is text.
"""

from collections.abc import Callable, Collection, Mapping, Sequence

from rl_tasks.errors import TaskError
from rl_tasks.problem import ChatMessage

_BREAK = "\u200b"

_PLAIN_CHAT = [{"role": role, "content": "word"} for role in ("user", "assistant", "user")]


def special_texts(tokenizer: object) -> Mapping[str, int]:
    """What a Hugging Face tokenizer takes for a special token wherever it stands, and its id.

    Nothing for a tokenizer that has no ``added_tokens_decoder``. Added tokens that are not special,
    such as Qwen's ``<tool_call>``, are text by their own account: templates and prompts name them.
    The marks between which the tokenizer's chat template puts a turn count as special all the same:
    DeepSeek-R1-Distill's ``<\uff5cUser\uff5c>`` does not say that it is.
    """
    added: Mapping[int, object] = getattr(tokenizer, "added_tokens_decoder", {})
    special = {number for number, token in added.items() if getattr(token, "special", 0)}
    others = {str(token): number for number, token in added.items() if number not in special}
    special |= {others[mark] for mark in _turn_marks(tokenizer, others)}
    return {str(token): number for number, token in added.items() if number in special}


def _turn_marks(tokenizer: object, added: Collection[str]) -> frozenset[str]:
    """Those added tokens in brackets that a chat template writes into a chat of plain words.

    But for tags with an end, such as ``<think>``, which prompts name. The last turn is a user's:
    to an assistant's, templates add what stands for its thoughts.
    """
    candidates = {
        text
        for text in added
        if f"{text[:1]}{text[-1:]}" in {"<>", "[]"}
        and text[1] != "/"
        and f"{text[0]}/{text[1:]}" not in added
    }
    if not candidates or not getattr(tokenizer, "chat_template", None):
        return frozenset()
    render: Callable[..., str] = tokenizer.apply_chat_template  # type: ignore[attr-defined]
    rendered = render(_PLAIN_CHAT, tokenize=False)
    return frozenset(text for text in candidates if text in rendered)


def refuse_special_tokens(
    tokenizer: object, messages: Sequence[ChatMessage], *, where: str
) -> None:
    """Raise if a message's text would be read as a special token.

    Raises:
        TaskError: names place, role and token.
    """
    known = special_texts(tokenizer)
    for index, message in enumerate(messages):
        for text in known:
            if text in message.content:
                error = (
                    f"{where}: the text of message {index} ({message.role}) holds {text!r}, which "
                    "this tokenizer reads as a special token and not as text; expected contents "
                    "without a chat template's tokens: take it out of the data"
                )
                raise TaskError(error)


def without_special_tokens(tokenizer: object, message: ChatMessage) -> ChatMessage:
    """The same message, in whose text a zero-width space breaks up what would be a special token.

    Raises:
        ValueError: for a special token of one character, which cannot be broken up.
    """
    content = message.content
    known = special_texts(tokenizer)
    while held := [text for text in known if text in content]:
        if len(held[0]) == 1:
            error = f"a {message.role} message holds {held[0]!r}, a special token of one character"
            raise ValueError(error)
        content = content.replace(held[0], f"{held[0][0]}{_BREAK}{held[0][1:]}")
    return ChatMessage(role=message.role, content=content)
