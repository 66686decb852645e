"""Have a candidate answer recorded calls before any user meets it, beside what serves.

A few calls are asked about at once, so that users' requests are not slowed. What was answered is in
memory alone: a controller that is started again begins again, with the same calls and seeds.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Final
from uuid import UUID

import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from pawl.controller.evidence import key_of
from pawl.controller.gate.replay import (
    AGAIN,
    TRIES,
    Answer,
    Replayed,
    ReplayRule,
    is_malformed,
    offered_tools,
    verdict,
)
from store.database import is_unavailable
from store.read.gates import Standing
from store.read.replayed import Chosen, ReplayedCall, chosen_calls, replayed_calls
from trainer.errors import PublishError, UpstreamAway
from trainer.publishing.model_server import ModelServer, Replicas

log = structlog.get_logger()


class Refused(Exception):
    """Say that the candidate was refused an answer, and what serves was not."""


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

    def __init__(self, candidate: Standing, serving: Standing, rule: ReplayRule) -> None:
        """Begin without a call."""
        self.key = key_of(candidate, serving)
        self.verdict: Replayed | None = None
        self._candidate = candidate.version
        self._serving = serving.version
        self._since = candidate.since
        self._rule = rule
        self._waiting: list[Chosen] | None = None
        self._answers: list[Answer] = []
        self._left_out = 0
        self._why_left_out: str | None = None
        self._ended_at: datetime | None = None
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
            async with asyncio.timeout(READ_S), engine.connect() as connection:
                calls = await replayed_calls(connection, [one.call for one in batch])
            asked = [self._ask(server, one, calls.get(one.call)) for one in batch]
            ended = await asyncio.gather(*asked)
            done = {one.call for one, has_ended in zip(batch, ended, strict=True) if has_ended}
        self._waiting = [one for one in self._waiting if one.call not in done]
        if not self._waiting:
            self._end()
        return bool(done) or not batch

    def _end(self) -> None:
        """Come to the verdict, and log it."""
        self.verdict = verdict(self._answers, self._left_out, self._rule, self._why_left_out)
        name = self._candidate.served_name
        if self.verdict.why_waits is None:
            log.info("replay_ended", version=name, why_not=self.verdict.why_not)
        else:
            log.warning("replay_asked_nothing", version=name, reason=self.verdict.why_waits)

    def result(self, now: datetime) -> Replayed | None:
        """Return the verdict, or None for now; note when it was first asked for."""
        if self.verdict is not None and self._ended_at is None:
            self._ended_at = now
        return self.verdict

    def is_due_again(self, now: datetime) -> bool:
        """Return whether nothing could be asked, and it is time for another try."""
        if self.verdict is None or self.verdict.why_waits is None or self._ended_at is None:
            return False
        return now - self._ended_at >= AGAIN

    async def _chosen(self, engine: AsyncEngine) -> list[Chosen]:
        async with asyncio.timeout(READ_S), engine.connect() as connection:
            return await chosen_calls(
                connection,
                self._candidate,
                self._serving.version,
                self._since,
                self._rule.replay_states,
            )

    async def _server(self, replicas: Replicas) -> ModelServer | None:
        """Return a replica that has both versions, or None; those that did not answer come last."""
        wanted = {self._candidate.served_name, self._serving.served_name}
        for server in sorted(replicas.each, key=self._away.__contains__):
            try:
                if wanted <= (await server.models()).keys():
                    return server
            except UpstreamAway:
                self._away.add(server)
        if not self._waits:
            log.warning("replay_waits_for_server", version=self._candidate.served_name)
        self._waits = True
        return None

    async def _ask(self, server: ModelServer, chosen: Chosen, call: ReplayedCall | None) -> bool:
        """Ask about one call, and return whether it is done with."""
        if call is None:
            return self._leave_out("it was deleted meanwhile")
        try:
            async with asyncio.timeout(ANSWER_S):
                answer = await self._answer(server, chosen, call)
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
        self._answers.append(answer)
        return True

    async def _answer(self, server: ModelServer, chosen: Chosen, call: ReplayedCall) -> Answer:
        """Return what the candidate answers to a call, compared with what serves.

        Raises:
            Refused: the server refuses it of the candidate, and not of what serves.
            PublishError: it refuses it of both: the prompt may be too long.
            UpstreamAway: the server does not answer, or has lost one of them.
        """
        # Both sides have the same seed, and so has whoever asks again: the last bits of a UUIDv7
        # are random.
        prompt, seed = call.prompt_ids, chosen.call.int & 0x7FFFFFFF
        most, serving = self._rule.replay_tokens, self._serving.served_name
        try:
            own = await server.complete(self._candidate.served_name, prompt, most, seed)
        except PublishError as error:
            await server.complete(serving, prompt, most, seed)
            raise Refused(str(error)) from error
        scored = await server.last_logprobs(serving, prompt + own.ids, len(own.ids))
        malformed: tuple[bool | None, bool | None] = (None, None)
        if tools := offered_tools(call.request):
            other = await server.complete(serving, prompt, most, seed)
            malformed = (
                is_malformed(own.text, tools, is_whole=own.is_whole),
                is_malformed(other.text, tools, is_whole=other.is_whole),
            )
        return Answer(
            split=chosen.split, own=own.logprobs, serving=tuple(scored), malformed=malformed
        )

    def _failed(self, chosen: Chosen, error: Exception) -> bool:
        """Note that an answer failed, and return whether it did so too often to be waited for.

        Where what serves is answered and the candidate is not, that is the candidate's fault.
        """
        self._tries[chosen.call] += 1
        reason = f"{type(error).__name__}: {error}"[:200]
        log.warning(
            "replay_answer_failed",
            version=self._candidate.served_name,
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


class Replays:
    """Keep the replays of candidates: of each policy one at a time."""

    def __init__(self, replicas: Replicas) -> None:
        """Store the model servers; begin without a replay."""
        self._replicas = replicas
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
            replay = self._replays[name] = Replay(candidate, serving, rule)
        return replay.result(now)

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
