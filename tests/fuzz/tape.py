"""Choices read from bytes: hypothesis draws the bytes, a grammar makes text of them.

One draw instead of hundreds makes 50,000 examples affordable. Fewer and smaller bytes make a
simpler text (a byte that is 0, or not there, chooses the first option, which is the plainest), so
that hypothesis still finds the smallest failure.
"""

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from hypothesis import strategies as st

Option = TypeVar("Option")
SIZES: Final = (8, 32, 128, 384)


class Tape:
    """Choices, one after another; the first option of each once the bytes are used up."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        # Nothing strange is made now: what is read whole is read further than what is refused.
        self.calm = False

    def below(self, limit: int) -> int:
        """Choose a number from 0 to one less than `limit`."""
        found = 0
        for _ in range(2 if limit > 256 else 1):
            byte = self._data[self._at] if self._at < len(self._data) else 0
            self._at += 1
            found = found * 256 + byte
        return found % limit

    def pick(self, options: Sequence[Option]) -> Option:
        """Choose one of them."""
        return options[self.below(len(options))]

    def rarely(self) -> bool:
        """Say yes once in eight times, and never while it is calm."""
        return self.below(8) == 7 and not self.calm

    def bytes(self, most: int) -> bytes:
        """Take some bytes as they are."""
        return bytes(self.below(256) for _ in range(self.below(most + 1)))


Grammar = Callable[[Tape], bytes]


@st.composite
def made_of(draw: st.DrawFn, make: Callable[[Tape], Option]) -> Option:
    """Whatever can be made of choices."""
    size = draw(st.sampled_from(SIZES))
    return make(Tape(draw(st.binary(min_size=size, max_size=size))))


def made(grammar: Grammar) -> st.SearchStrategy[bytes]:
    """Texts of a grammar."""
    return made_of(grammar)
