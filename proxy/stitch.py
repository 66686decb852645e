"""Which episode a call without a name belongs to, from what it repeats (pure, bounded memory).

A tool-call id that a reply handed out and a later request brings back joins that request to
the reply's episode. An id that two episodes were given joins nothing: a doubtful join is
never guessed (DESIGN §4). A request that an SDK sends again after it failed joins the
attempt that failed.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from hashlib import sha256
from typing import Any, Final

CAPACITY: Final = 50_000
# Shorter ids ("call_1") are counters: servers hand the same ones to everybody.
SHORTEST_ID: Final = 12


def repeated_tool_ids(fields: dict[str, Any]) -> Iterator[str]:
    """The ids of tool calls whose results a request brings back, newest first.

    Reads all three forms: chat's `tool` messages, `function_call_output` items of a
    response's input, `tool_result` blocks of Anthropic's messages.
    """
    for field in ("messages", "input"):
        members = fields.get(field)
        for member in reversed(members if isinstance(members, list) else []):
            if isinstance(member, dict):
                yield from _ids_of(member)


def _ids_of(member: dict[str, Any]) -> Iterator[str]:
    content = member.get("content")
    blocks = [
        block for block in (content if isinstance(content, list) else []) if isinstance(block, dict)
    ]
    candidates = [
        member.get("tool_call_id"),
        member.get("call_id") if member.get("type") == "function_call_output" else None,
        *[block.get("tool_use_id") for block in reversed(blocks)],
    ]
    for value in candidates:
        if isinstance(value, str) and len(value) >= SHORTEST_ID:
            yield value


class Stitches:
    """What replies handed out, and which attempts failed."""

    def __init__(self) -> None:
        # None: two episodes were given this id.
        self._tool_ids: OrderedDict[str, str | None] = OrderedDict()
        self._failed: OrderedDict[bytes, list[str]] = OrderedDict()

    def handed_out(self, tool_ids: Iterable[str], episode: str) -> None:
        """A reply of `episode` asked for these tool calls."""
        for tool_id in tool_ids:
            known = self._tool_ids.get(tool_id, episode)
            self._tool_ids[tool_id] = episode if known == episode else None
            if len(self._tool_ids) > CAPACITY:
                self._tool_ids.popitem(last=False)

    def joined(self, fields: dict[str, Any]) -> str | None:
        """The episode whose tool calls a request answers; None if none, or if in doubt."""
        found = {
            self._tool_ids[tool_id]
            for tool_id in repeated_tool_ids(fields)
            if tool_id in self._tool_ids
        }
        return found.pop() if len(found) == 1 else None

    def offer(self, dialect, asked, gist, identity, call_id):
        self.handed_out((c.id for c in gist.tool_calls), identity.episode)
        return ()

    def failed(self, body: bytes, episode: str, call_id=None) -> None:
        """An attempt with this body came to no reply; its client may send it again."""
        self._failed.setdefault(_digest(body), []).append(episode)
        if len(self._failed) > CAPACITY:
            self._failed.popitem(last=False)

    def retried(self, body: bytes) -> str | None:
        """The episode of a failed attempt that this body repeats; each is joined once."""
        episodes = self._failed.get(_digest(body))
        if not episodes:
            return None
        episode = episodes.pop()
        if not episodes:
            del self._failed[_digest(body)]
        return episode


def _digest(body: bytes) -> bytes:
    return sha256(body).digest()
