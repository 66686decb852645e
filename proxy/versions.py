"""Which version of a policy serves an episode (pure).

The model name that an agent asks for names a policy. An episode's first call takes the
version that is serving then, and every later one keeps it (DESIGN §3.8), for as long as
that version can be served at all.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

import msgspec

from store.records import PolicyVersion

MAX_PINS: Final = 200_000
SEVERAL: Final = 2
SERVABLE: Final = ("serving", "published")


class Serving(msgspec.Struct, frozen=True):
    """What the upstream is asked for on behalf of one call."""

    policy: str | None
    version: int | None
    served_name: str | None


class Versions:
    """The serving versions of every policy, and the versions that episodes keep.

    Holds no clock and does no I/O: who watches the store hands in what it saw.
    """

    def __init__(self, versions: Iterable[PolicyVersion] = ()) -> None:
        self._pins: OrderedDict[tuple[str, str], int] = OrderedDict()
        self.replace(versions)

    def replace(self, versions: Iterable[PolicyVersion]) -> None:
        """Take over what the store says now."""
        self._names: dict[str, dict[int, str]] = {}
        self._serving: dict[str, int] = {}
        self._by_served_name: dict[str, tuple[str, int]] = {}
        for version in versions:
            if version.state in SERVABLE or version.version == 0:
                self._names.setdefault(version.name, {})[version.version] = version.served_name
                self._by_served_name[version.served_name] = (version.name, version.version)
            if version.state == "serving":
                self._serving[version.name] = version.version

    @property
    def serving(self) -> dict[str, int]:
        """The version that new episodes of each policy get."""
        return dict(self._serving)

    def knows(self, model: str | None, episode: str) -> bool:
        """Whether `resolve` needs to ask nobody else which version an episode has.

        An episode that began at another proxy may have another than the one serving now.
        """
        return (
            model not in self._serving
            or len(self._names.get(model, ())) < SEVERAL
            or (model, episode) in self._pins
        )

    def pin(self, policy: str, episode: str, version: int) -> None:
        """Remember that `episode` was begun on `version`; an older memory stands."""
        self._pins.setdefault((policy, episode), version)
        if len(self._pins) > MAX_PINS:
            self._pins.popitem(last=False)

    def resolve(self, model: str | None, episode: str) -> Serving:
        """What to ask the upstream for.

        A name that is no policy's goes through as it is; one that is a version's own
        (`NAME@3`) is that version.
        """
        if model is None:
            return Serving(None, None, None)
        if model in self._serving:
            version = self._version_for(model, episode)
            return Serving(model, version, self._names[model].get(version, model))
        if model in self._by_served_name:
            policy, version = self._by_served_name[model]
            return Serving(policy, version, model)
        return Serving(None, None, model)

    def _version_for(self, policy: str, episode: str) -> int:
        key = (policy, episode)
        pinned = self._pins.get(key)
        if pinned is not None and pinned in self._names[policy]:
            self._pins.move_to_end(key)
            return pinned
        # What it was pinned to, if anything, can no longer be served.
        self._pins.pop(key, None)
        self.pin(policy, episode, self._serving[policy])
        return self._serving[policy]
