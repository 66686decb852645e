"""Speak `/v1/messages`, answered through chat completions where vLLM serves the model (pure).

vLLM gives ids with its chat completions and none with its messages, which it makes of chat
completions anyway. So the request is sent there, and the reply is turned into a message. A request
that chat completions cannot express, and one to any other server, is forwarded as it is. So is one
that chat completions refuses as malformed: the refusal is then the API's own.
"""

from typing import Final

import msgspec

from proxy.formats.base import (
    ErrorShape,
    ModelRequest,
    ReplyReader,
    SamplingRules,
    StreamTranscript,
    Transcript,
    Turns,
)
from proxy.formats.chat.chat import CHAT
from proxy.formats.messages.as_chat import chat_request
from proxy.formats.messages.errors import ANTHROPIC
from proxy.formats.messages.from_chat import StreamedMessage, WholeMessage
from proxy.formats.messages.plain import (
    PlainReader,
    PlainReply,
    PlainStream,
    PlainStreamReader,
    Renaming,
)
from proxy.formats.messages.readers import StreamedMessageReader, WholeMessageReader
from proxy.formats.messages.sampling import MessagesSampling
from proxy.formats.messages.turns import MessagesTurns
from proxy.formats.requests import with_changes

CHAT_PATH: Final = CHAT.path
ASKED_FOR: Final = {"logprobs": True, "return_token_ids": True}


class MessagesFormat(msgspec.Struct, frozen=True):
    """Speak Anthropic's API, through chat completions if token ids are wanted."""

    name: str = "messages"
    title: str = "Anthropic messages"
    path: str = "/v1/messages"
    forwarded: tuple[str, ...] = ("/v1/messages/count_tokens",)
    errors: ErrorShape = ANTHROPIC
    turns: Turns = MessagesTurns()
    sampling: SamplingRules = MessagesSampling()
    unread: tuple[str, ...] = ()

    def rewrite(
        self, request: ModelRequest, served_name: str | None, *, want_ids: bool
    ) -> ModelRequest:
        """Return the request in chat completions' form if ids are wanted and it has such a form."""
        chat = chat_request(request.fields) if want_ids else None
        if chat is None:
            return with_changes(request, served_name, {})
        if served_name is not None:
            chat["model"] = served_name
        return msgspec.structs.replace(
            request,
            body=msgspec.json.encode(chat | ASKED_FOR),
            injected=frozenset(ASKED_FOR),
            path=CHAT_PATH,
        )

    def whole(
        self, request: ModelRequest, served_name: str | None, *, status: int | None = None
    ) -> Transcript:
        """Return a transcript that translates the reply, or passes it on if the request was."""
        if request.path is None:
            return PlainReply(Renaming(request, served_name))
        return WholeMessage(request, served_name, status=status)

    def streamed(self, request: ModelRequest, served_name: str | None) -> StreamTranscript:
        """Return a transcript that translates the events, or forwards them with the request."""
        if request.path is None:
            return PlainStream(Renaming(request, served_name))
        return StreamedMessage(request, served_name)

    def whole_reader(
        self, request: ModelRequest, served_name: str | None, *, status: int | None = None
    ) -> ReplyReader:
        """Return a reader of a reply that was translated, or passed on if the request was."""
        if request.path is None:
            return PlainReader(Renaming(request, served_name))
        return WholeMessageReader(request, served_name, status=status)

    def stream_reader(self, request: ModelRequest, served_name: str | None) -> ReplyReader:
        """Return a reader of events that were translated, or forwarded with the request."""
        if request.path is None:
            return PlainStreamReader(Renaming(request, served_name))
        return StreamedMessageReader(request, served_name)


MESSAGES: Final = MessagesFormat()
