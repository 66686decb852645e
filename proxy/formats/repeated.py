"""Find names that an object of a body has more than once (pure).

Of a name that comes twice the last counts for Python's readers, and for others the first: the proxy
would look at one value, and the upstream take the other. Escapes do not tell two names apart, so
names are compared as they are read, at any depth.

Most bodies have none, which is seen by counting: of the members that the bytes have, reading keeps
as many.
"""

import json
from typing import Any, Final

from proxy.formats.base import ModelRequest
from store.values.json_limits import members_in

_NESTED: Final = frozenset({dict, list})


class RepeatedName(ValueError):
    """Name what an object has twice."""


def repeated_name(request: ModelRequest) -> str | None:
    """Return a name that an object of a request's body has twice, or None if there is none.

    Raises:
        ValueError: a value of the body cannot be read.
    """
    if request.parsed is None or members_in(request.body) == _members_of(request.fields):
        return None
    # Values that were left unread have members too, so the names themselves are compared now.
    try:
        json.loads(request.body, object_pairs_hook=once_each)
    except RepeatedName as repeated:
        return str(repeated)
    return None


def once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object that has these members, for a reader of JSON.

    Raises:
        RepeatedName: it has two of one name.
    """
    members: dict[str, Any] = {}
    for name, value in pairs:
        if name in members:
            raise RepeatedName(name)
        members[name] = value
    return members


def _members_of(tree: object) -> int:
    """Return how many members the objects of a parsed value have."""
    count = 0
    waiting: list[Any] = [tree]
    while waiting:
        value = waiting.pop()
        if type(value) is dict:
            count += len(value)
            value = value.values()
        waiting += [one for one in value if type(one) in _NESTED]
    return count
