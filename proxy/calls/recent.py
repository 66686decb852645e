"""Remember recent calls and idempotency keys within bounds, to look up without the database."""

from collections import OrderedDict
from typing import Final, TypeVar

from proxy.spool.segments import CapturedCall
from store.tenants import same_tenant

# Targets of about 7,000 calls; the database knows the older ones.
CAPACITY: Final = 20_000
Key = TypeVar("Key")
Value = TypeVar("Value")


class Recent:
    """Remember the last `CAPACITY` targets with their policy version, and idempotency keys."""

    def __init__(self) -> None:
        """Begin empty."""
        self._targets: OrderedDict[tuple[str, str], tuple[str, str]] = OrderedDict()
        self._keys: OrderedDict[str, str] = OrderedDict()

    def remember_call(self, record: CapturedCall, call: str, response_id: str | None) -> None:
        """Remember a call, its reply's id and its episode as possible targets of feedback.

        They are targets for the tenant of the call, under their names as they are kept.
        """
        earner = (record.policy or "", str(record.policy_version or 0))
        call = same_tenant(record.episode, call)
        _put(self._targets, ("call", call), earner)
        if record.episode != call:
            _put(self._targets, ("episode", record.episode), earner)
        if response_id:
            _put(self._targets, ("response", same_tenant(record.episode, response_id)), earner)

    def earner(self, kind: str, target: str) -> tuple[str, str] | None:
        """Return policy and version of a target's call, or None if it is not remembered."""
        earner = self._targets.get((kind, target))
        if earner is None and kind == "episode":
            # An episode that consists of one call only has that call's id.
            return self._targets.get(("call", target))
        return earner

    def remember_key(self, key: str, body_hash: str) -> None:
        """Remember that an idempotency key was used for a body with this hash."""
        _put(self._keys, key, body_hash)

    def body_hash_of(self, key: str) -> str | None:
        """Return the hash of the body that a key was last used for, or None."""
        return self._keys.get(key)


def _put(memory: OrderedDict[Key, Value], key: Key, value: Value) -> None:
    memory[key] = value
    if len(memory) > CAPACITY:
        memory.popitem(last=False)
