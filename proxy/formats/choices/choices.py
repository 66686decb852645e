"""Rewrite requests for chat and text completions, and name the readers of their replies (pure).

`return_token_ids`, `logprobs` and the version's name as `model` are added to a request. In the
reply the resulting values are set to `null` again, as vLLM sends them to clients that did not ask,
the model's name is put back, and the extra chunks that carry nothing but ids are dropped.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from proxy.formats.base import (
    ErrorShape,
    ModelRequest,
    Object,
    ReplyReader,
    SamplingRules,
    StreamTranscript,
    Transcript,
    Turns,
)
from proxy.formats.choices.readers import StreamReader, WholeReader
from proxy.formats.choices.replies import StreamedReply, WholeReply
from proxy.formats.errors import OPENAI
from proxy.formats.requests import with_changes


class ChoicesFormat(msgspec.Struct, frozen=True, kw_only=True):
    """Speak chat completions or text completions.

    `wanted` are the fields that make vLLM send ids and log-probabilities. A client's own value of
    such a field is kept, unless it is null or false; of `numbers` false is kept, too, which is 0. A
    request with any of the fields `spoiling`, and without the field `spared_by`, gets none of them:
    vLLM would then answer it differently, or accept what it refuses without them.
    """

    name: str
    title: str
    path: str
    reply_object: str
    turns: Turns
    sampling: SamplingRules
    unread: tuple[str, ...]
    wanted: Mapping[str, msgspec.Raw]
    spoiling: tuple[str, ...]
    spared_by: str | None = None
    numbers: tuple[str, ...] = ()
    errors: ErrorShape = OPENAI
    forwarded: tuple[str, ...] = ()

    def rewrite(
        self, request: ModelRequest, served_name: str | None, *, want_ids: bool
    ) -> ModelRequest:
        """Return the request with the version's name and those `wanted` fields that it lacks."""
        fields = request.fields
        want_ids = want_ids and not self._is_spoilt(fields)
        added: Object = {
            field: value
            for field, value in self.wanted.items()
            if want_ids and not self._is_asked(field, fields.get(field))
        }
        return with_changes(request, served_name, added)

    def _is_asked(self, field: str, value: Any) -> bool:
        return value is not None and (value is not False or field in self.numbers)

    def _is_spoilt(self, fields: Mapping[str, Any]) -> bool:
        spared = self.spared_by is not None and fields.get(self.spared_by)
        return not spared and any(map(fields.get, self.spoiling))

    def whole(
        self, request: ModelRequest, served_name: str | None, *, status: int | None = None
    ) -> Transcript:
        """Return a transcript of a whole completion."""
        return WholeReply(request, served_name)

    def streamed(self, request: ModelRequest, served_name: str | None) -> StreamTranscript:
        """Return a transcript of a completion's chunks."""
        return StreamedReply(request, served_name)

    def whole_reader(
        self, request: ModelRequest, served_name: str | None, *, status: int | None = None
    ) -> ReplyReader:
        """Return a reader of a whole completion."""
        return WholeReader(request, served_name)

    def stream_reader(self, request: ModelRequest, served_name: str | None) -> ReplyReader:
        """Return a reader of a completion's chunks."""
        return StreamReader(request, served_name, self.reply_object)
