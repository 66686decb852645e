"""Map keys to values within bounds: what was used last is kept, in constant time (pure).

It has two dictionaries instead of a list in order of use. When the young one is full it becomes the
old one, and the entries of the former old one are forgotten.
"""

from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class Generations(Generic[Key, Value]):
    """Keep at least the `size` entries used last, and at most twice as many."""

    def __init__(self, size: int) -> None:
        """Begin empty, with room for at least `size` entries."""
        self._size = size
        self._young: dict[Key, Value] = {}
        self._old: dict[Key, Value] = {}

    def get(self, key: Key) -> Value | None:
        """Return the value of `key` and mark it as used, or None if it is not remembered."""
        value = self._young.get(key)
        if value is None:
            value = self._old.pop(key, None)
            if value is not None:
                self.put(key, value)
        return value

    def put(self, key: Key, value: Value) -> None:
        """Remember `value` for `key`, in place of any earlier value."""
        if len(self._young) >= self._size and key not in self._young:
            self._old, self._young = self._young, {}
        self._young[key] = value

    def forget(self, key: Key) -> None:
        """Remove `key` if it is there."""
        self._young.pop(key, None)
        self._old.pop(key, None)

    def __len__(self) -> int:
        """Return how many keys are remembered."""
        return len(self._young.keys() | self._old.keys())
