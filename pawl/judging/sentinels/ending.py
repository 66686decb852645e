"""End a round of a judge's sentinels: write what it came to, and log whether the judge drifts."""

from collections.abc import Sequence
from typing import Final

import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from pawl.judging.sentinels.drift import Scores, can_show, drift
from store.judge.rounds import Round, RoundFigures, compared_in, end_round, watched
from store.judge.rounds import rounds as newest_rounds

log = structlog.get_logger()

DRIFTED: Final = "its scores become rewards: stop it, and see docs/howto/sentinels.md"
TOO_FEW: Final = (
    "too few sentinels could be compared for a drift to be shown: see `pawl sentinels list`; add "
    "some, and renew those that have changed"
)


async def end(engine: AsyncEngine, judge: str, number: int, evidence: float) -> Round:
    """Write what a round came to, and log it; a drift is logged when it begins and ends.

    The judge's name is as it is kept; from `evidence` on it has drifted.
    """
    async with engine.connect() as connection:
        compared = await compared_in(connection, judge, number)
    figures = figures_of([Scores(one.references, one.newest) for one in compared], evidence)
    async with engine.begin() as connection:
        before = await watched(connection, judge)
        await end_round(connection, judge, number, figures)
        [ended] = await newest_rounds(connection, judge, 1)
    _report(ended, drifted_before=before[0].drifted if before else None)
    return ended


def figures_of(compared: Sequence[Scores], evidence: float) -> RoundFigures:
    """Return what scores came to; whether the judge has drifted is null if they could not tell."""
    if not compared:
        return RoundFigures(compared=0)
    measured = drift(compared)
    return RoundFigures(
        compared=measured.compared,
        mean=measured.mean,
        mean_absolute=measured.mean_absolute,
        evidence=measured.evidence,
        drifted=measured.evidence >= evidence if can_show(compared, evidence) else None,
    )


def _report(ended: Round, *, drifted_before: bool | None) -> None:
    """Log what a round came to, against what the last one said that could tell."""
    figures = {
        name: getattr(ended, name)
        for name in ("round", "scored", "unscored", "changed", "gone", "compared")
    }
    judge, differences = ended.judge, {"mean": ended.mean, "mean_absolute": ended.mean_absolute}
    log.info("sentinels_scored", judge=judge, **figures, **differences)
    if ended.drifted and not drifted_before:
        log.error(
            "judge_drifted", judge=judge, evidence=ended.evidence, **differences, remedy=DRIFTED
        )
    elif drifted_before and ended.drifted is False:
        log.info("judge_as_before", judge=judge, evidence=ended.evidence)
    elif ended.drifted is None and (ended.compared or ended.changed or drifted_before is not None):
        log.warning(
            "sentinels_too_few",
            judge=judge,
            compared=ended.compared,
            known_to_have_drifted=drifted_before,
            remedy=TOO_FEW,
        )
