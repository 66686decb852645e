"""Give each new episode of a policy to an arm: the base, what serves, or what is tried (pure).

The choice has no state and asks nobody: it is a hash of the policy's name, the version that is
tried and the episode's name, so every worker and proxy makes the same one, also after a restart.
Each canary is tried on other episodes than the one before it. Once it serves, the hash stays what
it was, so that an episode that a proxy has forgotten goes on with what it had.
"""

from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Final

import msgspec

from store.records import Arm
from store.versions import WITH_TRAFFIC, PolicyVersion

_BYTES: Final = 6
_ALL: Final = 2 ** (8 * _BYTES)
_APART: Final = "\x1f"


class Arms(msgspec.Struct, frozen=True):
    """Hold the versions of one policy's arms, and the shares of new episodes that they get.

    Shares are fractions of all new episodes. `tried` are the canary, if there is one, and those
    that ended as canaries, rolled back or for a newer version, which only keep their episodes.
    """

    policy: str
    serving: int
    canary: int | None = None
    canary_share: float = 0.0
    base_share: float = 0.0
    tried: frozenset[int] = frozenset()

    @property
    def are_several(self) -> bool:
        """Return whether an episode of the policy may have another arm than `serving`."""
        return self.canary is not None or bool(self.base_share or self.tried)

    def of_new(self, episode: str) -> Arm:
        """Return the arm of a new episode, by its name as it is kept.

        While the base model itself serves there is no arm `base`: both would be the same.
        """
        if self.canary is None and not self.base_share:
            return "serving"
        drawn = fraction(self.policy, self.serving if self.canary is None else self.canary, episode)
        if drawn < self.base_share:
            return "base" if self.serving else "serving"
        is_tried = self.canary is not None and drawn < self.base_share + self.canary_share
        return "canary" if is_tried else "serving"

    def version_of(self, arm: Arm) -> int:
        """Return the version that an arm's new episodes get."""
        if arm == "base":
            return 0
        return self.canary if arm == "canary" and self.canary is not None else self.serving

    def of_version(self, version: int) -> Arm:
        """Return the arm of an episode that has a version already.

        What had the traffic before another took it has the arm `serving`, as it had then.
        """
        if version in self.tried:
            return "canary"
        return "base" if not version and self.serving and self.base_share else "serving"


def fraction(policy: str, version: int, episode: str) -> float:
    """Return where an episode lies among all, evenly spread over [0, 1)."""
    hashed = _APART.join((policy, str(version), episode)).encode(errors="surrogatepass")
    return int.from_bytes(blake2b(hashed, digest_size=_BYTES).digest()) / _ALL


def arms_of(versions: Iterable[PolicyVersion]) -> Mapping[str, Arms]:
    """Return the arms of each policy among `versions` that has one that serves, by its name."""
    serving: dict[str, int] = {}
    canary: dict[str, PolicyVersion] = {}
    base_share: dict[str, float] = {}
    tried: dict[str, set[int]] = {}
    for one in versions:
        name = one.name
        if one.state == "serving":
            serving[name] = one.version
        if one.version == 0:
            base_share[name] = one.share or 0.0
        elif one.state == "canary":
            canary[name] = one
        # Serving ends a share.
        if one.version and one.share is not None and one.state in WITH_TRAFFIC:
            tried.setdefault(name, set()).add(one.version)
    return {
        name: Arms(
            policy=name,
            serving=number,
            canary=canary[name].version if name in canary else None,
            canary_share=(canary[name].share or 0.0) if name in canary else 0.0,
            base_share=base_share.get(name, 0.0),
            tried=frozenset(tried.get(name, ())),
        )
        for name, number in serving.items()
    }
