"""Have one candidate answer recorded calls, a few at a time, beside what serves.

A few calls are asked about at once, so that users' requests are not slowed. What was answered is in
memory alone: a steward that is started again begins again, with the same calls and seeds.
"""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any, Final
from uuid import UUID

import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from pawl.steward.evidence import key_of
from pawl.steward.replay.verdict import AGAIN, TRIES, Answer, Replayed, ReplayRule, verdict
from store.database import is_unavailable
from store.read.replayed import Chosen, ReplayedCall, chosen_calls, replayed_calls
from store.read.standing import Standing
from store.records import Record
from trainer.errors import PublishError, UpstreamAway
from trainer.publishing.model_server import Completion, ModelServer, Replicas

log = structlog.get_logger()


# What a tool's arguments must be, by the tool's name: a JSON schema, or None for any object.
Tools = Mapping[str, Mapping[str, Any] | None]


class Refused(Exception):
    """Say that the candidate was refused an answer, and what serves was not."""


class Pair(Record, frozen=True, kw_only=True):
    """Name what is compared, as the model server does, and how long an answer may be, in tokens."""

    candidate: str
    serving: str
    tokens: int


async def answer(server: ModelServer, pair: Pair, chosen: Chosen, call: ReplayedCall) -> Answer:
    """Return what the candidate answers to a call, compared with what serves.

    Raises:
        Refused: the server refuses it of the candidate, and not of what serves.
        PublishError: it refuses it of both: the prompt may be too long.
        UpstreamAway: the server does not answer, or has lost one of them.
    """
    tools = offered_tools(call.request)

    async def complete(name: str) -> Completion:
        return await server.complete(name, call.prompt_ids, pair.tokens, _seed(chosen.call))

    try:
        own = await complete(pair.candidate)
    except PublishError as error:
        await complete(pair.serving)
        raise Refused(str(error)) from error
    scored = await server.last_logprobs(pair.serving, call.prompt_ids + own.ids, len(own.ids))
    malformed: tuple[bool | None, bool | None] = (None, None)
    if tools:
        other = await complete(pair.serving)
        malformed = (_judged(own, tools), _judged(other, tools))
    return Answer(
        split=chosen.split,
        own=own.logprobs,
        serving=tuple(scored),
        malformed=malformed,
    )


def _judged(completion: Completion, tools: Tools) -> bool | None:
    return is_malformed(completion.text, tools, is_whole=completion.is_whole)


def _seed(call: UUID) -> int:
    """Return the seed of a call's answers: both sides have the same, and so has whoever asks again.

    The last bits of a UUIDv7 are random.
    """
    return call.int & 0x7FFFFFFF


BEGIN: Final = "<tool_call>"
END: Final = "</tool_call>"
# Keys under which a call has its arguments.
_ARGUMENTS: Final = ("arguments", "parameters")
_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def offered_tools(request: bytes | None) -> Tools:
    """Return the tools that a request of any wire format offers, by name."""
    tools = _object(request or b"{}").get("tools")
    schemas: dict[str, Mapping[str, Any] | None] = {}
    for tool in tools if isinstance(tools, list) else []:
        if not isinstance(tool, dict):
            continue
        function = tool.get("function")
        own = function if isinstance(function, dict) else tool
        schema = own.get("parameters", own.get("input_schema"))
        if isinstance(own.get("name"), str):
            schemas[own["name"]] = schema if isinstance(schema, dict) else None
    return schemas


def _object(text: str | bytes) -> dict[str, Any]:
    """Return a JSON object; what is none, or is nested too deep, as an empty one."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def is_malformed(text: str, tools: Tools, *, is_whole: bool) -> bool | None:
    """Return whether a call in `text` cannot be executed; None: it has none that can be judged.

    A call must be JSON, of a tool that was offered, with the arguments that it requires, of the
    types that its schema names. What was cut off (not `is_whole`) in the middle of a call is not
    judged for that.
    """
    calls = _calls(text, is_whole=is_whole)
    if not tools or not calls:
        return None
    return not all(_fits(call, tools) for call in calls)


def _calls(text: str, *, is_whole: bool) -> list[str]:
    """Return the text of each call."""
    if BEGIN in text:
        _, *parts = text.split(BEGIN)
        closed = [part.partition(END) for part in parts]
        return [call for call, end, _ in closed if end or is_whole]
    stripped = text.strip().removeprefix("<|python_tag|>")
    looks_so = stripped.startswith("{") and '"name"' in stripped
    return [stripped] if looks_so and is_whole else []


def _fits(call: str, tools: Tools) -> bool:
    fields = _object(call)
    name = fields.get("name")
    if not isinstance(name, str) or name not in tools:
        return False
    arguments: object = next((fields[key] for key in _ARGUMENTS if key in fields), {})
    if not isinstance(arguments, dict):
        return False
    schema = tools[name] or {}
    required = schema.get("required")
    if isinstance(required, list) and not set(map(str, required)) <= arguments.keys():
        return False
    properties = schema.get("properties")
    types = properties if isinstance(properties, dict) else {}
    return all(_is_of(value, types.get(key)) for key, value in arguments.items())


def _is_of(value: object, schema: object) -> bool:
    """Return whether a value has the type that its schema names, if it names one that is known."""
    named = schema.get("type") if isinstance(schema, dict) else None
    kinds = _TYPES.get(named) if isinstance(named, str) else None
    if kinds is None:
        return True
    return isinstance(value, kinds) and (named == "boolean" or not isinstance(value, bool))


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
        self._candidate = candidate
        self._serving = serving.version
        self._rule = rule
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
                compared = await answer(server, self._pair, chosen, call)
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
