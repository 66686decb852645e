"""Which upstream answers for a model (pure)."""

import re
from collections.abc import Iterable, Mapping
from typing import Final

# A version's name is its policy's with @N; some vendors' models are named with a date so.
_VERSION: Final = re.compile(r"(.+)@\d+\Z", re.DOTALL)

# So much of a name that a client made up is said back to it.
_MOST_SHOWN: Final = 200


def shown(model: str) -> str:
    """Return a model's name as it is told in a message: one that is too long is cut."""
    return model if len(model) <= _MOST_SHOWN else f"{model[:_MOST_SHOWN]}…"


class ModelTable:
    """From a model's name to the number of the upstream that claims it.

    First the name itself, then the name of the policy that it is a version of, then the
    longest beginning that is claimed, then the default.
    """

    def __init__(self, claims: Iterable[Iterable[str]], default: int | None) -> None:
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
        """The upstream's number; None if nobody answers for it."""
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
