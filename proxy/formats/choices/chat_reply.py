"""Parse the parts of a chat completion, whole or in chunks, that a message is made of.

Each is parsed once into these types; all other fields are skipped unparsed.
"""

import re
from typing import Annotated, Any, Final

import msgspec

from proxy.formats.base import Sampled
from proxy.formats.requests import UNREADABLE

# An escape in a string; the group is a surrogate without its other half.
ESCAPE: Final = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)
REPLACED: Final = rb"\ufffd"
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class ChatFunction(msgspec.Struct):
    """Hold a tool call's name, which comes whole, and its arguments, which come in pieces."""

    name: str | None = None
    arguments: str | None = None


class ChatToolCall(msgspec.Struct):
    """Hold a tool call, or a piece of one."""

    index: int = 0
    id: str | None = None
    function: ChatFunction = msgspec.field(default_factory=ChatFunction)


class ChatMessage(msgspec.Struct):
    """Hold a message, or a piece of one."""

    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ChatToolCall] | None = None


class ChatToken(msgspec.Struct):
    """Hold the log-probability of one sampled token."""

    logprob: float


class ChatLogprobs(msgspec.Struct):
    """Hold the log-probabilities of a choice, or of a piece of one."""

    content: list[ChatToken] | None = None


class ChatChoice(msgspec.Struct):
    """Hold the only choice of a whole reply (`message`) or of a chunk (`delta`)."""

    message: ChatMessage | None = None
    delta: ChatMessage | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[TokenId] | None = None
    logprobs: ChatLogprobs | None = None


class Details(msgspec.Struct):
    """Count the prompt tokens that were read from a cache, or written to it."""

    cached_tokens: int | None = None
    created_cache_tokens: int | None = None


class ChatUsage(msgspec.Struct):
    """Count tokens, as the server states them."""

    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: Details | None = None


class ChatReply(msgspec.Struct):
    """Hold a chat completion, a chunk of one, or an error in its place."""

    id: str | None = None
    model: str | None = None
    choices: list[ChatChoice] | None = None
    usage: ChatUsage | None = None
    prompt_token_ids: list[TokenId] | None = None
    error: Any = None


def read_reply(payload: bytes) -> ChatReply | None:
    """Return the parsed reply or chunk, or None if it is neither."""
    try:
        return msgspec.json.decode(payload, type=ChatReply)
    except UNREADABLE:
        return None


def read_repaired(body: bytes) -> ChatReply | None:
    """Return a reply with U+FFFD for each lone surrogate and each byte that is not UTF-8."""
    text = body.decode(errors="replace").encode()
    return read_reply(ESCAPE.sub(lambda m: REPLACED if m[1] else m[0], text))


class ChatTokens:
    """Gather ids and log-probabilities, chunk by chunk."""

    def __init__(self) -> None:
        """Begin with nothing gathered."""
        self._prompt: list[int] | None = None
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._told: set[str] = set()
        self._counted: int | None = None

    def take(self, reply: ChatReply) -> None:
        """Add the token data of a reply, or of a chunk of one."""
        if reply.prompt_token_ids is not None:
            self._prompt = reply.prompt_token_ids
        if reply.usage is not None:
            self._counted = reply.usage.completion_tokens
        for choice in reply.choices or ():
            if choice.token_ids is not None:
                self._told.add("ids")
                self._ids += choice.token_ids
            if choice.logprobs is not None:
                self._told.add("logprobs")
                self._logprobs += (token.logprob for token in choice.logprobs.content or ())

    def sampled(self) -> Sampled:
        """Return what was gathered; None for what never came."""
        return Sampled(
            prompt_ids=None if self._prompt is None else tuple(self._prompt),
            sampled_ids=tuple(self._ids) if "ids" in self._told else None,
            sampled_logprobs=tuple(self._logprobs) if "logprobs" in self._told else None,
            choices=1,
            completion_tokens=self._counted,
        )
