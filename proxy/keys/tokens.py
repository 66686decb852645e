"""Count the tokens that a call took, from its bytes as they came (pure).

Whatever the API, a server tells the numbers in objects called `usage`: at the end of a reply, and
in some streams at its beginning or again and again; the largest of each number counts. Where there
is none, the ids that the proxy asked for are counted. A reply that tells neither is estimated: what
is not told must not be free.

No text that a model writes can be taken for either: in a string of JSON quotes are escaped.
"""

import math
import re
import zlib
from collections.abc import Iterable
from typing import Final

import msgspec

# With one level of details in it; possessive, so that none is read twice.
_USAGE: Final = re.compile(rb'"usage"\s*:\s*(\{[^{}]*+(?:\{[^{}]*+\}[^{}]*+)*+\})')
_IDS: Final = re.compile(rb'"((?:prompt_)?token_ids)"\s*:\s*\[([^\]]*)\]')
_EVENT: Final = re.compile(rb"^data:", re.MULTILINE)
TOTAL: Final = "total_tokens"
# The names of the numbers, by API, of which the largest of each row counts.
PARTS: Final = (
    ("prompt_tokens", "input_tokens"),
    ("completion_tokens", "output_tokens"),
    ("cache_creation_input_tokens",),
    ("cache_read_input_tokens",),
)
# All that is read of a usage: some servers tell costs and times in it, too.
NUMBERS: Final = frozenset({TOTAL}.union(*PARTS))
BYTES_A_TOKEN: Final = 4
# A longer reply is not inflated for its usage: its length says enough.
MOST_INFLATED: Final = 32 * 2**20

_usages = msgspec.json.Decoder(dict[str, msgspec.Raw])
_number = msgspec.json.Decoder(int)


def tokens_of(
    request: bytes, reply: bytes, *, deflated: bool = False, refused: bool = False
) -> int:
    """Return how many tokens a call took: those of its prompt and of all it got.

    Args:
        request: the client's body.
        reply: the upstream's, whole or as events; empty if there was none: that cost nothing.
        deflated: whether `reply` is deflated (`proxy.calls.capture.Tape`).
        refused: whether it is an error, which cost no more than it says.
    """
    if not reply:
        return 0
    if deflated:
        inflater = zlib.decompressobj()
        reply = inflater.decompress(reply, MOST_INFLATED)
        if not inflater.eof:
            return math.ceil((len(request) + MOST_INFLATED) / BYTES_A_TOKEN)
    counted = _told(_USAGE.findall(reply)) or _ids(reply)
    return counted or (0 if refused else _estimated(request, reply))


def _told(usages: Iterable[bytes]) -> int:
    """Return what the usages of a reply say, or 0 if they say nothing."""
    most: dict[str, int] = {}
    for usage in usages:
        try:
            read = {
                name: _number.decode(raw)
                for name, raw in _usages.decode(usage).items()
                if name in NUMBERS and bytes(raw)[:1].isdigit()
            }
        except msgspec.MsgspecError:
            continue
        most = {name: max(most.get(name, 0), read.get(name, 0)) for name in most | read}
    parts = sum(max(most.get(name, 0) for name in names) for names in PARTS)
    return max(most.get(TOTAL, 0), parts)


def _ids(reply: bytes) -> int:
    """Return how many token ids are in a reply, those of the prompt once; or 0."""
    prompt = sampled = 0
    for name, ids in _IDS.findall(reply):
        number = ids.count(b",") + 1 if ids.strip() else 0
        if name == b"token_ids":
            sampled += number
        else:
            prompt = max(prompt, number)
    return prompt + sampled


def _estimated(request: bytes, reply: bytes) -> int:
    """Return a number of tokens by length: an event of a stream counts as one."""
    events = len(_EVENT.findall(reply))
    return math.ceil(len(request) / BYTES_A_TOKEN) + (
        events or math.ceil(len(reply) / BYTES_A_TOKEN)
    )
