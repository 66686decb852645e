"""Simulate how often the gate errs, and how long it takes.

Canaries that are as good as what serves, worse by the margin, better and far worse, with the
product's own decisions, looked at after every episode; and versions that fall while they serve,
tried before or not. docs/explanation/gate.md says what this shows. Ends with status 1 where a bar
does not hold.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from datetime import date
from functools import partial
from random import Random
from statistics import NormalDist
from typing import Any, Final, NamedTuple

from rich.console import Console

from benchmarks.report import Bar, Rows, bars_table, number, percentile, plotting, write_figures
from benchmarks.stack import ROOT
from pawl.controller.gate.records import BASE, CANARY, SERVING, Episode, GateOptions
from pawl.controller.gate.trial import MARGIN as GUARD_MARGIN
from pawl.controller.gate.trial import Lead, Trial, joined
from pawl.controller.gate.watch import Succession, Watch
from store.records import Arm

PAGE: Final = ROOT / "docs" / "explanation" / "gate.md"
PICTURE: Final = ROOT / "docs" / "images" / "gate.png"
MARGIN: Final = GateOptions().margin
# The bar: the share of runs that may end by mistake.
MISTAKES: Final = 0.05
# How sure the fixed-horizon test is to find the effect that it was planned for.
POWER: Final = 0.8
# Effects, and the episodes after which a run without a verdict is given up.
EFFECTS: Final = {0.05: 30_000, 0.1: 12_000, 0.2: 6_000, -0.1: 12_000, -0.3: 4_000}
# By how much a canary is worse whose wrong answers are left unscored, and the episodes of a run.
HIDDEN_EFFECT, HIDDEN_EPISODES = -0.1, 4_000
# The share of episodes that call tools.
CALLING: Final = 0.5
# Versions that serve: their base's mean, how far they are above it, what the world does to both.
BASE_MEAN, ABOVE_BASE, SWING, SWINGS = 0.5, 0.2, 0.15, 3
SERVED, LINE = 20_000, 7_680
# Each version of a line is better than the one before by so much, up to `ABOVE_BASE`.
BETTER: Final = 0.01


class World(NamedTuple):
    """Say how episodes are scored by what serves; a canary's mean is another by an effect.

    `mean` is of a family of tasks, at a place (0 to 1) in the run. `wrong` is the share of episodes
    that go wrong in each way that is guarded, None if nothing is told of that; a canary's do so
    `more` often. `hides` is the share of its rewards of 0 that nobody gives.
    """

    name: str
    mean: Callable[[int, float], float]
    kind: str = "right or wrong"
    families: int = 1
    canary_share: float = 0.1
    wrong: float | None = None
    more: float = 0.0
    hides: float = 0.0


def _half(_family: int, _place: float) -> float:
    return 0.5


WORLDS: Final = (
    World("right or wrong, 0.05", lambda _, __: 0.05),
    World("right or wrong, 0.3", lambda _, __: 0.3),
    World("right or wrong, 0.5", _half),
    World("right or wrong, 0.95", lambda _, __: 0.95),
    World("even from 0.25 to 0.75", _half, "even"),
    World("heavy at both ends", lambda _, __: 0.4, "heavy"),
    World("8 families, 0.1 to 0.9", lambda family, _: 0.1 + 0.8 * family / 7, families=8),
    World("drift, 0.2 to 0.8", lambda _, place: 0.2 + 0.6 * place),
    World("half of it canary", _half, canary_share=0.5),
    World("0.5; 0.3 wrong in each way", _half, wrong=0.3),
    World("0.5; 0.3, and 0.05 more", _half, wrong=0.3, more=GUARD_MARGIN),
    *(World(f"{hides:.0%} of its wrong ones", _half, hides=hides) for hides in (0.3, 0.5, 0.8)),
)
# The last worlds leave a part of the canary's wrong answers unscored.
WITH_REWARDS: Final = len(WORLDS) - 3
EVEN_ODDS: Final = 2


class Fall(NamedTuple):
    """Describe versions that serve: the base's share, their fall, and what they were promoted on.

    That is `tried` episodes of all arms up to the verdict, and `later` that counted after it.
    """

    base_share: float
    fall: float
    tried: int = 3_000
    later: int = 0


FALLS: Final = (
    *(Fall(0.02, fall) for fall in (0.0, 0.3, 0.5)),
    *(Fall(0.05, 0.3), Fall(0.05, 0.5, 500), Fall(0.05, 0.0, 500, 2_500)),
    Fall(0.05, 0.5, 500, 2_500),
)
# Versions that follow each other untried: the base's share, their fall, and episodes of each.
UNTRIED: Final = (
    *((0.1, 0.0, 128), (0.1, 0.3, 128), (0.1, 0.5, 128)),
    *((0.05, 0.5, 128), (0.02, 0.5, 128), (0.1, 0.5, 16)),
)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gate", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--runs", type=int, default=1_000, help="of each world (1000)")
    parser.add_argument("--episodes", type=int, default=2_000, help="of each run (2000)")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}, {PICTURE.name}")
    options = parser.parse_args()
    console, tables, bars = Console(), [], []
    with ProcessPoolExecutor() as pool:
        for section in (mistakes, speed, hidden, rolled_back, untried):
            table, own = section(pool, options.runs, options.episodes)
            console.print(table.rich())
            tables.append(table)
            bars += own
    tables.append(bars_table(bars))
    console.print(tables[-1].rich())
    if options.write:
        write_figures(PAGE, tables, date.today().isoformat(), PICTURE.name)
        draw()
    return 0 if all(bar.holds for bar in bars) else 1


def every(pool: Executor, simulate: Callable[[Any, int], Any], case: Any, runs: int) -> list[Any]:
    """Simulate so many runs, in all processes."""
    chunk = max(1, runs // 20)
    return list(pool.map(partial(simulate, case), range(runs), chunksize=chunk))


class Trials(NamedTuple):
    """Say where canaries go through trials: world, effect, and the most episodes of a run."""

    world: int
    effect: float
    episodes: int


def trial(trials: Trials, run: int) -> tuple[str, int]:
    """Return a canary's verdict (`wait`: none), and after how many episodes it came."""
    world, (world_number, effect, count) = WORLDS[trials.world], trials
    random = Random(f"{world_number} {effect} {run}")
    judged = Trial(GateOptions(canary_share=world.canary_share, base_share=0.0))
    for seen in range(count):
        judged.extend([episode(world, effect, seen / count, random)])
        if judged.is_decided:
            return judged.decide(0.0).kind, seen + 1
    return "wait", count


def episode(world: World, effect: float, place: float, random: Random) -> Episode:
    """Draw an episode at a place (0 to 1) of a run, its arm as the hash draws it."""
    is_canary = random.random() < world.canary_share
    family = random.randrange(world.families)
    mean = world.mean(family, place) + effect * is_canary
    reward: float | None = float(random.random() < mean)
    if world.kind == "even":
        reward = mean + random.uniform(-0.25, 0.25)
    elif world.kind == "heavy" and random.random() < 0.1:
        reward = mean + random.uniform(-0.2, 0.2)
    arm: Arm = CANARY if is_canary else SERVING
    if world.hides:
        is_hidden = is_canary and not reward and random.random() < world.hides
        return Episode(arm, str(family), None if is_hidden else reward)
    if world.wrong is None:
        return Episode(arm, str(family), reward)
    share, drawn = world.wrong + world.more * is_canary, random.random()
    calls_tools = random.random() < CALLING
    return Episode(
        arm,
        str(family),
        # None fails and is unscored: it would count as the lowest reward, and change the effect.
        None if drawn >= 1 - share else reward,
        drawn < share,
        random.random() < share if calls_tools else None,
        random.random() < share if calls_tools else None,
        3.0 if random.random() < share else 1.0,
    )


def share_of(verdicts: Sequence[tuple[str, int]], kind: str) -> float:
    return sum(one == kind for one, _ in verdicts) / len(verdicts)


def episodes_to(verdicts: Sequence[tuple[str, int]]) -> list[int]:
    return [seen for kind, seen in verdicts if kind != "wait"]


def mistakes(pool: Executor, runs: int, episodes: int) -> tuple[Rows, list[Bar]]:
    lines, shares = [], []
    for world in range(WITH_REWARDS):
        equal = every(pool, trial, Trials(world, 0.0, episodes), runs)
        worse = every(pool, trial, Trials(world, -MARGIN, episodes), runs)
        shares.append((share_of(equal, "retire"), share_of(worse, "promote")))
        others = (share_of(equal, "promote"), share_of(worse, "retire"))
        own = [f"{share:.3f}" for share in (*shares[-1], *others)]
        lines.append([WORLDS[world].name, f"{runs:,}", *own])
    heads = ["rewards", "runs", "equal: **retired**", "worse: **promoted**"]
    heads += ["equal: promoted", "worse: retired"]
    bars = [
        Bar("retired by mistake, in the worst world", max(one for one, _ in shares), MISTAKES),
        Bar("promoted by mistake, in the worst world", max(one for _, one in shares), MISTAKES),
    ]
    return Rows("Mistakes", heads, lines), bars


def speed(pool: Executor, runs: int, _: int) -> tuple[Rows, list[Bar]]:
    few, lines = max(1, runs // 5), []
    for effect, most in EFFECTS.items():
        verdicts = every(pool, trial, Trials(EVEN_ODDS, effect, most), few)
        middle, fixed = percentile(episodes_to(verdicts), 0.5), fixed_horizon(effect)
        lines.append(
            [
                *(f"{effect:+.2f}", f"{few:,}"),
                *(f"{share_of(verdicts, kind):.3f}" for kind in ("promote", "retire")),
                *(number(middle), number(percentile(episodes_to(verdicts), 0.9))),
                *(number(fixed), number(middle / fixed, 2)),
            ]
        )
    heads = ["effect", "runs", "promoted", "retired", "episodes, median", "nine of ten"]
    heads += ["fixed horizon", "median in times of it"]
    return Rows("Episodes to a verdict", heads, lines), []


def fixed_horizon(effect: float) -> float:
    """Return the episodes that a test with one look, planned for this effect, needs.

    Normal approximation, one-sided, at the gate's level: of "worse by the margin" if the effect is
    not below 0, else of "as good".
    """
    options, normal = GateOptions(base_share=0.0), NormalDist()
    mean, share = 0.5 + effect, options.canary_share
    variance = mean * (1 - mean) / share + 0.25 / (1 - share)
    level = options.mistakes if effect >= 0 else options.mistakes / 2
    gap = effect + options.margin if effect >= 0 else -effect
    return variance * ((normal.inv_cdf(1 - level) + normal.inv_cdf(POWER)) / gap) ** 2


def hidden(pool: Executor, runs: int, _: int) -> tuple[Rows, list[Bar]]:
    few, lines, worst = max(1, runs // 5), [], 0.0
    for world in range(WITH_REWARDS, len(WORLDS)):
        verdicts = every(pool, trial, Trials(world, HIDDEN_EFFECT, HIDDEN_EPISODES), few)
        worst = max(worst, share_of(verdicts, "promote"))
        lines.append(
            [
                *(WORLDS[world].name, f"{few:,}"),
                *(f"{share_of(verdicts, kind):.3f}" for kind in ("promote", "retire")),
                *(number(percentile(episodes_to(verdicts), share)) for share in (0.5, 0.9)),
            ]
        )
    heads = ["unscored", "runs", "**promoted**", "retired", "episodes, median", "nine of ten"]
    bar = Bar("promoted though it is worse, as that goes unscored", worst, MISTAKES)
    return Rows("Wrong answers that nobody scores", heads, lines), [bar]


def swinging(place: int, count: int) -> float:
    """Return the base's mean at an episode: the world's mean swings for all."""
    phase = (place * SWINGS / count) % 1
    return BASE_MEAN + SWING * (2 * abs(2 * phase - 1) - 1)


def fall(version: Fall, run: int) -> int | None:
    """Return after how many episodes a version that serves is rolled back, from its fall on."""
    random, options = Random(f"{version} {run}"), GateOptions(base_share=version.base_share)

    def lead(count: int) -> Lead:
        own = Lead(options)
        for _ in range(count):
            drawn = random.random()
            if drawn < options.base_share:
                own.extend([Episode(BASE, "one", float(random.random() < BASE_MEAN))])
            elif drawn < options.base_share + options.canary_share:
                is_right = random.random() < BASE_MEAN + ABOVE_BASE
                own.extend([Episode(CANARY, "one", float(is_right))])
        return own

    reference = lead(version.tried).reference()
    if version.later:
        reference = joined(reference, lead(version.later).reference())
    watch, falls_at = Watch(reference, options), SERVED // 4 if version.fall else SERVED
    for seen in range(SERVED):
        arm: Arm = BASE if random.random() < options.base_share else SERVING
        above = ABOVE_BASE - version.fall * (seen >= falls_at) if arm == SERVING else 0.0
        is_right = random.random() < swinging(seen, SERVED) + above
        watch.extend([Episode(arm, "one", float(is_right))])
        if watch.has_fallen:
            return seen - falls_at
    return None


def rolled_back(pool: Executor, runs: int, _: int) -> tuple[Rows, list[Bar]]:
    few, lines, healthy = max(1, runs // 50), [], []
    for one in FALLS:
        ends = [end for end in every(pool, fall, one, few) if end is not None]
        after = [end for end in ends if end >= 0]
        early = len(ends) - len(after)
        healthy += [] if one.fall else [early / few]
        lines.append(
            [
                f"{one.base_share:.0%}",
                f"{one.tried:,}" + (f" + {one.later:,}" if one.later else ""),
                f"−{one.fall:.1f}" if one.fall else "none",
                *(str(few), str(early), str(len(after))),
                *(number(percentile(after, share)) for share in (0.5, 0.9)),
            ]
        )
    heads = ["base share", "canary for", "fall", "runs", "by mistake", "found"]
    heads += ["episodes after it, median", "nine of ten"]
    bar = Bar("rolled back by mistake", max(healthy), MISTAKES)
    return Rows("Roll-back", heads, lines), [bar]


def line(case: tuple[float, float, int], run: int) -> tuple[int, int] | None:
    """Let versions serve one after the other, untried; those from the middle on are worse.

    Return after how many episodes from the fall something is rolled back, and how many versions
    from before the fall are: fewer than none if what serves again is from after it.
    """
    base_share, drop, each = case
    versions, random = LINE // each, Random(f"{case} {run}")
    falls_with = versions // 2 + 1 if drop else versions + 1
    succession = Succession(GateOptions(base_share=base_share), after_base=True)
    for version in range(1, versions + 1):
        succession.follow(version)
    for seen in range(versions * each):
        version, mean = 1 + seen // each, swinging(seen, versions * each)
        above = min(BETTER * version, ABOVE_BASE) - drop * (version >= falls_with)
        if random.random() < base_share:
            drawn = Episode(BASE, "one", float(random.random() < mean))
        else:
            is_right = random.random() < mean + above
            drawn = Episode(SERVING, "one", float(is_right), version=version)
        succession.extend([drawn])
        if succession.has_fallen:
            return seen - (falls_with - 1) * each, falls_with - (succession.watched().since or 0)
    return None


def untried(pool: Executor, runs: int, _: int) -> tuple[Rows, list[Bar]]:
    few, lines, early_shares = max(1, runs // 100), [], []
    for one in UNTRIED:
        base_share, drop, each = one
        ends = [end for end in every(pool, line, one, few) if end is not None]
        after = [(seen, lost) for seen, lost in ends if seen >= 0]
        early, healthy = len(ends) - len(after), LINE // each // (2 if drop else 1)
        early_shares.append(early / (few * healthy))
        seen = [one for one, _ in after]
        lines.append(
            [
                *(f"{base_share:.0%}", str(each), f"−{drop:.1f}" if drop else "none"),
                *(str(few), str(early), str(len(after))),
                *(number(percentile(seen, share)) for share in (0.5, 0.9)),
                number(percentile([max(lost, 0) for _, lost in after], 0.5)),
                str(sum(lost < 0 for _, lost in after)),
            ]
        )
    heads = ["base share", "episodes a version", "fall", "runs", "by mistake", "found"]
    heads += ["episodes after it, median", "nine of ten", "good versions lost, median"]
    bar = Bar("untried versions rolled back by mistake", max(early_shares), MISTAKES)
    return Rows("Roll-back without trials", [*heads, "not far enough"], lines), [bar]


def draw() -> None:
    """Draw how the bounds of the difference close in, for three canaries."""
    pyplot = plotting()
    figure, axes = pyplot.subplots(figsize=(8, 3.8), dpi=150)
    for effect, colour in {0.1: "#0b7285", 0.0: "#868e96", -0.1: "#e8590c"}.items():
        random, points = Random(f"picture {effect}"), []
        judged = Trial(GateOptions(base_share=0.0))
        for seen in range(6_000):
            judged.extend([episode(WORLDS[EVEN_ODDS], effect, 0.0, random)])
            if seen % 100 == 0 or judged.is_decided:
                decision = judged.decide(0.0)
                points.append((seen, decision.lower, decision.upper))
            if judged.is_decided:
                break
        at, lower, upper = zip(*points, strict=True)
        label = f"{effect:+.1f}" if effect else "as good"
        axes.fill_between(at, lower, upper, color=colour, alpha=0.25, linewidth=0, label=label)
        axes.plot(at, lower, at, upper, color=colour, linewidth=1.2)
    axes.axhline(0, color="#1f2933", linewidth=0.8)
    axes.axhline(-MARGIN, color="#1f2933", linewidth=0.8, linestyle=":")
    axes.set_ylim(-0.6, 0.6)
    axes.set_xlabel("episodes of all arms, up to the verdict")
    axes.set_ylabel("bounds of canary − serving", fontsize=9)
    axes.legend(frameon=False, loc="upper right", title="the canary is")
    figure.tight_layout()
    figure.savefig(PICTURE)


if __name__ == "__main__":
    sys.exit(main())
