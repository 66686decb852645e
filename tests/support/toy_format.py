"""A wire format for tests, as small as one can be, and like none of the others.

`{"model", "said": [{"by", "words"}], "heat"}` gets `{"id", "words"}`. `tokens` in a reply are
`[prompt ids, sampled ids, log-probabilities]`.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from proxy.formats.base import (
    ModelRequest,
    ReplyFacts,
    ReplyParser,
    ReplySummary,
    SampledTokens,
    UnreadableEvent,
    WireFormat,
    with_changes,
)
from proxy.formats.conversation import (
    Calls,
    Conversation,
    ShownToolCall,
    ToolResult,
    Turns,
    tool_result,
)
from proxy.formats.errors import ErrorShape
from proxy.formats.raw_json import Object, parse_object, value_of
from proxy.formats.sampling import HARMLESS_FIELDS, SamplingRules


class ToyReply(ReplyParser):
    """Takes the tokens out of a reply, or of each event of one; `[DONE]` is the last."""

    def begin(self) -> None:
        self._id: str | None = None
        self._words: list[str] = []
        self._tokens: list[Any] = [None, None, None]

    def client_reply(self, body: bytes) -> bytes:
        try:
            return self.client_event(body)
        except UnreadableEvent:
            return self.hide_added_members(body)

    def client_event(self, data: bytes) -> bytes:
        if data == b"[DONE]":
            return data
        parsed = parse_object(data)
        if parsed is None:
            raise UnreadableEvent
        self._id = value_of(parsed.get("id")) or self._id
        self._words.append(value_of(parsed.get("words")) or "")
        prompt, ids, logprobs = value_of(parsed.get("tokens")) or (None, None, None)
        if ids is not None:
            known = self._tokens
            self._tokens = [prompt, (known[1] or []) + ids, (known[2] or []) + logprobs]
        if self._model is not None and "model" in parsed:
            parsed["model"] = self._model
        if "tokens" in self._request.injected:
            parsed.pop("tokens", None)
        return msgspec.json.encode(parsed)

    def summary(self) -> ReplySummary:
        return ReplySummary(response_id=self._id, text="".join(self._words))

    def facts(self) -> ReplyFacts:
        prompt, ids, logprobs = (None if part is None else tuple(part) for part in self._tokens)
        reply = msgspec.json.encode({"id": self._id, "words": "".join(self._words)})
        sampled = SampledTokens(prompt, ids, logprobs, choices=1, completion_tokens=None)
        return ReplyFacts(reply, self._id, None, None, (), sampled)


class ToyTurns(Turns):
    """Reads `said`, a list of `{"by": "me" | "toy" | "tool", "words": …}`."""

    field = "said"
    states_errors = True

    def _add(self, conversation: Conversation, member: dict[str, Any]) -> None:
        match member.get("by"):
            case "toy":
                conversation.add_assistant(member.get("words"))
                if "tool" in member:
                    conversation.add_tool_call(member.get("call"), member["tool"], None)
            case "tool":
                conversation.add_tool_result(member.get("call"), member.get("words"))
            case _:
                conversation.add_user(member.get("words"))

    def _user_content(self, member: Object) -> msgspec.Raw | None:
        return member.get("words") if value_of(member.get("by")) == "me" else None

    def _is_text(self, member: Object) -> bool:
        return "picture" not in member

    def _is_by_assistant(self, member: dict[str, Any]) -> bool:
        return member.get("by") == "toy"

    def _tool_calls(self, member: dict[str, Any]) -> Iterable[ShownToolCall]:
        return (ShownToolCall(member.get("call"), member.get("tool"), None),)

    def _results_in(self, member: dict[str, Any], calls: Calls) -> Iterable[ToolResult]:
        failed = True if member.get("failed") is True else None
        return tool_result(member.get("call"), member.get("words"), calls, failed)


class ToySampling(SamplingRules):
    """Leaves the model free, unless `only` names the words that may be sampled."""

    settings = frozenset({"only"})
    harmless = HARMLESS_FIELDS | {"said", "colour"}

    def constrains(self, settings: Mapping[str, Any]) -> bool:
        return "only" in settings


class ToyErrors(ErrorShape):
    """States `{"oops": …}`."""

    api = "Toy"

    def _error(
        self, message: str, kind: str, param: str | None, code: str | None, status: int | None
    ) -> dict[str, Any]:
        return {"oops": message}


class ToyFormat(WireFormat):
    name = "toy"
    title = "Toy"
    path = "/v1/toys"
    forwarded = ("/v1/toys/count",)
    errors = ToyErrors()
    turns = ToyTurns()
    sampling = ToySampling()
    parser = ToyReply

    def rewrite(
        self, request: ModelRequest, served_name: str | None, *, want_ids: bool
    ) -> ModelRequest:
        added = {"tokens": msgspec.Raw(b"true")} if want_ids else {}
        return with_changes(request, served_name, added)


TOY: Final = ToyFormat()
