"""Export the mean reward of each policy version's evaluation episodes as metrics."""

import asyncio
from collections.abc import Callable
from time import perf_counter
from typing import Final

import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from proxy.metrics import EVAL_EPISODES, EVAL_REWARD
from store.connection.availability import is_unavailable
from store.read.evaluations import Evaluation, evaluations

log = structlog.get_logger()

LOOK_S: Final = 2.0
# The pause after a look is at least this many times as long as the look, so that very many
# episodes of evaluation do not keep the database busy.
LOOK_SHARE: Final = 20


async def show_evaluations(connect: Callable[[], AsyncEngine | None]) -> None:
    """Bring the metrics up to date every `LOOK_S` seconds, until cancelled."""
    while True:
        began = perf_counter()
        try:
            engine = connect()
            if engine is not None:
                async with engine.connect() as connection:
                    show(await evaluations(connection))
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
