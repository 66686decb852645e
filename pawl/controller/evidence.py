"""Take in the episodes that a version is judged by: each once, in the order of their first calls.

What was taken in is kept, so that a look costs what is new since the last one. Another controller,
or one that is started again, begins at the version's beginning and comes to the same: of an episode
counts what there was of it a fixed time after it began, whenever it is read.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from datetime import datetime, timedelta
from typing import Annotated, Any, Final, Literal, TypeVar
from uuid import UUID

import msgspec
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from pawl.controller.gate.records import Decision, Episode, GateOptions
from pawl.controller.gate.trial import Lead, Reference, Trial
from store.read.gates import MOST, ArmEpisode, Gated, Standing, arm_episodes
from store.records import Arm
from trainer.publishing.publisher import PROXY_REFRESH_S

# Episodes are read in parts of this length, so that none is too large for memory.
PART: Final = timedelta(hours=1)
# The least part of so many that is read at once: an outage is no reason for shorter ones.
MOST_CUTS: Final = 1024
# All proxies know of a change after this long.
KNOWN: Final = timedelta(seconds=PROXY_REFRESH_S)
# What a proxy recorded is in the database after this long, unless that is away.
STORED: Final = timedelta(seconds=5)


# A look that takes longer is given up, and begun again: episodes that were read count.
LOOK_S: Final = 60.0
# It reads on for so long, and leaves the rest to the next looks: other policies wait for it.
READ_S: Final = 5.0

T = TypeVar("T")


class LookTooLong(Exception):
    """Say that a look was given up, as it took too long; the database had let it begin."""


def reads_until() -> float:
    """Return the time of the event loop at which a look that reads now is to leave off."""
    return asyncio.get_running_loop().time() + READ_S


async def one_look(engine: AsyncEngine, judge: Callable[[AsyncConnection], Awaitable[T]]) -> T:
    """Judge in one transaction, and return what came of it.

    Raises:
        LookTooLong: it is not done in time; the next goes on with the episodes that it had read.
        TimeoutError: the database did not even let it begin.
    """
    has_begun = False
    try:
        async with asyncio.timeout(LOOK_S), engine.begin() as connection:
            has_begun = True
            return await judge(connection)
    except TimeoutError as error:
        if not has_begun:
            raise
        raise LookTooLong(
            f"a look was given up after {LOOK_S:g} s, though the database had let it begin: what it"
            " had read counts, and the next goes on from there; if this stays so, the database is"
            " too slow for as many episodes"
        ) from error


class Rule(GateOptions, frozen=True, kw_only=True):
    """Add to what decides when an episode counts: `reward_delay_s` seconds after its beginning.

    What is said of it later does not count. `mode` says whether the version was to be tried before
    it served, or served untried. `reward` is the digest of what rewards are made by in its units.
    """

    mode: Literal["immediate", "gated"] = "gated"
    reward: str | None = None

    # Without any, no call would have ended in time.
    reward_delay_s: Annotated[float, msgspec.Meta(gt=0)] = 600.0

    def counted_at(self, now: datetime) -> datetime:
        """Return the time such that episodes that began before it count at `now`."""
        return now - timedelta(seconds=self.reward_delay_s) - STORED


def rule_of(gate: Mapping[str, Any]) -> Rule:
    """Return the rule that a candidate was recorded with.

    Raises:
        msgspec.ValidationError: it is none.
    """
    return msgspec.convert(dict(gate), Rule)


def is_same_reward(one: str | None, other: str | None) -> bool:
    """Return whether two digests are of one reward, in one unit.

    What has none is of a time when the policy had the reward that it had at first.
    """
    return one is None or other is None or one == other


class Intake:
    """Hand over the episodes that some arms gave to their versions: each once, and none left out.

    Attributes:
        at: the time before which all episodes have been handed over.
    """

    def __init__(
        self,
        policy: str,
        given: Mapping[Arm, Collection[int]],
        since: datetime,
        rule: Rule,
        take: Callable[[list[Episode]], None],
        most: int | None = None,
    ) -> None:
        """Begin with the episodes of `since`; they count as they stand after the rule's delay.

        `given` are the versions of each arm. A part has at most `most` episodes, which are handed
        over at once, while nothing else is done.
        """
        self._policy = policy
        self._given = given
        self._counts = timedelta(seconds=rule.reward_delay_s)
        self._take = take
        self._goes_on_from: UUID | None = None
        self._most = most
        self._cut = 1
        self.at = since

    async def catch_up(
        self, connection: AsyncConnection, until: datetime, stop_at: float | None = None
    ) -> bool:
        """Hand over the episodes that began before `until`, and were not yet handed over.

        Return whether these are all: at `stop_at`, a time of the event loop, it leaves off, after a
        part at least. If it is ended in the middle of a part, the next is half as long, and the one
        after it as long again: what cannot be read in the time of a look would never be.
        """
        has_read = False
        while self.at < until:
            if has_read and stop_at is not None and asyncio.get_running_loop().time() >= stop_at:
                return False
            has_read = True
            end = min(self.at + PART, until)
            cut, self._cut = self._cut, min(2 * self._cut, MOST_CUTS)
            part = await arm_episodes(
                connection,
                self._policy,
                self._given,
                since=self._goes_on_from or self.at,
                until=end,
                counts=self._counts,
                most=max((self._most or MOST) // cut, 1),
            )
            self._cut = max(cut // 2, 1)
            self._take([_episode(one) for one in part.episodes])
            self._goes_on_from = part.goes_on_from
            if part.goes_on_from is None:
                self.at = end
        return True


class OnTrial:
    """Judge a canary by its episodes and those of what serves."""

    def __init__(self, stands: Gated, canary: Standing, *, is_second: bool = False) -> None:
        """Begin with the episodes since both had traffic.

        `is_second` says that another has come to a verdict, which this one is to confirm.

        Raises:
            msgspec.ValidationError: the canary's rule cannot be read.
        """
        self.key = key_of(stands.serving, canary)
        self.is_second = is_second
        self._read_at: datetime | None = None
        self._rule = rule_of(canary.gate or {})
        self._trial = Trial(self._rule)
        self._base_serves = not stands.serving.version.version
        self._lead = Lead(self._rule, base_serves=self._base_serves)
        self._began = canary.since
        given: dict[Arm, Collection[int]] = {
            "base": (0,),
            "serving": (stands.serving.version.version,),
            "canary": (canary.version.version,),
        }
        since = max(canary.since, stands.serving.since) + KNOWN
        self._intake = Intake(canary.version.name, given, since, self._rule, self._extend)

    async def read(
        self, connection: AsyncConnection, now: datetime, stop_at: float | None = None
    ) -> bool:
        """Read the episodes that count at `now`; return whether all are read.

        At `stop_at`, a time of the event loop, it leaves off, and the next call goes on.
        """
        if not await self._intake.catch_up(connection, self._rule.counted_at(now), stop_at):
            return False
        self._read_at = self._read_at or now
        return True

    async def decide(self, connection: AsyncConnection, now: datetime) -> Decision:
        """Return what is to be done with the canary by the episodes that count at `now`."""
        await self.read(connection, now)
        return self._trial.decide((now - self._began).total_seconds())

    def is_old(self, before: datetime) -> bool:
        """Return whether it was first read to the end before this time, or at it.

        One that takes longer to read than it takes to get old would never be at its end otherwise.
        """
        return self._read_at is not None and self._read_at <= before

    def evidence(self, decision: Decision) -> dict[str, Any]:
        """Return what a decision rests on, and what a watch over the version starts from; JSON."""
        reference = self._lead.reference()
        promoted_on = PromotedOn(reference, self._intake.at, self._base_serves)
        found: dict[str, Any] = msgspec.to_builtins(promoted_on)
        return {"decision": msgspec.to_builtins(decision), **found}

    def _extend(self, episodes: list[Episode]) -> None:
        self._trial.extend(episodes)
        self._lead.extend(episodes)


class PromotedOn(msgspec.Struct, frozen=True):
    """Hold what a watch over a version starts from: part of its promotion's evidence, as JSON.

    Attributes:
        reference: how far it was above the base model, by the episodes begun before `until`.
        until: the first time of which no episode is in it; None if that is not known.
        base_serves: the base model was what it was compared with.
    """

    reference: Reference
    until: datetime | None = None
    base_serves: bool = False


def key_of(*parts: Standing) -> tuple[object, ...]:
    """Return what a judgement is about: with another key it begins anew."""
    return tuple((one.version.version, one.since) for one in parts)


def _episode(one: ArmEpisode) -> Episode:
    return Episode(
        arm=one.arm,
        family=one.family,
        reward=one.reward,
        failed=one.failed or one.broken,
        malformed=one.malformed,
        tools_failed=one.tools_failed,
        seconds=one.seconds,
        version=one.version,
    )
