"""Show as metrics what only the database knows: rewards of evaluation, and judges that drift.

Evaluation is a curve over the versions of each policy. A judge's sentinels are scored by `pawl
judge`, which may be gone again when a round has ended: so its keeper shows what that came to.
"""

import asyncio
from collections.abc import Callable
from time import perf_counter
from typing import Final

import structlog
from prometheus_client import Gauge
from sqlalchemy.ext.asyncio import AsyncEngine

from proxy.counting.shared import forget
from proxy.metrics import (
    EVAL_EPISODES,
    EVAL_REWARD,
    JUDGE_DRIFTED,
    SENTINEL_DIFFERENCE,
    SENTINEL_EVIDENCE,
    SENTINEL_ROUND,
    SENTINEL_UNFINISHED,
    SENTINEL_UNSCORED,
    SENTINELS,
)
from store.connection.availability import is_unavailable
from store.judge.rounds import Round, Watched, watched
from store.read.evaluations import Evaluation, evaluations

log = structlog.get_logger()

LOOK_S: Final = 2.0
# The pause after a look is at least this many times as long as the look, so that very many
# episodes of evaluation do not keep the database busy.
LOOK_SHARE: Final = 20
# A tenant, and its judge.
Names = tuple[str, str]
# A gauge, and its labels after those.
Series = tuple[Gauge, *tuple[str, ...]]
OF_A_JUDGE: Final[tuple[Series, ...]] = (
    *((SENTINELS,), (JUDGE_DRIFTED,), (SENTINEL_UNFINISHED,), (SENTINEL_ROUND,)),
    *((SENTINEL_UNSCORED,), (SENTINEL_EVIDENCE,)),
    *((SENTINEL_DIFFERENCE, "mean"), (SENTINEL_DIFFERENCE, "mean_absolute")),
)


async def show_evaluations(connect: Callable[[], AsyncEngine | None]) -> None:
    """Bring the metrics up to date every `LOOK_S` seconds, until cancelled."""
    shown: set[Names] = set()
    while True:
        began = perf_counter()
        try:
            engine = connect()
            if engine is not None:
                async with engine.connect() as connection:
                    show(await evaluations(connection))
                    shown = show_judges(await watched(connection), shown)
        except Exception as error:
            # This task must not end: the metrics are brought up to date once the database answers.
            note = log.warning if is_unavailable(error) else log.exception
            note("evaluations_not_read", reason=type(error).__name__)
        await asyncio.sleep(max(LOOK_S, LOOK_SHARE * (perf_counter() - began)))


def show(curve: list[Evaluation]) -> None:
    """Set the metrics to a curve."""
    for point in curve:
        names = point.policy, str(point.version)
        EVAL_EPISODES.labels(*names).set(point.episodes)
        figures = {"mean": point.mean, "low": point.low, "high": point.high}
        for figure, value in figures.items():
            if value is not None:
                EVAL_REWARD.labels(*names, figure).set(value)


def show_judges(judges: list[Watched], before: set[Names]) -> set[Names]:
    """Set the metrics to what is known of judges by their sentinels; return these judges.

    What nobody knows is not shown, and nothing of those shown `before` that have no sentinels now.
    """
    figures = {(one.tenant, one.judge): _figures(one) for one in judges}
    for names in before | figures.keys():
        values = dict.fromkeys(OF_A_JUDGE) | figures.get(names, {})
        for (gauge, *labels), value in values.items():
            if value is None:
                forget(gauge, *names, *labels)
            else:
                gauge.labels(*names, *labels).set(value)
    return set(figures)


def _figures(one: Watched) -> dict[Series, float | None]:
    """Return the values of a judge's series, as far as they are known."""
    values: dict[Series, float | None] = {
        (SENTINELS,): one.sentinels,
        (JUDGE_DRIFTED,): one.drifted,
    }
    if one.unfinished_since is not None:
        values[SENTINEL_UNFINISHED,] = one.unfinished_since.timestamp()
    if one.last is not None:
        values |= {
            (SENTINEL_ROUND,): one.last.at.timestamp(),
            (SENTINEL_UNSCORED,): _share_unscored(one.last),
            (SENTINEL_DIFFERENCE, "mean"): one.last.mean,
            (SENTINEL_DIFFERENCE, "mean_absolute"): one.last.mean_absolute,
            (SENTINEL_EVIDENCE,): one.last.evidence,
        }
    return values


def _share_unscored(last: Round) -> float:
    """Return the share of a round's sentinels without a score; all, if there was none to ask."""
    number = last.scored + last.unscored + last.changed
    return 1 - last.scored / number if number else 1.0
