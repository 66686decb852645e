"""Chooses the version of a policy that serves an episode (pure).

The model name that an agent asks for names a policy. An episode's first call takes the version that
is serving then, and its later calls keep it for as long as that version can be served at all: an
episode is sampled by one version.
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
    """The policy and version that a call gets, and the model name to ask the upstream for."""

    policy: str | None
    version: int | None
    served_name: str | None


class Versions:
    """The serving versions of every policy, and the versions that episodes keep.

    This class has no clock and does no I/O: the process that reads the store calls `replace`.
    """

    def __init__(self, versions: Iterable[PolicyVersion] = ()) -> None:
        """Begin with the store's `versions` and no episode pinned."""
        self._pins: OrderedDict[tuple[str, str], int] = OrderedDict()
        self.replace(versions)

    def replace(self, versions: Iterable[PolicyVersion]) -> None:
        """Replace all versions by those that the store has now; pins are kept."""
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
        """Return the version that new episodes of each policy get."""
        return dict(self._serving)

    def knows(self, model: str | None, episode: str) -> bool:
        """Return whether `resolve` can answer for an episode without a look-up in the store.

        An episode that began at another proxy may have another version than the one serving now.
        """
        return (
            model not in self._serving
            or len(self._names.get(model, ())) < SEVERAL
            or (model, episode) in self._pins
        )

    def pin(self, policy: str, episode: str, version: int) -> None:
        """Remember that `episode` began with `version`, unless a version is remembered already."""
        self._pins.setdefault((policy, episode), version)
        if len(self._pins) > MAX_PINS:
            self._pins.popitem(last=False)

    def resolve(self, model: str | None, episode: str) -> Serving:
        """Return what to ask the upstream for when a client asks for `model`.

        A name that is not a policy's goes through unchanged; the name of a version (`NAME@3`) is
        that version.
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
        # The version that it was pinned to, if any, can no longer be served.
        self._pins.pop(key, None)
        self.pin(policy, episode, self._serving[policy])
        return self._serving[policy]
