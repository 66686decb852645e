"""Go on with the replays of all policies' candidates, beside the looks at what they came to.

A model server that is slow or away so keeps no policy from being judged: a look asks only what came
of a replay, which goes on between looks.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime

import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from pawl.judging.answers import Judge
from pawl.steward.evidence import key_of
from pawl.steward.replay.replaying import Replay
from pawl.steward.replay.verdict import Replayed, ReplayRule
from store.connection.availability import is_unavailable
from store.read.standing import Standing
from trainer.publishing.replicas import Replicas

log = structlog.get_logger()


class Replays:
    """Keep the replays of candidates: of each policy one at a time."""

    def __init__(self, replicas: Replicas, judge: Judge | None = None) -> None:
        """Store the model servers, and who scores answers; begin without a replay."""
        self._replicas = replicas
        self._judge = judge
        self._replays: dict[str, Replay] = {}
        # Why the last step of a policy's replay came to nothing, so that it is logged once.
        self._trouble: dict[str, str] = {}

    def verdict(
        self, candidate: Standing, serving: Standing, rule: ReplayRule, now: datetime
    ) -> Replayed | None:
        """Return what came of a candidate's replay beside what serves; None: it goes on.

        If there is none of these two it begins, in place of that of another candidate; and again,
        if the last could ask nothing some time before `now`.
        """
        name, key = candidate.version.name, key_of(candidate, serving)
        replay = self._replays.get(name)
        if replay is None or replay.key != key or replay.is_due_again(now):
            replay = self._replays[name] = Replay(candidate, serving, rule, self._judge)
        return replay.told(now)

    def forget(self, name: str) -> None:
        """Forget a policy's replay: it has no candidate any more, or that is tried."""
        self._replays.pop(name, None)
        self._trouble.pop(name, None)

    async def go_on(self, engine: AsyncEngine) -> bool:
        """Ask about the next few calls of each replay that goes on; return whether any came on.

        What fails in one hinders no other.
        """
        came_on = False
        for name, replay in list(self._replays.items()):
            if replay.verdict is not None:
                continue
            try:
                came_on |= await replay.step(engine, self._replicas)
            except Exception as error:
                self._note(name, error)
                continue
            self._trouble.pop(name, None)
        return came_on

    def _note(self, name: str, error: Exception) -> None:
        """Log why a policy's replay does not come on, once for as long as it stays so."""
        is_away = is_unavailable(error)
        trouble = "replay_waits_for_database" if is_away else "replay_fails"
        if self._trouble.get(name) != trouble:
            tell = log.warning if is_away else log.exception
            tell(trouble, policy=name, reason=f"{type(error).__name__}: {error}"[:200])
        self._trouble[name] = trouble

    @asynccontextmanager
    async def going_on(self, engine: AsyncEngine, poll_s: float) -> AsyncIterator[None]:
        """Go on with all replays until the context is left; pause only while none comes on."""

        async def follow() -> None:
            while True:
                if not await self.go_on(engine):
                    await asyncio.sleep(poll_s)

        following = asyncio.create_task(follow())
        try:
            yield
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
