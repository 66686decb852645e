"""Simulate a day of one policy: episodes, a judge, a trainer, and a server with adapter slots.

Nothing is computed: an update takes the seconds that it would, and the policy moves by a given
divergence a version. What decides is the product's: its claim (`waiting`), its measure of staleness
(`trainer.updates.staleness`) and its pacing (`store.adapter_slots`).
"""

from bisect import insort
from collections import deque
from functools import cache
from math import inf, sqrt
from random import Random
from statistics import fmean
from typing import Final
from uuid import UUID

from benchmarks.durations.load import Episode, Load, make_episodes
from benchmarks.durations.waiting import Order, Waiting, latest_minute_first, newest_version_first
from store.adapter_slots import RECENT, Live, free_slots, is_due
from store.records import Record
from store.updates.ready import ClaimRule
from trainer.publishing.publish import PROXY_REFRESH_S
from trainer.recipes.recipe import Recipe
from trainer.updates.plan import claim_rule
from trainer.updates.staleness import effective_share, too_far

# Tokens that a version's effective sample size is taken of.
TOKENS: Final = 4096
POLL_S: Final = 5.0


class Rules(Record, frozen=True, kw_only=True):
    """Define how the trainer decides: the product's rules, or those that it had before."""

    name: str
    max_staleness: int
    min_effective_sample: float
    slots: int | None
    order: Order


BEFORE: Final = Rules(
    name="before",
    max_staleness=4,
    min_effective_sample=0.0,
    slots=None,
    order=newest_version_first,
)


def rules_now(recipe: Recipe, slots: int) -> Rules:
    """Return the rules of a recipe and a server."""
    return Rules(
        name=f"{slots} slots",
        max_staleness=recipe.claim.max_staleness,
        min_effective_sample=recipe.off_policy.min_effective_sample,
        slots=slots,
        order=latest_minute_first,
    )


class Machine(Record, frozen=True, kw_only=True):
    """Define how fast the trainer is, and how far an update moves the policy.

    An update takes `update_s` seconds and `episode_s` more an episode. `divergence` is that of two
    versions in a row, in nats a token.
    """

    update_s: float = 30.0
    episode_s: float = 0.2
    divergence: float = 0.002


class Version:
    """Follow a loaded version: when it lost the traffic, and the last end of its episodes."""

    def __init__(self, number: int, since: float) -> None:
        """Begin with the traffic, and without an episode."""
        self.number = number
        self.lost_traffic: float | None = None
        self.last_call = since
        self.retired: float | None = None


class Day(Record, frozen=True, kw_only=True):
    """Record what came of a day: every episode, and over time how many versions were live."""

    episodes: tuple[Episode, ...]
    live: tuple[tuple[float, int], ...]
    versions: int


class _Run:
    def __init__(self, load: Load, machine: Machine, rules: Rules, recipe: Recipe, seed: int):
        self.load, self.machine, self.rules, self.recipe = load, machine, rules, recipe
        self.seed = seed
        rule: ClaimRule = claim_rule(recipe, "m")
        self.waiting = Waiting(rule, rules.order)
        self.serving = Version(0, 0.0)
        self.others: list[Version] = []
        self.ends: float | None = None
        self.claimed: float | None = None
        self.waits = False
        self.tails: deque[float] = deque(maxlen=RECENT)
        self.live: list[tuple[float, int]] = []

    def run(self) -> Day:
        episodes = make_episodes(self.load, self.seed)
        coming = list(reversed(episodes))
        unscored: list[tuple[float, int, Episode]] = []
        now = 0.0
        while now < self.load.seconds:
            while coming and coming[-1].begun <= now:
                one = coming.pop()
                one.version = self.serving.number
                self.serving.last_call = max(self.serving.last_call, one.ended)
                insort(unscored, (-one.scored, one.number, one))
            while unscored and -unscored[-1][0] <= now:
                self.waiting.add(unscored.pop()[2])
            self._step(now)
            now += POLL_S
        return Day(episodes=tuple(episodes), live=tuple(self.live), versions=self.serving.number)

    def _step(self, now: float) -> None:
        """Let the trainer look once: retire, publish what is trained, claim."""
        if self.ends is not None and now >= self.ends:
            self._promote(now)
        self._retire_idle(now)
        live = self._count(now)
        self.live.append((now, live.total))
        if self.ends is not None:
            return
        slots = self.rules.slots
        if slots is None or (free_slots(live, slots) and is_due(live, slots)):
            self._claim(now)
            self.waits = False
            return
        self.waits = True
        if not free_slots(live, slots):
            self._retire_longest(now, live)

    def _promote(self, now: float) -> None:
        self.ends = None
        self.serving.lost_traffic = now
        self.others.append(self.serving)
        self.serving = Version(self.serving.number + 1, now)

    def _oldest(self) -> int:
        return max(0, self.serving.number - self.rules.max_staleness)

    def _retire_idle(self, now: float) -> None:
        idle_s = self.recipe.publish.retire_after_s
        for one in self.others:
            silent = max(one.lost_traffic or 0.0, one.last_call)
            if one.retired is None and now > silent + idle_s:
                self._retire(one, now)
        self.others = [
            one for one in self.others if one.retired is None or now - one.retired < PROXY_REFRESH_S
        ]

    def _count(self, now: float) -> Live:
        """Count what needs a slot: version 0 is the base model, which needs none."""
        trained = [one for one in self.others if one.number]
        return Live(
            serving=int(self.serving.number > 0),
            published=sum(one.retired is None for one in trained),
            unloading=sum(one.retired is not None for one in trained),
            coming=int(self.ends is not None),
            tail_s=fmean(self.tails or [0.0]),
            since_s=inf if self.claimed is None else now - self.claimed,
        )

    def _retire_longest(self, now: float, live: Live) -> None:
        if live.unloading:
            return
        longest_s = self.recipe.publish.longest_pin_s
        held = [one for one in self.others if one.number and one.retired is None]
        for one in held[:1]:
            if now > (one.lost_traffic or 0.0) + longest_s:
                self._retire(one, now)

    def _retire(self, one: Version, now: float) -> None:
        one.retired = now
        if one.number:
            kept_s = now - (one.lost_traffic or 0.0)
            self.tails.append(min(kept_s, self.recipe.publish.longest_pin_s))

    def _claim(self, now: float) -> None:
        for one in self.waiting.expire(self._oldest()):
            one.fate = "stale"
        taken = 0
        is_trained = False
        for ready, group in self.waiting.claim(now, self._oldest(), whole=self.waits):
            for one in group:
                taken += 1
                one.lag = self.serving.number - one.version
                one.fate = self._fate(one) if ready.has_signal else "no_spread"
                is_trained |= one.fate == "trained"
        if is_trained:
            self.claimed = now
            self.ends = now + self.machine.update_s + self.machine.episode_s * taken

    def _fate(self, one: Episode) -> str:
        cap = self.recipe.off_policy.ratio_cap
        worth = worth_after(one.lag, self.machine.divergence, cap)
        far = too_far({UUID(int=one.number): worth}, self.rules.min_effective_sample)
        return "off_policy" if far else "trained"


@cache
def worth_after(lag: int, divergence: float, cap: float) -> float:
    """Return what an episode is worth `lag` versions later: its effective sample size, as a share.

    Log ratios are normal, with the variance that gives so many nats a token for each version.
    """
    variance = 2 * divergence * lag
    chance = Random(lag)
    ratios = [chance.gauss(-variance / 2, sqrt(variance)) for _ in range(TOKENS)]
    return effective_share(ratios, cap)


def run_day(load: Load, machine: Machine, rules: Rules, recipe: Recipe, seed: int) -> Day:
    """Return what comes of a day; the same arguments give the same day."""
    return _Run(load, machine, rules, recipe, seed).run()
