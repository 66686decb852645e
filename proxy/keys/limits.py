"""Limits of a key within one worker, and how many tokens a call took (pure: callers own the clock).

Tokens are counted from the bytes of a reply. Whatever the API, a server reports them in objects
called `usage`: at the end of a reply, and in some streams at its beginning or several times; the
largest value of each number counts. Without usage, the ids that the proxy requested are counted. A
reply with neither is estimated, so that an not_stored call is not free. Text that a model writes
cannot be mistaken for either: inside a JSON string quotes are escaped.
"""

import math
import re
import zlib
from collections import deque
from collections.abc import Iterable
from typing import Final

import msgspec

from store.keys import Grant

WINDOW_S: Final = 60.0
# When to retry if too many requests run: any of them may end at once.
BUSY_S: Final = 1

# With one level of nested details; possessive, so that no byte is read twice.
_USAGE: Final = re.compile(rb'"usage"\s*:\s*(\{[^{}]*+(?:\{[^{}]*+\}[^{}]*+)*+\})')
_IDS: Final = re.compile(rb'"((?:prompt_)?token_ids)"\s*:\s*\[([^\]]*)\]')
_EVENT: Final = re.compile(rb"^data:", re.MULTILINE)
TOTAL: Final = "total_tokens"
# The names of each number in the APIs.
PARTS: Final = (
    ("prompt_tokens", "input_tokens"),
    ("completion_tokens", "output_tokens"),
    ("cache_creation_input_tokens",),
    ("cache_read_input_tokens",),
)
# All other members of a usage are ignored: some servers add costs and times.
NUMBERS: Final = frozenset({TOTAL}.union(*PARTS))
BYTES_A_TOKEN: Final = 4
# A longer reply is not inflated to find its usage: its length is estimate enough.
MOST_INFLATED: Final = 32 * 2**20

_usages = msgspec.json.Decoder(dict[str, msgspec.Raw])
_number = msgspec.json.Decoder(int)


def share_of(limit: int | None, workers: int) -> int | None:
    """Return one worker's share of a limit, rounded up, so that no key is locked out."""
    return None if limit is None else math.ceil(limit / workers)


class Usage:
    """A key's use of one worker: running requests, and requests and tokens of the last minute."""

    __slots__ = ("_at_once", "_begun", "_per_minute", "_running", "_spent", "_taken", "_tokens")

    def __init__(self) -> None:
        """Begin without a request, and without limits."""
        self._per_minute: int | None = None
        self._at_once: int | None = None
        self._tokens: int | None = None
        self._begun: deque[float] = deque()
        self._running = 0
        # End and tokens of each call of the last minute, and the sum of the tokens.
        self._taken: deque[tuple[float, int]] = deque()
        self._spent = 0

    @property
    def counts_tokens(self) -> bool:
        """Return whether the key has a limit of tokens: only then are they worth counting."""
        return self._tokens is not None

    def hold_to(self, grant: Grant, workers: int) -> None:
        """Take the limits of a key, of which `workers` workers have a share each."""
        self._per_minute = share_of(grant.per_minute, workers)
        self._at_once = share_of(grant.at_once, workers)
        self._tokens = share_of(grant.tokens_per_minute, workers)
        if self._per_minute is None:
            self._begun.clear()
        if self._tokens is None:
            self._taken.clear()
            self._spent = 0

    def begin(self, now: float, *, takes_tokens: bool = True) -> int | None:
        """Count a request that begins, or return after how many seconds to retry.

        `now` is in seconds on a monotonic clock. A refused request does not count. A request that
        takes no tokens is held to the other limits only.
        """
        if self._at_once is not None and self._running >= self._at_once:
            return BUSY_S
        wait_s = self._until_tokens(now) if takes_tokens else None
        if wait_s is not None:
            return wait_s
        if self._per_minute is not None:
            begun = self._begun
            while begun and begun[0] <= now - WINDOW_S:
                begun.popleft()
            if len(begun) >= self._per_minute:
                # Once the request before the last `per_minute` - 1 is a minute old.
                return _until_old(begun[-self._per_minute], now)
            begun.append(now)
        self._running += 1
        return None

    def spend(self, now: float, tokens: int) -> None:
        """Count the tokens of a call that has ended."""
        if self._tokens is not None and tokens:
            self._taken.append((now, tokens))
            self._spent += tokens

    def end(self) -> None:
        """Count a request that has ended, however it did."""
        self._running -= 1

    def _until_tokens(self, now: float) -> int | None:
        """Return after how many seconds fewer tokens count than the limit; None: they do now."""
        if self._tokens is None:
            return None
        taken = self._taken
        while taken and taken[0][0] <= now - WINDOW_S:
            self._spent -= taken.popleft()[1]
        remaining = self._spent
        wait_s = None
        for ended, tokens in taken:
            if remaining < self._tokens:
                break
            remaining -= tokens
            wait_s = _until_old(ended, now)
        return wait_s


def _until_old(at: float, now: float) -> int:
    """Return after how many whole seconds `at` is a minute old."""
    # Sums of seconds are rounded, so compare as `begin` will compare then.
    wait_s = math.ceil(at + WINDOW_S - now)
    return wait_s if at <= now + wait_s - WINDOW_S else wait_s + 1


def tokens_of(
    request: bytes, reply: bytes, *, deflated: bool = False, refused: bool = False
) -> int:
    """Return how many tokens a call took: those of its prompt and of all its choices.

    Args:
        request: the client's body.
        reply: the upstream's, as JSON or events; empty if there was none, which costs nothing.
        deflated: whether `reply` is deflated (`proxy.spool.segments.ReplyBuffer`).
        refused: whether the reply is an error, which costs only what its usage says.
    """
    if not reply:
        return 0
    if deflated:
        inflater = zlib.decompressobj()
        reply = inflater.decompress(reply, MOST_INFLATED)
        if not inflater.eof:
            return math.ceil((len(request) + MOST_INFLATED) / BYTES_A_TOKEN)
    counted = _reported(_USAGE.findall(reply)) or _count_ids(reply)
    return counted or (0 if refused else _estimate(request, reply))


def _reported(usages: Iterable[bytes]) -> int:
    largest: dict[str, int] = {}
    for usage in usages:
        try:
            numbers = {
                name: _number.decode(raw)
                for name, raw in _usages.decode(usage).items()
                if name in NUMBERS and bytes(raw)[:1].isdigit()
            }
        except msgspec.MsgspecError:
            continue
        largest = {
            name: max(largest.get(name, 0), numbers.get(name, 0)) for name in largest | numbers
        }
    parts = sum(max(largest.get(name, 0) for name in names) for names in PARTS)
    return max(largest.get(TOTAL, 0), parts)


def _count_ids(reply: bytes) -> int:
    """Return how many token ids are in a reply, those of the prompt once; or 0."""
    prompt = sampled = 0
    for name, ids in _IDS.findall(reply):
        number = ids.count(b",") + 1 if ids.strip() else 0
        if name == b"token_ids":
            sampled += number
        else:
            prompt = max(prompt, number)
    return prompt + sampled


def _estimate(request: bytes, reply: bytes) -> int:
    """Return a number of tokens by length: an event of a stream counts as one."""
    events = len(_EVENT.findall(reply))
    return math.ceil(len(request) / BYTES_A_TOKEN) + (
        events or math.ceil(len(reply) / BYTES_A_TOKEN)
    )
