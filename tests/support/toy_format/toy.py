"""Speak the toy API: `{"model", "said": [{"by", "words"}], "heat"}` gets `{"id", "words"}`."""

from typing import Final

import msgspec

from proxy.formats.base import ModelRequest, ReplyReader, StreamTranscript, Transcript, with_changes
from proxy.formats.conversation import Turns
from proxy.formats.errors import ErrorShape
from proxy.formats.sampling import SamplingRules
from tests.support.toy_format.errors import ToyErrors
from tests.support.toy_format.replies import ToyReader, ToyReply, ToyStream, ToyStreamReader
from tests.support.toy_format.sampling import ToySampling
from tests.support.toy_format.turns import ToyTurns


class ToyFormat(msgspec.Struct, frozen=True):
    """Speak the toy API."""

    name: str = "toy"
    title: str = "Toy"
    path: str = "/v1/toys"
    forwarded: tuple[str, ...] = ("/v1/toys/count",)
    errors: ErrorShape = ToyErrors()
    turns: Turns = ToyTurns()
    sampling: SamplingRules = ToySampling()
    unread: tuple[str, ...] = ()

    def rewrite(
        self, request: ModelRequest, served_name: str | None, *, want_ids: bool
    ) -> ModelRequest:
        """Ask for tokens."""
        added = {"tokens": msgspec.Raw(b"true")} if want_ids else {}
        return with_changes(request, served_name, added)

    def whole(
        self, request: ModelRequest, served_name: str | None, *, status: int | None = None
    ) -> Transcript:
        """Take the tokens out again."""
        return ToyReply(request, served_name)

    def streamed(self, request: ModelRequest, served_name: str | None) -> StreamTranscript:
        """Take the tokens out of each event."""
        return ToyStream(request, served_name)

    def whole_reader(
        self, request: ModelRequest, served_name: str | None, *, status: int | None = None
    ) -> ReplyReader:
        """Keep the tokens."""
        return ToyReader(request, served_name)

    def stream_reader(self, request: ModelRequest, served_name: str | None) -> ReplyReader:
        """Keep the tokens of all events."""
        return ToyStreamReader(request, served_name)


TOY: Final = ToyFormat()
