"""Simulate the rules of `[publish]`: how fast they decide, how often wrongly, and at what cost.

Versions with known mean rewards pass through the product's comparison, by the controller's rules:
a single version for 30 days, and a line of versions, as frequent as recipes make them, watched with
its control. docs/explanation/gate.md explains the results. Ends with status 1 if a bar does not
hold.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from datetime import date
from functools import partial
from random import Random
from statistics import fmean
from typing import Any, Final, Literal, NamedTuple

import numpy
from rich.console import Console

from benchmarks.report import (
    NONE,
    Bar,
    Rows,
    bars_table,
    number,
    percentile,
    plotting,
    write_figures,
)
from benchmarks.stack import ROOT
from controller.comparison import (
    GUARD_MARGIN,
    MOST_SHARE,
    ComparedEpisode,
    Comparison,
    canary_share,
)
from controller.eprocess import Block, block_size
from controller.own_past import PAST
from trainer.recipes.recipe import PublishMode, PublishOptions

PAGE: Final = ROOT / "docs" / "explanation" / "gate.md"
# The tables on the page, by the beginnings of their titles.
SHOWN: Final = ("One version", "A fall")
PICTURE: Final = ROOT / "docs" / "images" / "gate.png"

DAYS: Final = 30
RATES: Final = (50, 300, 1_000)
EFFECTS: Final = (-0.10, -0.05, 0.0, 0.05, 0.10)
# The base model's mean reward, and the limits of any version's mean reward.
BASE_MEAN, LEAST, MOST = 0.5, 0.02, 0.98
# Tasks of an evaluation (2,000 runs), tries of each by each version, and the spread of tasks.
TASKS, TRIES, TASKS_DIFFER = 250, 4, 0.4
# The bars: at most MISTAKES of the decisions are wrong; at least FOUND of the versions that are
# 0.10 better are promoted within SOON tasks.
MISTAKES, SOON, FOUND = 0.05, 200, 0.8
HARMFUL: Final = -0.05


class Way(NamedTuple):
    """A way to decide which versions get the traffic."""

    name: str
    mode: PublishMode
    undecided: Literal["promote", "keep"] = "promote"
    hours: float = 12.0

    @property
    def rule(self) -> PublishOptions:
        return PublishOptions(mode=self.mode, undecided=self.undecided, decide_within_h=self.hours)


IMMEDIATE: Final = Way("immediate", "immediate")
EVALUATED: Final = Way("evaluated", "evaluated")
CANARY: Final = Way("canary", "canary")
KEEPS: Final = Way('canary, "keep", 336 h', "canary", "keep", 336.0)
WAYS: Final = (IMMEDIATE, EVALUATED, CANARY, KEEPS)


class DrawnComparison(Comparison):
    """A comparison to which whole blocks are added, of rewards 0 or 1 in one family of tasks.

    The result is the same as of adding the episodes one by one, in a tenth of the time.
    """

    def add_block(self, block: Block) -> None:
        self._close_block(block)
        self._judge()


class LiveComparison:
    """Compares two versions by live episodes, block after block."""

    def __init__(
        self, rule: PublishOptions, shares: tuple[float, float], *, begins: float, watches: bool
    ):
        self.comparison = DrawnComparison(
            rule, new_share=shares[0], old_share=shares[1], watches=watches
        )
        self._last = begins
        self._size, self._share = block_size(*shares), shares[1]

    def due(self, per_day: float, share: float | None = None) -> float:
        """Return the day on which the next block is complete."""
        return self._last + self._length(share) / per_day

    def add(
        self, draw: Any, now: float, means: Sequence[float], share: float | None = None
    ) -> None:
        self._last = now
        count = self._length(share)
        old = max(1, int(draw(count - 1, self._share if share is None else share)))
        new = max(1, count - old)
        difference = draw(new, means[0]) / new - draw(old, means[1]) / old
        self.comparison.add_block(Block(float(difference), new * old / (new + old), 1.0))

    def _length(self, share: float | None) -> int:
        """Return the mean number of episodes in a block, which needs both arms."""
        rarer = min(own := self._share if share is None else share, 1 - own)
        return max(2, round(self._size + (1 - rarer) ** self._size / rarer))


class Policy:
    """Simulates the decisions about one version, as made by controller/gate.py."""

    def __init__(self, rule: PublishOptions, per_day: int, effect: float, seed: str) -> None:
        self.serves = False
        # Day and number of tasks at the decision about the version; None: not decided.
        self.decided: tuple[float, int] | None = None
        self._rule, self._per_day = rule, per_day
        self._means = BASE_MEAN + effect, BASE_MEAN
        self._random = numpy.random.default_rng(list(seed.encode()))

    def live_through(self) -> "Policy":
        """Simulate `DAYS` days: the version is tried, and watched while it serves."""
        rule = self._rule
        if rule.mode == "immediate":
            self.serves = True
            self._watch(0.0, rule.control_share)
        elif rule.mode == "evaluated":
            self._end(evaluate(rule, *self._means, self._random), 0.0, 0.0)
        else:
            share = canary_share(self._per_day / 24, rule)
            trial = LiveComparison(rule, (share, 1 - share), begins=0.0, watches=False)
            over, now = rule.decide_within_h / 24, 0.0
            while not trial.comparison.verdict and now < DAYS:
                now = trial.due(self._per_day)
                if now > over and trial.comparison.difference is not None:
                    now = over
                    break
                trial.add(self._random.binomial, now, self._means)
            self._end(trial.comparison, now, share)
        return self

    def _end(self, comparison: Comparison, now: float, share: float) -> None:
        """Act on the result of a trial or an evaluation."""
        self.decided = now, comparison.blocks
        rule, verdict = self._rule, comparison.verdict
        if verdict is None:
            self.serves = rule.undecided == "promote" and not comparison.points_to_harm
            share = max(share, rule.control_share)
        else:
            self.serves = verdict.kind == "better"
            share = rule.control_share
        if self.serves:
            self._watch(now, share)

    def _watch(self, now: float, share: float) -> None:
        """Watch the serving version; it loses the traffic if it is found to be worse by the end."""
        usual = self._rule.control_share
        watch = LiveComparison(self._rule, (1 - usual, usual), begins=now, watches=True)
        while (now := watch.due(self._per_day, share)) < DAYS:
            watch.add(self._random.binomial, now, self._means, share)
            comparison = watch.comparison
            is_lower = share > usual and comparison.scores_lower
            if comparison.verdict is not None or is_lower:
                self.serves = False
                self.decided = self.decided or (now, 0)
                return
            share = usual if comparison.has_trial_information else share


def evaluate(rule: PublishOptions, new: float, old: float, random: Any) -> Comparison:
    """Evaluate versions with these means on the same tasks, until a verdict or the last task."""
    comparison = DrawnComparison(rule)
    place = 2 * random.random(TASKS) - 1
    made = [
        random.binomial(TRIES, mean + min(TASKS_DIFFER, mean, 1 - mean) * place) / TRIES
        for mean in (new, old)
    ]
    for difference in made[0] - made[1]:
        comparison.add_block(Block(float(difference), TRIES / 2, 1.0))
        if comparison.verdict is not None:
            break
    return comparison


# One version


class Fate(NamedTuple):
    """The outcome for a version: when it was decided about, and whether it serves at the end."""

    day: float
    tasks: int
    serves: bool


class OneVersion(NamedTuple):
    """The case of one version: how it is decided about, the traffic, and its effect."""

    way: Way
    per_day: int
    effect: float


def one_version(case: OneVersion, run: int) -> Fate:
    policy = Policy(case.way.rule, case.per_day, case.effect, f"{case} {run}").live_through()
    day, tasks = policy.decided or (float("inf"), 0)
    return Fate(day, tasks, policy.serves)


def measure_decisions(pool: Executor, runs: int) -> tuple[list[Rows], list[Bar]]:
    lines, soon, harmful = [], 1.0, {}
    for way in WAYS:
        for per_day in RATES:
            line = [way.name, number(per_day)]
            for effect in EFFECTS:
                count = 5 * runs if effect == HARMFUL else runs
                fates = simulate_all(pool, one_version, OneVersion(way, per_day, effect), count)
                serve = fmean(fate.serves for fate in fates)
                line.append(f"{serve:.2f} ({_median_time(way, fates)})")
                if effect == HARMFUL:
                    harmful[way, per_day] = serve
                if effect == 0.1 and way is EVALUATED:
                    within = fmean(fate.serves and fate.tasks <= SOON for fate in fates)
                    soon = min(soon, within)
            lines.append(line)
    heads = ["mode", "episodes a day", *(_signed(effect) for effect in EFFECTS)]
    title = "One version: share that serves after 30 days (median days, or tasks, to a decision)"
    bars = [Bar(f"0.10 better, promoted within {SOON} tasks", soon, FOUND, at_least=True)]
    for way, rates in ((EVALUATED, RATES), (CANARY, RATES), (KEEPS, RATES)):
        worst = max(harmful[way, per_day] for per_day in rates)
        name = f"0.05 worse, serves after 30 days: {way.name}, from {rates[0]} episodes a day"
        bars.append(Bar(name, worst, MISTAKES))
    return [Rows(title, heads, lines)], bars


def _median_time(way: Way, fates: Sequence[Fate]) -> str:
    """Return the median number of days, or of tasks if evaluated, until the decision."""
    if way is EVALUATED:
        return number(percentile([fate.tasks for fate in fates], 0.5))
    middle = percentile([fate.day for fate in fates], 0.5)
    return NONE if middle > DAYS else f"{middle:.1f}"


def _signed(effect: float) -> str:
    return f"{effect:+.2f}".replace("-", "−") if effect else "0"


# A line of versions, as frequent as recipes make them


class Line:
    """A simulated line of versions, trained and compared as in mode "immediate".

    Time is counted in episodes, whose rewards arrive at once. `step` returns how much better a new
    version is than the serving one.

    Attributes:
        now: number of episodes so far.
        means: mean reward of each version, by its number.
        serving: the serving version.
        control: the version with which it is compared.
        rolled_back: for each roll-back, by how many versions, and episodes, it went back.
        held: each time when training was held.
        was_new: whether the serving version had the last episode.
    """

    def __init__(self, mean: float, per_update: int, seed: str, delay: int = 0) -> None:
        self.step: Callable[[int], float] = lambda _: 0.0
        self.now, self.means = 0, {0: mean}
        self.serving, self.control = 0, 0
        self.rolled_back: list[tuple[int, int]] = []
        self.held: list[int] = []
        self.was_new = True
        self._rule, self._per_update, self._delay = PublishOptions(), per_update, delay
        self._random = Random(seed)
        self._share, self._is_held, self._trained = 0.0, False, 0
        self._comparison: Comparison | None = None
        # The newest episodes, each with whether the serving version had it; the first one's number.
        self._episodes: list[tuple[bool, ComparedEpisode]] = []
        self._first = 0
        # When the control and each later version got the traffic, in their order.
        self._began: dict[int, int] = {0: 0}

    @property
    def behind(self) -> tuple[int, int]:
        """Return by how many versions, and episodes, the control is behind the serving version."""
        line = [one for one in self._began if one > self.control]
        return len(line), self.now - self._began[line[0]] if line else 0

    def live(self, episodes: int, until: Callable[[], bool] = lambda: False) -> "Line":
        """Simulate `episodes` episodes, or fewer if `until` returns true."""
        end = self.now + episodes
        while self.now < end and not until():
            is_new = self.was_new = self._random.random() >= self._share
            version = self.serving if is_new else self.control
            reward = float(self._random.random() < self.means[version])
            self._episodes.append((is_new, ComparedEpisode("", reward, version=version)))
            self.now += 1
            if self._comparison is not None:
                self._comparison.add(*self._episodes[-1])
                self._look(self._comparison)
            self._trained += not self._is_held
            if self._trained >= self._per_update:
                self._update()
        return self

    def _update(self) -> None:
        self._trained, new = 0, len(self.means)
        mean = self.means[self.serving] + self.step(new)
        self.means[new] = min(max(mean, LEAST), MOST)
        self.serving, self._began[new] = new, self.now
        if self._comparison is None:
            self._share = self._rule.control_share
            self._compare(self.now)

    def _compare(self, since: int) -> None:
        """Begin a comparison of serving version and control, with the episodes since `since`."""
        self._comparison = Comparison(
            self._rule,
            new_share=1 - self._rule.control_share,
            old_share=self._rule.control_share,
            watches=True,
        )
        place = since - self._first
        for is_new, episode in self._episodes[max(0, place - PAST) : place]:
            if is_new:
                self._comparison.add_past(episode)
        for is_new, episode in self._episodes[place:]:
            self._comparison.add(is_new, episode)
        dropped = max(0, place - PAST)
        self._episodes, self._first = self._episodes[dropped:], self._first + dropped

    def _look(self, comparison: Comparison) -> None:
        """Act on the comparison as the controller does."""
        if comparison.verdict is not None:
            self.rolled_back.append(self.behind)
            self.serving, self._comparison, self._share = self.control, None, 0.0
            self._is_held, self._began = False, {self.control: self.now}
        elif self._is_held:
            if comparison.may_move_control:
                self._is_held, self._share = False, self._rule.control_share
                self._compare(self.now)
        elif comparison.fall is not None:
            self.held.append(self.now)
            self._is_held, self._share = True, MOST_SHARE
        elif (newest := comparison.next_control) is not None:
            known = [
                one
                for one, began in self._began.items()
                if self.control < one <= newest
                and one != self.serving
                and began <= self.now - self._delay
            ]
            if known:
                self.control = known[-1]
                self._began = {
                    one: began for one, began in self._began.items() if one >= self.control
                }
                self._compare(self.now - self.behind[1])


# Episodes to an update: with the recipe `default`, and with `ppo`.
PER_UPDATE: Final = (64, 128)
# A learning line: the rise of its mean reward in 1,000 episodes, its first and its last mean.
LEARNS, FROM, TO = 0.13, 0.3, 0.9
# One episode a second, in episodes a day; a week in days.
SECOND, WEEK = 86_400, 7
# Episodes a day.
PACES: Final = (20, 300, 1_000, 5_000, SECOND)
# Falls of the mean reward: from which mean, by how much.
FALLS: Final = ((0.9, 0.2), (0.9, 0.3), (0.6, 0.3), (0.4, 0.3))
LARGE: Final = 0.3
HELD_WITHIN, BACK_WITHIN, MOST_BEHIND, OLDEST = 150, 300, 1_000, 10
# This share of the runs must keep a bar.
NEARLY_ALL: Final = 0.9


class Learning(NamedTuple):
    """The case of a learning line: episodes to an update, and `reward_delay_s` in episodes."""

    per_update: int
    delay: int


def watch_learning_line(case: Learning, run: int) -> tuple[list[tuple[int, int]], int]:
    """Return how far the control was behind a learning line, and the number of roll-backs."""
    line = Line(FROM, case.per_update, f"{case} {run}", case.delay)
    line.step = lambda _: LEARNS * case.per_update / 1_000
    behind = []
    while line.means[line.serving] < TO and line.now < 50_000:
        behind.append(line.live(20).behind)
    return behind, len(line.rolled_back)


class Fall(NamedTuple):
    """The case of a line that falls by `drop` after 2,000 to 4,000 episodes at `level`."""

    per_update: int
    level: float
    drop: float


class FoundFall(NamedTuple):
    """How soon a fall was found; None: it was not.

    `held` and `back` count the rewards of the fallen versions until training was held, and until
    the roll-back; `episodes` counts all episodes until the roll-back. `older` is the age, in
    episodes, that the restored version had when the fall began.
    """

    held: int | None
    back: int | None
    episodes: int | None
    older: int


def find_fall(case: Fall, run: int) -> FoundFall:
    line = Line(case.level, case.per_update, f"{case} {run}")
    line.live(2_000 + Random(run).randrange(2_000))
    fallen, times, holds = len(line.means), len(line.rolled_back), len(line.held)
    line.step = lambda new: -case.drop * (new == fallen)
    line.live(SECOND, lambda: fallen in line.means)
    began, own, held = line.now, 0, None
    while len(line.rolled_back) == times and line.now < began + 3_000:
        control, since = line.control, line.behind[1]
        line.live(1)
        own += line.was_new
        if held is None and len(line.held) > holds:
            held = own
    if len(line.rolled_back) == times:
        return FoundFall(held, None, None, 0)
    assert line.means[control] == case.level
    return FoundFall(held, own, line.now - began, since - (line.now - began))


def watch_steady_line(pace: int, run: int) -> tuple[float, list[tuple[int, int]], int]:
    """Simulate a line of equal versions; return weeks, roll-backs, and number of holds."""
    level, weeks = (0.5, 0.9)[run % 2], max(WEEK, 60_000 // pace) / WEEK
    line = Line(level, PER_UPDATE[run // 2 % 2], f"{pace} {run}", round(pace / 144))
    line.live(round(weeks * WEEK * pace))
    return weeks, line.rolled_back, len(line.held)


def measure_lines(pool: Executor, runs: int) -> tuple[list[Rows], list[Bar]]:
    tables, bars = [], list[Bar]()
    rows, worst = [], 0.0
    for per_update in PER_UPDATE:
        for pace in PACES:
            # `reward_delay_s` is ten minutes, a 144th of a day.
            ended = simulate_all(
                pool, watch_learning_line, Learning(per_update, round(pace / 144)), runs
            )
            behind = [one for all_, _ in ended for one in all_]
            far = fmean(v > OLDEST and episodes > MOST_BEHIND for v, episodes in behind)
            worst = max(worst, far)
            own = [percentile([one[at] for one in behind], NEARLY_ALL) for at in (0, 1)]
            rows.append([number(per_update), number(pace), *map(number, own), f"{far:.3f}"])
    heads = ["episodes to an update", "episodes a day", "versions behind", "episodes behind"]
    tables.append(
        Rows(
            f"A line that learns {LEARNS} in 1,000 episodes: its control, nine times of ten",
            [*heads, f"of the time over {OLDEST} versions and {MOST_BEHIND:,} episodes"],
            rows,
        )
    )
    bars.append(
        Bar(
            f"learning: time with the control over {OLDEST} versions and {MOST_BEHIND:,} behind",
            worst,
            1 - NEARLY_ALL,
        )
    )
    rows, held, back, day, old = [], 0.0, 0.0, 0.0, 0.0
    never = float("inf")
    for per_update in PER_UPDATE:
        for level, drop in FALLS:
            found = simulate_all(pool, find_fall, Fall(per_update, level, drop), 4 * runs)
            kinds = [
                [never if one.held is None else one.held for one in found],
                [never if one.back is None else one.back for one in found],
                [never if one.episodes is None else one.episodes for one in found],
                [one.older + (one.episodes or 0) for one in found],
            ]
            rows.append([number(per_update), f"{level} − {drop}"])
            for values in kinds:
                middle, most = (percentile(values, share) for share in (0.5, NEARLY_ALL))
                rows[-1].append(f"{_format_count(middle)} ({_format_count(most)})")
            most_of = [percentile(values, NEARLY_ALL) for values in kinds]
            if drop >= LARGE:
                held, back = max(held, most_of[0]), max(back, most_of[1])
            else:
                day, old = max(day, most_of[2]), max(old, most_of[3])
    tables.append(
        Rows(
            "A fall: rewards of what fell until it is found, in the middle (nine times of ten)",
            [
                "episodes to an update",
                "mean",
                "training is held",
                "rolled back",
                "all episodes until then",
                "episodes since what serves then lost the traffic",
            ],
            rows,
        )
    )
    bars += [
        Bar(
            f"fall by {LARGE}: rewards until training is held, nine times of ten", held, HELD_WITHIN
        ),
        Bar(
            f"fall by {LARGE}: rewards until it is rolled back, nine times of ten",
            back,
            BACK_WITHIN,
        ),
        Bar(
            "fall from 0.9 by 0.2 at 1,000 a day: days until it is rolled back, nine times of ten",
            day / 1_000,
            1.0,
        ),
        Bar("the same: days to what serves then, nine times of ten", old / 1_000, 2.0),
    ]
    rows, often, oldest = [], 0.0, 0
    for pace in PACES:
        ended = simulate_all(
            pool, watch_steady_line, pace, max(4, runs // 5) if pace == SECOND else runs
        )
        weeks = sum(one for one, _, _ in ended)
        back_to = [behind for _, moves, _ in ended for behind in moves]
        holds = sum(one for _, _, one in ended) / weeks
        often = max(often, len(back_to) / weeks)
        oldest = max([oldest, *(v for v, episodes in back_to if episodes > MOST_BEHIND)])
        rows.append(
            [
                number(pace),
                f"{weeks:,.0f}",
                f"{len(back_to) / weeks:.3f}",
                number(max(back_to)[0]) if back_to else NONE,
                f"{holds:.2f}",
            ]
        )
    tables.append(
        Rows(
            "A line that stays as it is, at 0.5 or 0.9",
            [
                "episodes a day",
                "weeks",
                "roll-backs a week",
                "versions older at most",
                "holds a week",
            ],
            rows,
        )
    )
    bars += [
        Bar("as good: roll-backs a week, at the worst pace", often, 1.0),
        Bar(
            f"as good: versions a roll-back goes back, if {MOST_BEHIND:,} episodes", oldest, OLDEST
        ),
    ]
    return tables, bars


def _format_count(value: float) -> str:
    return NONE if value == float("inf") else number(value)


# Mistakes


class World(NamedTuple):
    """A kind of live traffic, and how two versions are compared in it.

    `mean` is the old version's mean reward in a family of tasks, at a place (0 to 1) in the run.
    `wrong` is the share of episodes with each guarded error; the new version's share is higher by
    `more`.
    """

    name: str
    mean: Callable[[int, float], float] = lambda _family, _place: 0.5
    episodes: int = 1_500
    families: int = 1
    shares: tuple[float, float] = (0.5, 0.5)
    watches: bool = False
    heavy: bool = False
    wrong: float | None = None
    more: float = 0.0


# Pareto-distributed rewards, cut at 1: the least reward, and the mean.
LEAST_HEAVY, HEAVY_MEAN = 0.02, 0.0982
WORLDS: Final = (
    World("trial: right or wrong, 0.5"),
    World("watch: 0.5, control 0.05", episodes=2_000, shares=(0.95, 0.05), watches=True),
    World("trial: 0.06", lambda _, __: 0.06),
    World("trial: drift, 0.2 to 0.8", lambda _, place: 0.2 + 0.6 * place),
    World("trial: 8 families, 0.1 to 0.9", lambda family, _: 0.1 + 0.1 * family, families=8),
    World("trial: heavy tail, most rewards below 0.04", heavy=True),
    World("trial: 0.3 wrong in each way, and 0.05 more", wrong=0.3, more=GUARD_MARGIN),
)
# The first worlds are simulated with all runs, the others with fewer.
PLAIN: Final = 2


class Claim(NamedTuple):
    """The case of a new version: its world (None: it is evaluated) and its effect."""

    world: int | None
    effect: float


def verdict(claim: Claim, run: int) -> str | None:
    """Return the first verdict on a new version, or None if there is none by the end."""
    random = Random(f"{claim} {run}")
    if claim.world is None:
        return _evaluated(claim.effect, random)
    world = WORLDS[claim.world]
    share, rest = world.shares
    comparison = Comparison(
        PublishOptions(), new_share=share, old_share=rest, watches=world.watches
    )
    for seen in range(world.episodes):
        is_new = random.random() < share
        comparison.add(is_new, _episode(world, claim.effect * is_new, is_new, seen, random))
        found = comparison.verdict
        # About an equal version, only the verdict `worse` is a mistake.
        if found and (found.kind == "worse" or claim.effect):
            return found.kind
    return None


def _episode(
    world: World, effect: float, is_new: bool, seen: int, random: Random
) -> ComparedEpisode:
    family = random.randrange(world.families)
    if world.heavy:
        is_lost = random.random() < -effect / HEAVY_MEAN
        reward = 0.0 if is_lost else LEAST_HEAVY * random.paretovariate(1)
        return ComparedEpisode(str(family), reward)
    mean = world.mean(family, seen / world.episodes) + effect
    reward = float(random.random() < mean)
    if world.wrong is None:
        return ComparedEpisode(str(family), reward)
    share = world.wrong + world.more * is_new
    failed, malformed, slow = (random.random() < share for _ in range(3))
    return ComparedEpisode(str(family), reward, failed, malformed, 3.0 if slow else 1.0)


def _evaluated(effect: float, random: Random) -> str | None:
    comparison = Comparison(PublishOptions())
    for task in range(TASKS):
        mean = BASE_MEAN + TASKS_DIFFER * random.uniform(-1, 1)
        made = [
            [ComparedEpisode(str(task), float(random.random() < one)) for _ in range(TRIES)]
            for one in (mean + effect, mean)
        ]
        comparison.add_pair(*made)
        if comparison.verdict is not None:
            return comparison.verdict.kind
    return None


def measure_mistakes(pool: Executor, runs: int) -> tuple[list[Rows], list[Bar]]:
    lines, shares, few = [], [], max(1, runs // 5)
    cases: list[tuple[int | None, str, int]]
    cases = [(None, f"evaluation: {TASKS} tasks, {TRIES} tries", runs)]
    for place, world in enumerate(WORLDS):
        cases.append((place, world.name, runs if place < PLAIN else few))
    for case, name, count in cases:
        equal, worse = (
            simulate_all(pool, verdict, Claim(case, effect), count)
            for effect in (0.0, -PublishOptions().margin)
        )
        own = (equal.count("worse") / count, worse.count("better") / count)
        shares.append(own)
        lines.append([name, number(count), *(f"{share:.3f}" for share in own)])
    heads = ["compared", "runs", "as good: called worse", "worse by the margin: called no worse"]
    bars = [
        Bar("as good, called worse: the worst world", max(one for one, _ in shares), MISTAKES),
        Bar("worse by the margin, called no worse", max(one for _, one in shares), MISTAKES),
    ]
    return [Rows("Mistakes", heads, lines)], bars


def simulate_all(
    pool: Executor, simulate: Callable[[Any, int], Any], case: Any, runs: int
) -> list[Any]:
    """Simulate a case `runs` times, in all processes, and return the results."""
    chunk = max(1, runs // 20)
    return list(pool.map(partial(simulate, case), range(runs), chunksize=chunk))


def draw() -> None:
    """Draw how an evaluation's bounds narrow, and how the control follows the serving version."""
    pyplot = plotting()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.8), dpi=150)
    for effect, colour in {0.1: "#0b7285", 0.0: "#868e96", -0.1: "#e8590c"}.items():
        random, points = numpy.random.default_rng(4), []
        comparison = DrawnComparison(PublishOptions())
        place = 2 * random.random(TASKS) - 1
        for one in place:
            own = BASE_MEAN + TASKS_DIFFER * one
            made = random.binomial(TRIES, [own + effect, own]) / TRIES
            comparison.add_block(Block(float(made[0] - made[1]), TRIES / 2, 1.0))
            figures = comparison.figures()
            points.append((figures.lower, figures.upper))
            if comparison.verdict is not None:
                break
        lower, upper = zip(*points, strict=True)
        at = range(1, len(points) + 1)
        label = f"{_signed(effect)}" if effect else "as good"
        left.fill_between(at, lower, upper, color=colour, alpha=0.25, linewidth=0, label=label)
        left.plot(at, lower, at, upper, color=colour, linewidth=1.2)
    left.axhline(0, color="#1f2933", linewidth=0.8)
    left.axhline(-PublishOptions().margin, color="#1f2933", linewidth=0.8, linestyle=":")
    left.set_ylim(-0.6, 0.6)
    left.set_xlabel("tasks, up to the verdict")
    left.set_ylabel("bounds of new − old", fontsize=9)
    left.legend(frameon=False, loc="upper right", title="the new version is")
    line = Line(FROM, PER_UPDATE[1], "drawn")
    bad = 7_000 // PER_UPDATE[1]
    line.step = lambda new: LEARNS * PER_UPDATE[1] / 1_000 if new != bad else -0.3
    means = []
    while line.now < 10_000:
        line.live(20)
        means.append((line.means[line.serving], line.means[line.control]))
    episodes = range(20, 20 * len(means) + 1, 20)
    right.plot(episodes, [one for one, _ in means], color="#0b7285", linewidth=1.6, label="serves")
    right.plot(episodes, [one for _, one in means], color="#e8590c", linewidth=1.2, label="control")
    right.set_xlabel(f"episodes, {PER_UPDATE[1]} to an update; one falls by 0.3")
    right.set_ylabel("mean reward", fontsize=9)
    right.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(PICTURE)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gate", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--runs", type=int, default=1_000, help="of each comparison (1000)")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}, {PICTURE.name}")
    options = parser.parse_args()
    console, tables, bars = Console(), [], []
    with ProcessPoolExecutor() as pool:
        for section, few in ((measure_decisions, 5), (measure_lines, 50), (measure_mistakes, 1)):
            own_tables, own_bars = section(pool, max(1, options.runs // few))
            for table in own_tables:
                console.print(table.rich())
            tables += own_tables
            bars += own_bars
        console.print(bars_table(bars).rich())
        if options.write:
            shown = [table for table in tables if table.title.startswith(SHOWN)]
            write_figures(PAGE, shown, bars, date.today().isoformat(), PICTURE.name)
            draw()
    return 0 if all(bar.holds for bar in bars) else 1


if __name__ == "__main__":
    sys.exit(main())
