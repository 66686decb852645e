"""Watch over what serves of a policy, and say where nothing can be watched.

An episode may be stored late, as the database was away, or its first call was long. So all that a
watch rests on is read again from the beginning once an hour: beside it, and a part with each look,
since a version may have served for months. A steward that starts anew reads that in several looks,
too: meanwhile it judges the other policies.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy.ext.asyncio import AsyncConnection

from pawl.steward.evidence import is_same_reward, rule_of
from pawl.steward.gate.watch import Watched
from pawl.steward.looks import reads_until
from pawl.steward.watches import OnSuccession, OnWatch, since_reward
from store.read.standing import Gated, Promotion, Term, promotion, terms

# What was stored late only a reading from the beginning has. There is one this long after the last.
READ_AGAIN: Final = timedelta(hours=1)
# Why nothing is watched, and what to do.
NO_RULE = (
    "the recipe that made it gives the base model no share of the new episodes, so a worse version"
    " could not be told from a harder world: set gate.base_share for the versions to come"
)
NO_SHARE = (
    "the base model has no share of the new episodes any more: set gate.base_share for the versions"
    " to come"
)
UNTRIED = "it never was promoted for a trial, so nobody knows how far it was above the base model"
PUT_THERE = (
    "it got the traffic by hand, or as a version after it was rolled back: it is what the next"
    " version is compared with"
)
BLIND = (
    "nothing is known of what served before it, as the base model had no share of those episodes:"
    " the versions after it are compared with it"
)
OTHER_REWARD = (
    "its reward is another sum than when it got the traffic ([reward] of the recipe), and what is"
    " in two units cannot be compared: versions to come are watched again, and so is this one if"
    " the recipe gets its [reward] back; if it does worse meanwhile, `pawl policies rollback`"
)
FIRST = (
    "it is the first version by its reward, which became another sum ([reward] of the recipe): it"
    " is what the next version is compared with"
)


def why_unwatched(stands: Gated, promoted: Promotion | None) -> str | None:
    """Return why live rewards cannot roll back what serves, or None if they can (pure).

    There is nothing to be watched while the base model serves.

    Raises:
        msgspec.ValidationError: the version's rule cannot be read.
    """
    serving = stands.serving
    if not serving.version.version:
        return None
    if serving.gate is None:
        return NO_RULE
    if not stands.base_share:
        return NO_SHARE
    rule = rule_of(serving.gate)
    if not is_same_reward(rule.reward, stands.reward):
        return OTHER_REWARD
    if rule.mode == "gated":
        return None if promoted and "reference" in promoted.evidence else UNTRIED
    return None if promoted and promoted.actor == "trainer" else PUT_THERE


def why_not_in_line(served: Sequence[Term], version: int) -> str | None:
    """Return why a version that serves untried cannot be held against its line; None: it can.

    Whoever moved the traffic may have begun before another, and have waited for that (pure).
    """
    if not (served and served[-1].is_untried and served[-1].version == version):
        return PUT_THERE
    of_one_reward = since_reward(served)
    return FIRST if len(of_one_reward) == 1 and len(served) > 1 else None


class Watching:
    """Watch over what serves of one policy, whichever version it is.

    Attributes:
        why_not: why nothing was watched at the last look; None if something was, or the base model
            serves.
    """

    def __init__(self, name: str) -> None:
        """Begin without having seen an episode."""
        self._name = name
        self._one: OnWatch | OnSuccession | None = None
        self._again: OnWatch | OnSuccession | None = None
        self._read_at: datetime | None = None
        self.why_not: str | None = None

    async def look(self, connection: AsyncConnection, stands: Gated) -> Watched | None:
        """Return what the watch has come to, or None if nothing is watched, or it reads on.

        Raises:
            msgspec.ValidationError: the evidence, or the version's rule, cannot be read.
        """
        version = stands.serving.version.version
        promoted = await promotion(connection, self._name, version)
        self.why_not = why_unwatched(stands, promoted)
        if promoted is None or not version or self.why_not is not None:
            self._one = self._again = None
            return None
        rule = rule_of(stands.serving.gate or {})
        served = await terms(connection, self._name, version, rule.counted_at(stands.now))
        if rule.mode == "immediate":
            self.why_not = why_not_in_line(served, version)
        if self.why_not is not None:
            self._one = self._again = None
            return None
        watch = self._going_on(stands, promoted, served)
        outcome = await watch.look(connection, stands.now, reads_until())
        if outcome is None:
            return None
        self.why_not = BLIND if watch.is_blind else None
        self._read_at = self._read_at or stands.now
        if outcome.roll_back:
            return outcome
        return await self._read_again(connection, stands, promoted, served) or outcome

    def _going_on(
        self, stands: Gated, promoted: Promotion, served: Sequence[Term]
    ) -> OnWatch | OnSuccession:
        if self._again is not None and not self._again.goes_on(stands, served):
            self._again = None
        if self._one is None or not self._one.goes_on(stands, served):
            self._one, self._again = _begun(stands, promoted, served), None
            self._read_at = None
        return self._one

    async def _read_again(
        self,
        connection: AsyncConnection,
        stands: Gated,
        promoted: Promotion,
        served: Sequence[Term],
    ) -> Watched | None:
        """Read one more part from the beginning on, if it is time; return what all came to."""
        if self._again is None:
            if self._read_at is None or stands.now - self._read_at < READ_AGAIN:
                return None
            self._again = _begun(stands, promoted, served)
        outcome = await self._again.look(connection, stands.now, stop_at=0.0)
        if outcome is not None:
            self._one, self._again, self._read_at = self._again, None, stands.now
        return outcome


def _begun(stands: Gated, promoted: Promotion, served: Sequence[Term]) -> OnWatch | OnSuccession:
    """Return a watch over what serves that has seen no episode yet."""
    if rule_of(stands.serving.gate or {}).mode == "gated":
        return OnWatch(stands, promoted)
    return OnSuccession(stands, served)
