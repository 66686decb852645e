"""Follow replies of the toy API; `tokens` are `[prompt ids, sampled ids, log-probabilities]`."""

from typing import Any

import msgspec

from proxy.formats.base import ModelRequest, ReplyFacts, ReplySummary, Sampled, own_name
from proxy.formats.raw_json import Object, parse_object, value_of
from proxy.formats.sse import EventStream, Unread, is_done


class Restoring:
    """Put the client's name back, and take the tokens out."""

    def __init__(self, request: ModelRequest, served_name: str | None) -> None:
        self._model = own_name(request, served_name)
        self._hides = "tokens" in request.injected
        self._id: str | None = None
        self._words: list[str] = []

    def restore(self, payload: bytes) -> bytes:
        """Return what the client may see."""
        parsed = parse_object(payload)
        if parsed is None:
            raise Unread
        self._take(parsed)
        if self._model is not None and "model" in parsed:
            parsed["model"] = self._model
        if self._hides:
            parsed.pop("tokens", None)
        return msgspec.json.encode(parsed)

    def _take(self, parsed: Object) -> None:
        self._id = value_of(parsed.get("id")) or self._id
        self._words.append(value_of(parsed.get("words")) or "")

    def summary(self) -> ReplySummary:
        """Return what a later call may repeat."""
        return ReplySummary(response_id=self._id, text="".join(self._words))


class ToyReply(Restoring):
    """Follow a reply in one piece."""

    ended = False
    _body = b""

    def feed(self, chunk: bytes) -> bytes:
        """Pass on nothing before the end."""
        self._body += chunk
        return b""

    def finish(self) -> bytes:
        """Return the whole reply, restored."""
        self.ended = True
        try:
            return self.restore(self._body)
        except Unread:
            return self._body


class ToyStream(Restoring):
    """Follow a reply in events, of which `[DONE]` is the last."""

    def __init__(self, request: ModelRequest, served_name: str | None) -> None:
        super().__init__(request, served_name)
        self._events = EventStream(self._data, lambda payload: payload, is_done)

    def _data(self, payload: bytes) -> bytes:
        return payload if payload == b"[DONE]" else self.restore(payload)

    def feed(self, chunk: bytes) -> bytes:
        """Pass each event on, restored."""
        return self._events.feed(chunk)

    @property
    def at_end(self) -> bool:
        """Return whether the last event has come."""
        return self._events.at_end

    @property
    def ended(self) -> bool:
        """Return whether the reply is complete."""
        return self._events.ended

    def release(self) -> bytes:
        """Return the end that was held back."""
        return self._events.release()

    def finish(self) -> bytes:
        """Return what is left."""
        return self._events.finish()


class _Tokens(Restoring):
    """Keep what `Restoring` takes out."""

    def __init__(self, request: ModelRequest, served_name: str | None) -> None:
        super().__init__(request, served_name)
        self._tokens: list[Any] = [None, None, None]

    def _take(self, parsed: Object) -> None:
        super()._take(parsed)
        prompt, ids, logprobs = value_of(parsed.get("tokens")) or (None, None, None)
        if ids is not None:
            known = self._tokens
            self._tokens = [prompt, (known[1] or []) + ids, (known[2] or []) + logprobs]

    def _facts_of(self, *, whole: bool) -> ReplyFacts:
        prompt, ids, logprobs = (None if part is None else tuple(part) for part in self._tokens)
        reply = msgspec.json.encode({"id": self._id, "words": "".join(self._words)})
        sampled = Sampled(prompt, ids, logprobs, choices=1, completion_tokens=None)
        return ReplyFacts(reply, self._id, None, None, (), sampled, whole)


class ToyReader(_Tokens, ToyReply):
    """Read a recorded reply in one piece."""

    def read(self, raw: bytes) -> None:
        """Take the recorded bytes."""
        self.feed(raw)

    def facts(self) -> ReplyFacts:
        """Return the facts that are stored of it."""
        return self._facts_of(whole=self.ended)


class ToyStreamReader(_Tokens, ToyStream):
    """Read recorded events."""

    def read(self, raw: bytes) -> None:
        """Take the recorded bytes."""
        self.feed(raw)

    def facts(self) -> ReplyFacts:
        """Return the facts that are stored of them."""
        return self._facts_of(whole=self.ended)
