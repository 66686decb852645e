"""Have one candidate answer recorded calls, a few at a time, beside what serves.

A few calls are asked about at once, so that users' requests are not slowed. What was answered is in
memory alone: a steward that is started again begins again, with the same calls and seeds.
"""

import asyncio
from collections import Counter
from datetime import datetime
from typing import Final
from uuid import UUID

import msgspec
import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from pawl.judging.answers import Judge
from pawl.steward.evidence import key_of
from pawl.steward.replay.asking import Pair, Refused, answer
from pawl.steward.replay.judging import rewards
from pawl.steward.replay.verdict import AGAIN, TRIES, Answer, Replayed, ReplayRule, verdict
from store.read.replayed import Chosen, ReplayedCall, chosen_calls, replayed_calls
from store.read.standing import Standing
from trainer.errors import PublishError, UpstreamAway
from trainer.publishing.replicas import Replicas
from trainer.publishing.server import ModelServer

log = structlog.get_logger()

# Calls that are asked about at once.
AT_ONCE: Final = 4
# An answer that takes longer is given up.
ANSWER_S: Final = 60.0
# So is a reading of the database.
READ_S: Final = 60.0


class Replay:
    """Replay one candidate beside what serves.

    Attributes:
        key: what it is about: with another key another replay begins.
        verdict: what came of it; None until all calls are answered.
    """

    def __init__(
        self,
        candidate: Standing,
        serving: Standing,
        rule: ReplayRule,
        judge: Judge | None = None,
    ) -> None:
        """Begin without a call; `judge` scores what is all of an episode, if there is one."""
        self.key = key_of(candidate, serving)
        self.verdict: Replayed | None = None
        self._candidate = candidate
        self._serving = serving.version
        self._rule = rule
        self._judge = judge
        self._pair = Pair(
            candidate=candidate.version.served_name,
            serving=serving.version.served_name,
            tokens=rule.replay_tokens,
        )
        self._waiting: list[Chosen] | None = None
        self._answers: list[Answer] = []
        self._left_out = 0
        self._why_left_out: str | None = None
        self._told_at: datetime | None = None
        self._tries: Counter[UUID] = Counter()
        self._away: set[ModelServer] = set()
        self._waits = False

    async def step(self, engine: AsyncEngine, replicas: Replicas) -> bool:
        """Ask about the next few calls; after the last, come to the verdict.

        Return False if there was no replica that answers and has both versions, or none was left
        meanwhile: the calls wait.

        Raises:
            Exception: the database is away.
        """
        if self._waiting is None:
            self._waiting = await self._chosen(engine)
        batch = self._waiting[:AT_ONCE]
        done: set[UUID] = set()
        if batch:
            server = await self._server(replicas)
            if server is None:
                return False
            calls = await self._read(engine, batch)
            came = [self._ask(server, one, calls.get(one.call)) for one in batch]
            ended = await asyncio.gather(*came)
            done = {one.call for one, has_ended in zip(batch, ended, strict=True) if has_ended}
        self._waiting = [one for one in self._waiting if one.call not in done]
        if not self._waiting:
            self._end()
        return bool(done) or not batch

    def _end(self) -> None:
        """Come to the verdict, and log it."""
        found = verdict(self._answers, self._left_out, self._rule, self._why_left_out)
        name = self._pair.candidate
        if found.why_waits is None:
            log.info("replay_ended", version=name, why_not=found.why_not)
        else:
            log.warning("replay_asked_nothing", version=name, reason=found.why_waits)
        self.verdict = found

    def told(self, now: datetime) -> Replayed | None:
        """Return what came of it, None until all calls are answered; it is told at `now`."""
        if self.verdict is not None and self._told_at is None:
            self._told_at = now
        return self.verdict

    def is_due_again(self, now: datetime) -> bool:
        """Return whether it could ask nothing, and another is to try that by now."""
        if self.verdict is None or self.verdict.why_waits is None or self._told_at is None:
            return False
        return now - self._told_at >= AGAIN

    async def _chosen(self, engine: AsyncEngine) -> list[Chosen]:
        async with asyncio.timeout(READ_S), engine.connect() as connection:
            return await chosen_calls(
                connection,
                self._candidate.version,
                self._serving.version,
                self._candidate.since,
                self._rule.replay_states,
            )

    async def _read(self, engine: AsyncEngine, batch: list[Chosen]) -> dict[UUID, ReplayedCall]:
        async with asyncio.timeout(READ_S), engine.connect() as connection:
            return await replayed_calls(connection, [one.call for one in batch])

    async def _server(self, replicas: Replicas) -> ModelServer | None:
        """Return a replica that has both versions, or None; those that did not answer come last."""
        wanted = {self._pair.candidate, self._pair.serving}
        for server in sorted(replicas.each, key=self._away.__contains__):
            try:
                if wanted <= (await server.models()).keys():
                    return server
            except UpstreamAway:
                self._away.add(server)
        if not self._waits:
            log.warning("replay_waits_for_server", version=self._pair.candidate)
        self._waits = True
        return None

    async def _ask(self, server: ModelServer, chosen: Chosen, call: ReplayedCall | None) -> bool:
        """Ask about one call, and return whether it is done with."""
        if call is None:
            return self._leave_out("it was deleted meanwhile")
        try:
            async with asyncio.timeout(ANSWER_S):
                compared, texts = await answer(
                    server, self._pair, chosen, call, is_judged=self._judge is not None
                )
        except UpstreamAway:
            self._away.add(server)
            return False
        except PublishError as error:
            log.info("replay_call_left_out", call=str(chosen.call), reason=str(error)[:200])
            return self._leave_out(str(error)[:200])
        except Exception as error:
            return self._failed(chosen, error)
        self._away.discard(server)
        self._waits = False
        if texts is not None and self._judge is not None:
            scored = await rewards(self._judge, call, texts, chosen.split)
            compared = msgspec.structs.replace(compared, rewards=scored)
        self._answers.append(compared)
        return True

    def _failed(self, chosen: Chosen, error: Exception) -> bool:
        """Note that an answer failed, and return whether it did so too often to be waited for.

        Where what serves is answered and the candidate is not, that is the candidate's fault.
        """
        self._tries[chosen.call] += 1
        reason = f"{type(error).__name__}: {error}"[:200]
        log.warning(
            "replay_answer_failed",
            version=self._pair.candidate,
            call=str(chosen.call),
            reason=reason,
        )
        if self._tries[chosen.call] < TRIES:
            return False
        if isinstance(error, Refused):
            self._answers.append(Answer(split=chosen.split, is_missing=True))
            return True
        return self._leave_out(reason)

    def _leave_out(self, why: str) -> bool:
        """Count a call that neither version can be asked about; return that it is done with.

        Which reason is told must not depend on which of several calls ended first.
        """
        self._left_out += 1
        self._why_left_out = min(self._why_left_out or why, why)
        return True
