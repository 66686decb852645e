"""Simulate what the rules of `[publish]` decide: how fast, how often wrongly, and what that costs.

Versions of known worth pass through the product's own comparison, for 30 days, by the rules of the
controller. docs/explanation/gate.md says what this shows. Ends with status 1 where a bar does not
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
from pawl.controller.comparison import GUARD_MARGIN, Comparison, Episode, canary_share
from pawl.controller.eprocess import Block, block_size
from trainer.recipes.recipe import PublishMode, PublishOptions

PAGE: Final = ROOT / "docs" / "explanation" / "gate.md"
PICTURE: Final = ROOT / "docs" / "images" / "gate.png"

DAYS: Final = 30
RATES: Final = (50, 300, 1_000, 10_000)
EFFECTS: Final = (-0.10, -0.05, 0.0, 0.05, 0.10)
# Mean reward of the base model, and between which a version's is.
BASE_MEAN, LEAST, MOST = 0.5, 0.05, 0.95
# Tasks of an evaluation (2,000 runs), tries of each by each version, and how far tasks differ.
TASKS, TRIES, TASKS_DIFFER = 250, 4, 0.4
# The bars: the share of wrong decisions; of those 0.10 better, promoted within so many tasks.
MISTAKES, SOON, FOUND = 0.05, 200, 0.8
HARMFUL: Final = -0.05
BAR_RATE: Final = 300


class Way(NamedTuple):
    """Name a way to bring versions to the traffic."""

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
# What each day's new version is better by than the one it was trained from, and how likely.
MIXES: Final[dict[str, dict[float, float]]] = {
    "all +0.05": {0.05: 1},
    "±0.10, 60:40": {0.1: 0.6, -0.1: 0.4},
    "±0.05, 55:45": {0.05: 0.55, -0.05: 0.45},
    "+0.02, 10 % −0.10": {0.02: 0.9, -0.1: 0.1},
    "±0.05, 30:70": {0.05: 0.3, -0.05: 0.7},
}


class DrawnComparison(Comparison):
    """Take in blocks that were drawn whole, of rewards of 0 or 1 in one family of tasks.

    Such a block says the same as its episodes do one by one, and takes a tenth of the time.
    """

    def add_block(self, block: Block) -> None:
        self._settle(block)
        self._judge()


class Live:
    """Compare two versions by live episodes, block after block."""

    def __init__(
        self, rule: PublishOptions, shares: tuple[float, float], *, begins: float, watches: bool
    ):
        self.comparison = DrawnComparison(
            rule, new_share=shares[0], old_share=shares[1], watches=watches
        )
        self.begins = self._last = begins
        self._size = block_size(*shares)

    def due(self, per_day: float, shares: tuple[float, float]) -> float:
        """Return the day on which the open block is complete."""
        return self._last + self._size / (per_day * sum(shares))

    def add(
        self, draw: Any, now: float, shares: tuple[float, float], means: Sequence[float]
    ) -> None:
        self._last = now
        new = int(draw(self._size, shares[0] / sum(shares)))
        old = self._size - new
        if new and old:
            difference = draw(new, means[0]) / new - draw(old, means[1]) / old
            self.comparison.add_block(Block(float(difference), new * old / self._size, 1.0))


class Version:
    """Hold what a version is worth, and whether it was shown to be no worse."""

    def __init__(self, mean: float, *, proven: bool = False) -> None:
        self.mean = min(max(mean, LEAST), MOST)
        self.proven = proven


class Policy:
    """Let a policy's versions come and go as the controller does (pawl/controller/deciding.py)."""

    def __init__(self, rule: PublishOptions, per_day: int, seed: str) -> None:
        self.serving = Version(BASE_MEAN, proven=True)
        self.by_day: list[float] = []
        # Of the first version: on which day, and after how many tasks, there was a decision.
        self.decided: tuple[float, int] | None = None
        self._rule, self._per_day = rule, per_day
        self._random = numpy.random.default_rng(list(seed.encode()))
        self._canary: Version | None = None
        # The newest version, which waits until the canary's trial ends.
        self._waiting: Version | None = None
        self._control: Version | None = None
        self._canary_share = self._control_share = 0.0
        self._watch: Live | None = None
        self._trial: Live | None = None
        self._now = 0.0

    def live(self, effects: Sequence[float]) -> "Policy":
        """Bring a version a day, trained from the newest one and better by its effect.

        After the last one it ends as soon as what serves is shown to be no worse than its control.
        """
        for day in range(DAYS):
            if day >= len(effects) and self._watch and self._watch.comparison.verdict:
                break
            if day < len(effects):
                head = self._waiting or self._canary or self.serving
                self._offer(Version(head.mean + effects[day]))
            self.by_day.append(self._until(day + 1))
        return self

    def _offer(self, version: Version) -> None:
        if self._rule.mode == "immediate":
            self._promote(version, self._rule.control_share)
        elif self._rule.mode == "evaluated":
            comparison = evaluate(self._rule, version.mean, self.serving.mean, self._random)
            self._end(version, comparison, self._rule.control_share)
        elif self._canary is not None:
            self._waiting = version
        else:
            self._canary, taken = version, self._control_share
            self._canary_share = canary_share(self._per_day / 24, self._rule, taken)
            self._trial = Live(self._rule, self._tried(), begins=self._now, watches=False)

    def _tried(self) -> tuple[float, float]:
        """Return the shares of the canary, and of what serves beside it."""
        return self._canary_share, 1 - self._canary_share - self._control_share

    def _watched(self) -> tuple[float, float]:
        """Return the shares of what serves, and of its control."""
        return 1 - self._canary_share - self._control_share, self._control_share

    def _until(self, end: float) -> float:
        """Live until a day ends, and return its mean reward."""
        total, begun = 0.0, self._now
        while self._now < end:
            to, over = end, end
            if self._watch is not None:
                to = min(to, self._watch.due(self._per_day, self._watched()))
            if self._trial is not None:
                over = self._trial.begins + self._rule.decide_within_h / 24
                to = min(to, self._trial.due(self._per_day, self._tried()))
                to = min(to, over) if over > self._now else to
            to = max(to, self._now)
            total += (to - self._now) * self._mean()
            self._now = to
            self._look(is_over=self._trial is not None and to >= over)
        return total / (end - begun)

    def _mean(self) -> float:
        """Return the mean reward of all episodes that begin now."""
        others = [(self._canary, self._canary_share), (self._control, self._control_share)]
        lead = sum(share * (one.mean - self.serving.mean) for one, share in others if one)
        return self.serving.mean + lead

    def _look(self, *, is_over: bool) -> None:
        """Add the blocks that are complete by now, and decide: the watch first, then the trial."""
        draw, serving, due = self._random.binomial, self.serving, self._now + 1e-9
        watch, trial = self._watch, self._trial
        if watch is not None and watch.due(self._per_day, self._watched()) <= due:
            assert self._control is not None
            watch.add(draw, self._now, self._watched(), (serving.mean, self._control.mean))
            self._judge(watch.comparison)
        if self._trial is None or trial is None or self._canary is None:
            return
        if trial.due(self._per_day, self._tried()) <= due:
            trial.add(draw, self._now, self._tried(), (self._canary.mean, serving.mean))
        comparison = trial.comparison
        if comparison.verdict or (is_over and comparison.difference is not None):
            canary, share = self._canary, self._canary_share
            waiting, verdict = self._no_canary(), comparison.verdict
            rule_share = self._rule.control_share
            self._end(canary, comparison, rule_share if verdict else max(share, rule_share))
            if waiting is not None and not (verdict and verdict.kind == "worse"):
                self._offer(waiting)

    def _judge(self, watched: Comparison) -> None:
        """Give the traffic back to the control, or note that what serves is proven."""
        is_unproven = self._rule.mode == "canary" and not self.serving.proven
        is_given_back = watched.verdict is None and is_unproven and watched.tells_against
        if watched.verdict is None and not is_given_back:
            return
        self._note(0)
        if is_given_back or (watched.verdict and watched.verdict.kind == "worse"):
            assert self._control is not None
            self.serving, self._control, self._watch = self._control, None, None
            self._control_share = 0.0
            if is_given_back and self._canary is not None:
                self._trial = Live(self._rule, self._tried(), begins=self._now, watches=False)
            else:
                self._no_canary()
        elif not self.serving.proven:
            self.serving.proven = True
            self._control_share = self._rule.control_share

    def _no_canary(self) -> Version | None:
        """End the trial, and return the version that waited for that."""
        waiting, self._waiting = self._waiting, None
        self._canary, self._trial, self._canary_share = None, None, 0.0
        return waiting

    def _note(self, tasks: int) -> None:
        self.decided = self.decided or (self._now, tasks)

    def _end(self, version: Version, comparison: Comparison, share: float) -> None:
        """Do what a trial, or an evaluation, came to."""
        self._note(comparison.blocks)
        verdict = comparison.verdict
        if verdict is None:
            is_kept_back = self._rule.undecided == "keep" or comparison.points_to_harm
        else:
            is_kept_back = verdict.kind == "worse"
        if not is_kept_back:
            version.proven = verdict is not None
            self._promote(version, share)

    def _promote(self, version: Version, share: float) -> None:
        """Give a version the traffic; its control is the last one with proof."""
        self._control_share = share
        if self._control is None or self.serving.proven:
            self._control = self.serving
            # Blocks are those of the rule's share, whatever share the control has for now.
            control = self._rule.control_share
            self._watch = Live(self._rule, (1 - control, control), begins=self._now, watches=True)
        elif self._watch is not None:
            self._watch.comparison.mark()
        self.serving = version


def evaluate(rule: PublishOptions, new: float, old: float, random: Any) -> Comparison:
    """Let two versions of these means try the same tasks, until a verdict or the budget's end."""
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
    """Say what became of the only version: when it was decided about, and whether it serves."""

    day: float
    tasks: int
    serves: bool


class One(NamedTuple):
    """Say which version comes, and how."""

    way: Way
    per_day: int
    effect: float


def one_version(one: One, run: int) -> Fate:
    policy = Policy(one.way.rule, one.per_day, f"{one} {run}")
    base = policy.serving
    policy.live([one.effect])
    day, tasks = policy.decided or (float("inf"), 0)
    return Fate(day, tasks, policy.serving is not base)


def decisions(pool: Executor, runs: int) -> tuple[list[Rows], list[Bar]]:
    lines, soon, harmful = [], 1.0, {}
    for way in WAYS:
        for per_day in RATES:
            line = [way.name, number(per_day)]
            for effect in EFFECTS:
                count = 5 * runs if effect == HARMFUL else runs
                fates = every(pool, one_version, One(way, per_day, effect), count)
                serve = fmean(fate.serves for fate in fates)
                line.append(f"{serve:.2f} ({_until(way, fates)})")
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


def _until(way: Way, fates: Sequence[Fate]) -> str:
    """Return the median of days, or of tasks, until something is decided about the version."""
    if way is EVALUATED:
        return number(percentile([fate.tasks for fate in fates], 0.5))
    middle = percentile([fate.day for fate in fates], 0.5)
    return NONE if middle > DAYS else f"{middle:.1f}"


def _signed(effect: float) -> str:
    return f"{effect:+.2f}".replace("-", "−") if effect else "0"


# A version a day


class Stream(NamedTuple):
    """Say which versions come, one a day, and how; without a way each serves at once, unwatched."""

    way: Way | None
    per_day: int
    mix: str


def stream(case: Stream, run: int) -> tuple[list[float], list[float]]:
    """Return the mean reward of each day, and that of an oracle which promotes the better alone."""
    mix = MIXES[case.mix]
    effects = Random(f"{case.mix} {run}").choices(list(mix), list(mix.values()), k=DAYS)
    best, oracle = BASE_MEAN, []
    for effect in effects:
        best = min(max(best, best + effect), MOST)
        oracle.append(best)
    rule = case.way.rule if case.way else PublishOptions(control_share=0)
    return Policy(rule, case.per_day, f"{case} {run}").live(effects).by_day, oracle


def streams(pool: Executor, runs: int) -> tuple[list[Rows], list[Bar]]:
    lines, gains = [], []
    ways: tuple[Way | None, ...] = (None, *WAYS)
    for mix, parts in MIXES.items():
        for per_day in RATES:
            count = max(1, runs // 6) if per_day == RATES[-1] else runs
            lost = []
            for way in ways:
                ended = every(pool, stream, Stream(way, per_day, mix), count)
                reward = fmean(fmean(days) for days, _ in ended)
                best = fmean(fmean(oracle) for _, oracle in ended)
                lost.append(best - reward)
                mean = sum(effect * share for effect, share in parts.items())
                if way is not None and mean > 0 and per_day == BAR_RATE:
                    gains.append(reward - BASE_MEAN)
            own = [f"{max(one, 0.0):.3f}" for one in (best - BASE_MEAN, *lost)]
            lines.append([mix, number(per_day), *own])
    heads = ["each day's version", "episodes a day", "never update", "always update"]
    heads += [way.name for way in WAYS]
    title = "A version a day: mean reward of 30 days, less than an oracle's by"
    name = f"more reward than without updates, at {BAR_RATE} a day: the least of modes and mixes"
    return [Rows(title, heads, lines)], [Bar(name, min(gains), 0.0, at_least=True)]


# Mistakes


class World(NamedTuple):
    """Say how live episodes are scored by the old version, and compared.

    `mean` is of a family of tasks, at a place (0 to 1) in the run. `wrong` is the share of episodes
    that go wrong in each way that is guarded; the new version's do so `more` often.
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


# Of Pareto's rewards, cut at 1: the least one, and their mean.
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
PLAIN: Final = 2


class Claim(NamedTuple):
    """Say which world a new version is in, and its effect; without a world it is evaluated."""

    world: int | None
    effect: float


def verdict(claim: Claim, run: int) -> str | None:
    """Return the verdict on a new version, looked at after each episode, or task; None: none."""
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
        # A watch goes on after "better", and the trial of an equal may have any verdict but worse.
        if found and (found.kind == "worse" or claim.effect):
            return found.kind
    return None


def _episode(world: World, effect: float, is_new: bool, seen: int, random: Random) -> Episode:
    family = random.randrange(world.families)
    if world.heavy:
        is_lost = random.random() < -effect / HEAVY_MEAN
        reward = 0.0 if is_lost else LEAST_HEAVY * random.paretovariate(1)
        return Episode(str(family), reward)
    mean = world.mean(family, seen / world.episodes) + effect
    reward = float(random.random() < mean)
    if world.wrong is None:
        return Episode(str(family), reward)
    share = world.wrong + world.more * is_new
    failed, malformed, slow = (random.random() < share for _ in range(3))
    return Episode(str(family), reward, failed, malformed, 3.0 if slow else 1.0)


def _evaluated(effect: float, random: Random) -> str | None:
    comparison = Comparison(PublishOptions())
    for task in range(TASKS):
        mean = BASE_MEAN + TASKS_DIFFER * random.uniform(-1, 1)
        made = [
            [Episode(str(task), float(random.random() < one)) for _ in range(TRIES)]
            for one in (mean + effect, mean)
        ]
        comparison.add_pair(*made)
        if comparison.verdict is not None:
            return comparison.verdict.kind
    return None


def mistakes(pool: Executor, runs: int) -> tuple[list[Rows], list[Bar]]:
    lines, shares, few = [], [], max(1, runs // 5)
    cases: list[tuple[int | None, str, int]]
    cases = [(None, f"evaluation: {TASKS} tasks, {TRIES} tries", runs)]
    for place, world in enumerate(WORLDS):
        cases.append((place, world.name, runs if place < PLAIN else few))
    for case, name, count in cases:
        equal, worse = (
            every(pool, verdict, Claim(case, effect), count)
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


def every(pool: Executor, simulate: Callable[[Any, int], Any], case: Any, runs: int) -> list[Any]:
    """Simulate so many runs, in all processes."""
    chunk = max(1, runs // 20)
    return list(pool.map(partial(simulate, case), range(runs), chunksize=chunk))


COLOURS: Final = ("#868e96", "#e8590c", "#0b7285", "#5f3dc4")
DRAWN_MIX: Final = "±0.10, 60:40"


def draw(pool: Executor, runs: int) -> None:
    """Draw how an evaluation's bounds close in, and the mean reward of each day."""
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
    lines: dict[str, Sequence[float]] = {}
    for way in (None, IMMEDIATE, EVALUATED, CANARY):
        ended = every(pool, stream, Stream(way, BAR_RATE, DRAWN_MIX), runs)
        lines["oracle"] = [fmean(days) for days in zip(*(one for _, one in ended), strict=True)]
        name = way.name if way else "always update"
        lines[name] = [fmean(days) for days in zip(*(one for one, _ in ended), strict=True)]
    right.plot(lines.pop("oracle"), color="#1f2933", linewidth=1, linestyle=":", label="oracle")
    for (name, days), colour in zip(lines.items(), COLOURS, strict=True):
        right.plot(days, color=colour, linewidth=1.6, label=name)
    right.axhline(BASE_MEAN, color="#1f2933", linewidth=0.8, label="never update")
    right.set_xlabel(f"day, {BAR_RATE} episodes each; a new version a day")
    right.set_ylabel(f"mean reward ({DRAWN_MIX})", fontsize=9)
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
        for section, few in ((decisions, 5), (streams, 25), (mistakes, 1)):
            own_tables, own_bars = section(pool, max(1, options.runs // few))
            for table in own_tables:
                console.print(table.rich())
            tables += own_tables
            bars += own_bars
        tables.append(bars_table(bars))
        console.print(tables[-1].rich())
        if options.write:
            write_figures(PAGE, tables, date.today().isoformat(), PICTURE.name)
            draw(pool, max(1, options.runs // 25))
    return 0 if all(bar.holds for bar in bars) else 1


if __name__ == "__main__":
    sys.exit(main())
