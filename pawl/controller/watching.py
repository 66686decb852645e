"""Watch over what serves of a policy, and say where nothing can be watched.

An episode may be stored late, as the database was away, or its first call was long. So all that a
watch rests on is read again from the beginning once an hour: beside it, and a part with each look,
since a version may have served for months. A controller that starts anew reads that in several
looks, too: meanwhile it judges the other policies.
"""

from collections.abc import Collection, Sequence
from datetime import datetime, timedelta
from typing import Final

import msgspec
from sqlalchemy.ext.asyncio import AsyncConnection

from pawl.controller.evidence import (
    KNOWN,
    Intake,
    PromotedOn,
    is_same_reward,
    key_of,
    reads_until,
    rule_of,
)
from pawl.controller.gate.records import Episode
from pawl.controller.gate.trial import Lead, joined
from pawl.controller.gate.watch import Succession, Watch, Watched
from store.read.gates import Gated, Promotion, Term, begin_of_newest, promotion, terms
from store.records import Arm

# What served before is known by so many episodes at most, and not by older ones than that.
EPISODES_BEFORE: Final = 10_000
BEFORE: Final = timedelta(days=7)
# So many are taken in at once: each is compared for many stretches.
AT_ONCE: Final = 1_000


class OnWatch:
    """Judge what serves by its episodes and those of the base model.

    What it was promoted for are the episodes of its trial: those that its promotion rested on, and
    those that had begun by then and counted only later. The latter are taken in first. That holds
    for what serves again, too, long after its trial: what it showed there it should show now.
    """

    def __init__(self, stands: Gated, promoted: Promotion) -> None:
        """Begin with the last of its trial, which the version was `promoted` for.

        Raises:
            msgspec.ValidationError: the evidence, or the version's rule, cannot be read.
        """
        serving = stands.serving
        self.key = key_of(serving)
        self._rule = rule_of(serving.gate or {})
        self._then = msgspec.convert(promoted.evidence, PromotedOn)
        self._lead = Lead(self._rule, base_serves=self._then.base_serves)
        self._watch = Watch(self._then.reference, self._rule)
        self._begins = True
        self._promoted = min(promoted.tried_at or serving.since, serving.since)
        name, version = serving.version.name, serving.version.version
        begun = min(self._then.until or self._promoted, self._promoted)
        # In its trial it was the canary; beside it, the base model may have served.
        tried: dict[Arm, Collection[int]]
        tried = {"base": (0,), "serving": (0,), "canary": (version,)}
        self._last = Intake(name, tried, begun, self._rule, self._lead.extend)
        since = serving.since + KNOWN
        served: dict[Arm, Collection[int]] = {"base": (0,), "serving": (version,)}
        self._intake = Intake(name, served, since, self._rule, self._extend)

    @property
    def is_blind(self) -> bool:
        """Return False: a trial came before it."""
        return False

    def goes_on(self, stands: Gated, _: Sequence[Term] = ()) -> bool:
        """Return whether it is still about what serves."""
        return self.key == key_of(stands.serving)

    async def look(
        self, connection: AsyncConnection, now: datetime, stop_at: float | None = None
    ) -> Watched | None:
        """Return whether the version is to be rolled back by the episodes that count at `now`.

        None if these are not read yet: at `stop_at`, a time of the event loop, it leaves off.
        """
        until = self._rule.counted_at(now)
        promoted = min(until, self._promoted)
        if not await self._last.catch_up(connection, promoted, stop_at):
            return None
        if not await self._intake.catch_up(connection, until, stop_at):
            return None
        return self._watch.watched()

    def _extend(self, episodes: list[Episode]) -> None:
        """Take in episodes that it had as it served: all of its trial have been by now."""
        if self._begins:
            self._begins = False
            both = joined(self._then.reference, self._lead.reference())
            self._watch = Watch(both, self._rule)
        self._watch.extend(episodes)


class OnSuccession:
    """Judge what serves untried, and what led to it, by their episodes and the base model's.

    Its beginning is that of the versions before, as far as these may still matter.
    """

    def __init__(self, stands: Gated, terms: Sequence[Term]) -> None:
        """Begin without episodes; `terms` are when versions got the traffic, oldest first.

        Raises:
            msgspec.ValidationError: the version's rule cannot be read.
        """
        self._name = stands.serving.version.name
        self._rule = rule_of(stands.serving.gate or {})
        untried = _untried(terms)
        # What began before rewards were made as they are now has none in this unit.
        one_reward = since_reward(terms)
        self._from = one_reward[0].since if len(one_reward) < len(terms) else None
        after_base = len(untried) < len(terms) and not terms[-len(untried) - 1].version
        self._succession = Succession(self._rule, after_base=after_base)
        self._serves = stands.serving.since
        self._terms: list[Term] = []
        self._served = {one.version for one in terms if one.version}
        self._intake: Intake | None = None
        self._follow(untried)

    @property
    def is_blind(self) -> bool:
        """Return whether nothing is known of what served before, so that no fall can be found."""
        return self._succession.is_blind

    def goes_on(self, stands: Gated, terms: Sequence[Term]) -> bool:
        """Go on with what got the traffic since, if that is all that has changed.

        Return False if another must begin: versions were rolled back, or somebody else moved them,
        or the rule is another one.
        """
        untried = _untried(terms)
        known = self._terms[-1]
        if known not in untried or rule_of(stands.serving.gate or {}) != self._rule:
            return False
        self._follow(untried[untried.index(known) + 1 :])
        return True

    def _follow(self, terms: Sequence[Term]) -> None:
        for one in terms:
            self._terms.append(one)
            self._served.add(one.version)
            self._succession.follow(one.version)

    async def look(
        self, connection: AsyncConnection, now: datetime, stop_at: float | None = None
    ) -> Watched | None:
        """Return whether anything is to be rolled back by the episodes that count at `now`.

        None if these are not read yet: at `stop_at`, a time of the event loop, it leaves off.
        """
        counted = self._rule.counted_at(now)
        if self._intake is None:
            self._intake = await self._begun(connection, min(self._serves, counted))
        if not await self._intake.catch_up(connection, counted, stop_at):
            return None
        return self._succession.watched()

    async def _begun(self, connection: AsyncConnection, until: datetime) -> Intake:
        """Begin with the newest episodes before `until`: those that count, of before it serves."""
        begin = await begin_of_newest(
            connection, self._name, since=until - BEFORE, until=until, most=EPISODES_BEFORE
        )
        begin = max(begin, self._from or begin)
        self._succession.leave_unread(sum(one.since < begin for one in self._terms))
        given: dict[Arm, Collection[int]] = {"base": (0,), "serving": self._served}
        take = self._succession.extend
        return Intake(self._name, given, begin, self._rule, take, most=AT_ONCE)


def since_reward(terms: Sequence[Term]) -> list[Term]:
    """Return what got the traffic since rewards are made as for the last of these versions."""
    of = terms[-1].reward
    last = (at for at, one in enumerate(terms) if not is_same_reward(one.reward, of))
    return list(terms[max(last, default=-1) + 1 :])


def _untried(terms: Sequence[Term]) -> list[Term]:
    """Return the versions that are to be watched: those untried since the last that was not.

    What a trial, a person or a roll-back gave the traffic to is what the next are compared with;
    so is the first whose rewards are made as they are now.
    """
    of_one_reward = since_reward(terms)
    last = max((at for at, one in enumerate(of_one_reward) if not one.is_untried), default=-1)
    return of_one_reward[last + 1 :]


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
