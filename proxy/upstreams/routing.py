"""Find the upstream that answers for a model (pure)."""

import re
from collections.abc import Iterable, Mapping
from typing import Final

# A version's name is its policy's with @N. Some vendors' models have a date in this form.
_VERSION: Final = re.compile(r"(.+)@\d+\Z", re.DOTALL)

# Characters of a name from a request that a message repeats.
_MOST_SHOWN: Final = 200


def shown(model: str) -> str:
    """Return a model's name for a message, shortened if it is long."""
    return model if len(model) <= _MOST_SHOWN else f"{model[:_MOST_SHOWN]}…"


class ModelTable:
    """Map a model's name to the number of the upstream that claims it.

    The name itself is looked up first, then the name of the policy that it is a version of, then
    the longest prefix that is claimed, then the default.
    """

    def __init__(self, claims: Iterable[Iterable[str]], default: int | None) -> None:
        """Build the table from each upstream's patterns and the default upstream's number."""
        self._exact: dict[str, int] = {}
        prefixes: dict[str, int] = {}
        for number, patterns in enumerate(claims):
            for pattern in patterns:
                if pattern.endswith("*"):
                    prefixes[pattern[:-1]] = number
                else:
                    self._exact[pattern] = number
        self._prefixes: Mapping[str, int] = dict(
            sorted(prefixes.items(), key=lambda claim: len(claim[0]), reverse=True)
        )
        self.default = default
        self.known = (*self._exact, *(f"{prefix}*" for prefix in prefixes))

    def find(self, model: str | None) -> int | None:
        """Return the upstream's number, or None if no upstream answers for the model."""
        if model is None:
            return self.default
        number = self._exact.get(model)
        if number is None:
            version = _VERSION.match(model)
            number = self._exact.get(version[1]) if version is not None else None
        if number is not None:
            return number
        for prefix, claimed_by in self._prefixes.items():
            if model.startswith(prefix):
                return claimed_by
        return self.default
