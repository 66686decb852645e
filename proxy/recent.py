"""What this proxy recorded lately: answers "is this target known?" without the database."""

from collections import OrderedDict
from typing import Final, TypeVar

from proxy.capture import Captured

# About 7,000 calls; the database knows the older ones.
CAPACITY: Final = 20_000
Key = TypeVar("Key")
Value = TypeVar("Value")


class Recent:
    """Bounded memories of targets, of who earned what, and of idempotency keys."""

    def __init__(self) -> None:
        self._targets: OrderedDict[tuple[str, str], tuple[str, str]] = OrderedDict()
        self._keys: OrderedDict[str, str] = OrderedDict()

    def remember_call(self, record: Captured, call: str, response_id: str | None) -> None:
        """A call was taken: it, its reply's id and its episode can be targets."""
        earner = (record.policy or "", str(record.policy_version or 0))
        _put(self._targets, ("call", call), earner)
        if record.episode != call:
            _put(self._targets, ("episode", record.episode), earner)
        if response_id:
            _put(self._targets, ("response", response_id), earner)

    def earner(self, kind: str, target: str) -> tuple[str, str] | None:
        """Policy and version of a target's call; None if it is not remembered."""
        found = self._targets.get((kind, target))
        if found is None and kind == "episode":
            # An episode of its own has its one call's id.
            return self._targets.get(("call", target))
        return found

    def remember_key(self, key: str, body_hash: str) -> None:
        """An idempotency key was used for a body with this hash."""
        _put(self._keys, key, body_hash)

    def body_hash_of(self, key: str) -> str | None:
        """The hash of the body that a key was last used with."""
        return self._keys.get(key)


def _put(memory: OrderedDict[Key, Value], key: Key, value: Value) -> None:
    memory[key] = value
    if len(memory) > CAPACITY:
        memory.popitem(last=False)
