"""Choose the episodes that explore, by their names alone (pure).

The choice has no state: every worker and proxy makes the same one, also after a restart. It does
not depend on the policy, so that an episode of several policies explores with all or none of those
that have the same share, and a smaller share lies within a larger one.
"""

from hashlib import blake2b
from typing import Final

import msgspec

from proxy.upstreams.members import SamplingDefaults
from store.policy_table import Explore

# Keeps this choice apart from any other that is made by an episode's name.
_PURPOSE: Final = b"pawl.explore"
_BYTES: Final = 6
_ALL: Final = 2 ** (8 * _BYTES)


class Exploring(msgspec.Struct, frozen=True):
    """Hold what an exploring episode's calls may change, and what their server does by itself."""

    rule: Explore
    defaults: SamplingDefaults


def is_chosen(episode: str, share: float) -> bool:
    """Return whether an episode is of the share of all episodes that explores."""
    name = episode.encode(errors="surrogatepass")
    digest = blake2b(name, digest_size=_BYTES, person=_PURPOSE).digest()
    return int.from_bytes(digest) < share * _ALL
