"""A bounded memory: what was touched lately stays, in constant time and space (pure).

Two dictionaries in place of a list in order of use: when the young one is full it becomes
the old one, and what was not touched since is forgotten with the next change.
"""

from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class Generations(Generic[Key, Value]):
    """Keeps at least the `size` entries touched last, and at most twice as many."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._young: dict[Key, Value] = {}
        self._old: dict[Key, Value] = {}

    def get(self, key: Key) -> Value | None:
        """The value of `key`, which is young again; None if it is not remembered."""
        value = self._young.get(key)
        if value is None:
            value = self._old.pop(key, None)
            if value is not None:
                self.put(key, value)
        return value

    def put(self, key: Key, value: Value) -> None:
        """Remember `value`, in place of what `key` had."""
        if len(self._young) >= self._size and key not in self._young:
            self._old, self._young = self._young, {}
        self._young[key] = value

    def forget(self, key: Key) -> None:
        """Drop `key`."""
        self._young.pop(key, None)
        self._old.pop(key, None)

    def __len__(self) -> int:
        return len(self._young.keys() | self._old.keys())
