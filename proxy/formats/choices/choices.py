"""The dialects that answer in `choices`: `/v1/chat/completions` and `/v1/completions`.

`return_token_ids`, `logprobs` and the version's name as `model` are added to a request. In the
reply the resulting values are set to `null` again, as vLLM sends them to clients that did not ask,
the model's name is put back, and the extra chunks that carry nothing but ids are dropped.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from proxy.formats.base import (
    ModelRequest,
    Object,
    StreamTranscript,
    Transcript,
    with_changes,
)
from proxy.formats.choices.replies import StreamedReply, WholeReply
from proxy.formats.choices.reply_filter import IDS, LOGPROBS


class ChoicesDialect(msgspec.Struct, frozen=True):
    """Chat completions or text completions.

    `wanted` are the fields that make vLLM send ids and log-probabilities. `asked` returns whether a
    client's own value of such a field is kept. `spoilt` returns whether a request must get none of
    them: vLLM would then answer it differently, or accept what it refuses without them.
    """

    name: str
    reply_object: str
    wanted: Mapping[str, msgspec.Raw]
    asked: Callable[[str, Any], bool]
    spoilt: Callable[[Mapping[str, Any]], bool]

    def rewrite(
        self, request: ModelRequest, served_name: str | None, *, want_ids: bool
    ) -> ModelRequest:
        """Return the request with the version's name and those `wanted` fields that it lacks."""
        fields = request.fields
        want_ids = want_ids and not self.spoilt(fields)
        added: Object = {
            field: value
            for field, value in self.wanted.items()
            if want_ids and not self.asked(field, fields.get(field))
        }
        return with_changes(request, served_name, added)

    def whole(
        self,
        request: ModelRequest,
        served_name: str | None,
        *,
        reading: bool = False,
        status: int | None = None,
    ) -> Transcript:
        """Return a transcript of a whole completion."""
        return WholeReply(request, served_name, reading=reading)

    def streamed(
        self, request: ModelRequest, served_name: str | None, *, reading: bool = False
    ) -> StreamTranscript:
        """Return a transcript of a completion's chunks."""
        return StreamedReply(request, served_name, self.reply_object, reading=reading)


CHAT: Final = ChoicesDialect(
    name="chat",
    reply_object="chat.completion",
    wanted={LOGPROBS: msgspec.Raw(b"true"), IDS: msgspec.Raw(b"true")},
    asked=lambda _field, value: value is not None and value is not False,
    # vLLM refuses these two without the client's own `logprobs`.
    spoilt=lambda fields: (
        not fields.get(LOGPROBS)
        and bool(fields.get("top_logprobs") or fields.get("logprob_token_ids"))
    ),
)
COMPLETIONS: Final = ChoicesDialect(
    name="completions",
    reply_object="text_completion",
    # Here `logprobs` is a number: how many alternatives beside the sampled token.
    wanted={LOGPROBS: msgspec.Raw(b"0"), IDS: msgspec.Raw(b"true")},
    asked=lambda field, value: value is not None and (field == LOGPROBS or value is not False),
    # With ids asked for, the prompt's text is left out of the echo.
    spoilt=lambda fields: bool(fields.get("echo")),
)
