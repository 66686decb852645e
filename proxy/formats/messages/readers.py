"""Read recorded replies that became messages, for all that the ledger stores of them (pure)."""

from proxy.formats.base import ModelRequest, ReplyFacts
from proxy.formats.choices.chat_reply import ChatReply, ChatTokens, read_reply
from proxy.formats.messages.from_chat import StreamedMessage, WholeMessage
from proxy.formats.messages.plain import message_facts
from store.values.json_limits import MAX_DEPTH, most_of, nests_too_deep


class WholeMessageReader(WholeMessage):
    """Read a chat completion in one piece as the message that it became."""

    def __init__(
        self, request: ModelRequest, served_name: str | None, *, status: int | None = None
    ) -> None:
        """Begin the reply to `request`, which came with this HTTP `status`."""
        super().__init__(request, served_name, status=status)
        self._tokens = ChatTokens()

    def read(self, raw: bytes) -> None:
        """Take the reply's bytes."""
        self.feed(raw)

    def _read(self, body: bytes) -> ChatReply | None:
        reply = super()._read(body)
        if reply is not None:
            self._tokens.take(reply)
        return reply

    def facts(self) -> ReplyFacts:
        """Return the message's facts, with the completion's token data."""
        return message_facts(
            self._message,
            self._tokens.sampled(),
            whole=self._whole,
            too_deep=_arguments_nest_too_deep(b"".join(self._pieces)),
        )


class StreamedMessageReader(StreamedMessage):
    """Read a chat completion's chunks as the message that they became."""

    def __init__(self, request: ModelRequest, served_name: str | None) -> None:
        """Begin the reply to `request`."""
        super().__init__(request, served_name)
        self._tokens = ChatTokens()

    def read(self, raw: bytes) -> None:
        """Take the reply's bytes."""
        self.feed(raw)

    def _chunk(self, chunk: ChatReply | None, payload: bytes) -> bytes:
        if chunk is not None and chunk.choices is not None:
            self._tokens.take(chunk)
        return super()._chunk(chunk, payload)

    def facts(self) -> ReplyFacts:
        """Return the facts of the message that the events make, with the chunks' token data."""
        sampled = self._tokens.sampled()
        return message_facts(self._message or None, sampled, whole=self._ended)


def _arguments_nest_too_deep(raw: bytes) -> bool:
    """Return whether a chat's reply that became a message has arguments that nest too deep.

    A tool call's arguments are text in a chat, and a structure in a message.
    """
    if most_of(raw).containers <= MAX_DEPTH:
        return False
    reply = read_reply(raw)
    messages = [choice.message for choice in (reply.choices or ())] if reply is not None else []
    calls = [call for message in messages if message for call in message.tool_calls or ()]
    return any(
        nests_too_deep((call.function.arguments or "").encode(errors="surrogatepass"))
        for call in calls
    )
