"""Name texts that agents execute: digests of replies, and of tool calls' arguments (pure).

Some agents have a model write a text (a query, a program), execute it in code of their own, and
tell the next model about it as a tool call with its result, which no reply asked for. The store
finds by these digests whose text it was (`store.read.quoting`).
"""

import re
from collections.abc import Iterable
from hashlib import blake2b
from itertools import islice
from typing import Final
from uuid import UUID

# A text that is one fenced block and nothing else: agents execute what is in it.
_FENCED: Final = re.compile(r"```[^\n`]*\n((?:(?!```).)*)```", re.DOTALL)
MOST_QUOTES: Final = 4


def text_digest(text: str) -> UUID | None:
    """Return a digest of a whole text, without the blanks and the fence around it; None: empty."""
    bare = text.strip()
    if fenced := _FENCED.fullmatch(bare):
        bare = fenced.group(1).strip()
    if not bare.strip("`"):
        return None
    return UUID(bytes=blake2b(bare.encode(errors="surrogatepass"), digest_size=16).digest())


def quoted_digests(texts: Iterable[str]) -> tuple[UUID, ...]:
    """Return the digests of a tool call's texts, each once; of the first `MOST_QUOTES`."""
    digests = filter(None, map(text_digest, texts))
    # No more is digested than is kept: a tool call may have a million arguments.
    return tuple(dict.fromkeys(islice(digests, MOST_QUOTES)))
