"""Show what was sampled, token by token, from the recorded ids.

The console has no tokenizer. A token has its text where the reply itself holds it, because the
client asked for log-probabilities; elsewhere it is shown by its id.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from proxy.formats.conversation import objects
from store.read.detail import CallTokens
from store.records import Record
from store.values.documents import nests_too_deep

TOKENS_A_PAGE: Final = 1000


class Token(Record, frozen=True, kw_only=True):
    """Hold a sampled token; `level` is how likely it was, 0 (≥ 90 %) to 4 (< 5 %)."""

    place: int
    id: int
    text: str | None
    logprob: float | None
    level: int | None

    @property
    def percent(self) -> float | None:
        """Return how likely it was, in percent."""
        return None if self.logprob is None else 100 * math.exp(min(self.logprob, 0.0))


LEVELS: Final = (0.9, 0.5, 0.2, 0.05)


def tokens_of(call: CallTokens, start: int) -> list[Token]:
    """Return the sampled tokens from `start` on, with their texts where the reply has them."""
    texts = texts_in(call.reply, len(call.sampled_ids))
    logprobs: Sequence[float | None] = call.sampled_logprobs or [None] * len(call.sampled_ids)
    return [
        Token(
            place=place,
            id=call.sampled_ids[place],
            text=texts[place] if texts else None,
            logprob=logprobs[place],
            level=_level(logprobs[place]),
        )
        for place in range(start, min(start + TOKENS_A_PAGE, len(call.sampled_ids)))
    ]


def _level(logprob: float | None) -> int | None:
    return None if logprob is None else sum(math.exp(min(logprob, 0.0)) < one for one in LEVELS)


def texts_in(reply: bytes | None, count: int) -> list[str] | None:
    """Return the texts of `count` sampled tokens as a reply's log-probabilities name them.

    None: it has none, or not those of all tokens.
    """
    if reply is None or nests_too_deep(reply):
        return None
    try:
        texts = list(_texts(msgspec.json.decode(reply, type=dict[str, Any])))
    except msgspec.MsgspecError:
        return None
    return texts if len(texts) == count and count else None


def _texts(reply: dict[str, Any]) -> Iterator[str]:
    for choice in list(objects(reply.get("choices")))[:1]:
        logprobs = choice.get("logprobs")
        if isinstance(logprobs, dict):
            yield from map(_text, objects(logprobs.get("content")))
            tokens = logprobs.get("tokens")
            yield from map(str, tokens if isinstance(tokens, list) else ())
    for item in objects(reply.get("output")):
        for part in objects(item.get("content")):
            yield from map(_text, objects(part.get("logprobs")))


def _text(token: dict[str, Any]) -> str:
    return str(token.get("token", ""))
