"""POST /feedback: durable before the 2xx, with or without the database, in any order.

If all targets are known, the status is 200 (`stored`). A target that is not known yet gives 202
(`pending`) and is matched when it arrives.

A body that is repeated under its `Idempotency-Key` adds nothing. The key is reserved in this
worker's memory, before anything is awaited, and then on this machine, by a symbolic link to the
body's hash. Another body under the same key is refused if the memory or the link has the key, or if
the database has it and answers in time. A repeat is recorded again unless it is known to be
durable; the database then counts it once.
"""

import asyncio
import os
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from pathlib import Path
from time import monotonic
from typing import Final

import msgspec
import structlog

from proxy.errors import KeyReused, SpoolFull
from proxy.feedback_body import parse_feedback
from proxy.http.exchange import Exchange
from proxy.http.wire import JSON
from proxy.intake import BudgetShare, Intake
from proxy.keys import Usage
from proxy.lookup import Lookup
from proxy.metrics import FEEDBACK, REWARD, REWARD_SUM, TOOL_STATUS
from proxy.spool.recorder import Recorder
from proxy.spool.segments import CapturedCall
from store.questions import known_targets, stored_bodies
from store.records import REWARD as REWARD_METRIC
from store.records import FeedbackRecord
from store.tenants import bare, name_in_same_tenant

log = structlog.get_logger()

KEYS_FOLDER: Final = "keys"
# Clients repeat within minutes; APIs with idempotency keys commonly promise a day.
KEEP_KEYS_S: Final = 86_400.0
# At most so many of the newest keys are kept: each link takes an inode.
MAX_KEYS: Final = 200_000


class KeyFiles:
    """Idempotency keys in use, as symbolic links below the spool directory."""

    def __init__(self, spool_dir: Path) -> None:
        """Use the folder `keys` of `spool_dir`, which is created with the first key."""
        self._folder = spool_dir / KEYS_FOLDER

    def reserve(self, key: str, body_hash: str) -> str | None:
        """Reserve a key for a body; return the body hash that it has already, None if it was free.

        A disk failure is logged, and the key counts as free: the database recognises repeats, too.
        """
        path = self._path(key)
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            os.symlink(body_hash, path)
        except FileExistsError:
            with suppress(OSError):
                return os.readlink(path)
        except OSError as error:
            log.error("idempotency_key_not_kept", reason=str(error))
        return None

    def free(self, key: str) -> None:
        """Free a key whose body was not recorded; a disk failure is logged."""
        try:
            self._path(key).unlink(missing_ok=True)
        except OSError as error:
            log.error("idempotency_key_not_freed", reason=str(error))

    def delete_old(self, now: float | None = None) -> int:
        """Delete keys older than a day, and all but the newest `MAX_KEYS`; return how many.

        `now` is Unix time in seconds, by default the present.
        """
        links: list[tuple[float, str]] = []
        with suppress(FileNotFoundError), os.scandir(self._folder) as entries:
            for entry in entries:
                # Another process may delete keys at the same time.
                with suppress(FileNotFoundError):
                    links.append((entry.stat(follow_symlinks=False).st_mtime, entry.path))
        links.sort(reverse=True)
        oldest = (time.time() if now is None else now) - KEEP_KEYS_S
        old = [path for number, (at, path) in enumerate(links) if number >= MAX_KEYS or at < oldest]
        for path in old:
            with suppress(FileNotFoundError):
                os.unlink(path)
        return len(old)

    def _path(self, key: str) -> Path:
        return self._folder / sha256(key.encode()).hexdigest()


# Keys that a worker remembers.
MAX_REMEMBERED: Final = 20_000
# Feedback is durable without the database, so it waits for a slow or absent one only briefly.
LOOK_UP_S: Final = 0.25


class FeedbackAnswer(msgspec.Struct, frozen=True):
    """HTTP status and JSON body of the reply to a client."""

    status: int
    body: bytes


# Records a body unless the argument says that it is known to be durable, and returns the answer.
RecordBody = Callable[[bool], Awaitable[FeedbackAnswer]]


class _Running(msgspec.Struct):
    """A body that is being recorded; `outcome` is its answer, or None if that failed."""

    body_hash: str
    outcome: "asyncio.Future[FeedbackAnswer | None]"


class IdempotencyStore:
    """Recognise repeated idempotency keys by memory, the machine's files and the database."""

    def __init__(self, files: KeyFiles, lookup: Lookup) -> None:
        """Begin with no key in memory; look keys up in `files` and by `lookup`."""
        self._files = files
        # By key, for the newest keys: the hash of the body that it was last used for.
        self._body_hashes: OrderedDict[str, str] = OrderedDict()
        self._lookup = lookup
        self._running: dict[str, _Running] = {}

    async def answer_once(
        self, key: str, body_hash: str, record_body: RecordBody
    ) -> FeedbackAnswer:
        """Answer a request that has an idempotency key; concurrent repeats get the same answer.

        Raises:
            KeyReused: the key was used for another body.
            SpoolFull: `record_body` could not make the body durable; the key is free again.
        """
        while (running := self._running.get(key)) is not None:
            # Shielded: a waiting request that is cancelled must not cancel the shared outcome.
            answer = await asyncio.shield(running.outcome)
            if answer is not None and running.body_hash != body_hash:
                raise _reused(key)
            if answer is not None:
                return answer
        outcome = asyncio.get_running_loop().create_future()
        self._running[key] = _Running(body_hash, outcome)
        answer = None
        try:
            answer = await self._check_key_and_answer(key, body_hash, record_body)
        finally:
            del self._running[key]
            outcome.set_result(answer)
        return answer

    async def _check_key_and_answer(
        self, key: str, body_hash: str, record_body: RecordBody
    ) -> FeedbackAnswer:
        remembered_hash = self._body_hashes.get(key)
        if remembered_hash is not None:
            if remembered_hash != body_hash:
                raise _reused(key)
            return await record_body(True)
        linked_hash = await asyncio.to_thread(self._files.reserve, key, body_hash)
        if linked_hash is not None and linked_hash != body_hash:
            raise _reused(key)
        stored = await self._lookup.ask(
            lambda driver: stored_bodies(driver, key), within_s=LOOK_UP_S
        )
        if stored and body_hash not in stored:
            if linked_hash is None:
                await asyncio.to_thread(self._files.free, key)
            raise _reused(key)
        try:
            answer = await record_body(bool(stored))
        except SpoolFull:
            # Nothing was recorded, so the client may use the key again, for any body.
            if linked_hash is None:
                await asyncio.to_thread(self._files.free, key)
            raise
        self._body_hashes[key] = body_hash
        if len(self._body_hashes) > MAX_REMEMBERED:
            self._body_hashes.popitem(last=False)
        return answer


def _reused(key: str) -> KeyReused:
    return KeyReused(
        f"Idempotency-Key {bare(key)!r} was already used for another body. "
        "Use a new key for each body",
        param="Idempotency-Key",
    )


LIMIT_SETTING: Final = "PAWL_MAX_FEEDBACK_KB"
# Targets of about 7,000 calls; the database knows the older ones.
MAX_TARGETS: Final = 20_000
# A longer body takes more than about 10 ms to parse, which is done in a thread.
LONG_BYTES: Final = 128 * 1024


class RecentTargets:
    """The policy version of the newest call of each of the last `MAX_TARGETS` feedback targets."""

    def __init__(self) -> None:
        self._earners: OrderedDict[tuple[str, str], tuple[str, str]] = OrderedDict()

    def remember(self, record: CapturedCall, call: str, response_id: str | None) -> None:
        """Remember a call, its reply's id and its episode as possible targets of feedback.

        `call` and `response_id` are without the tenant; the targets are stored names.
        """
        earner = (record.policy or "", str(record.policy_version or 0))
        call = name_in_same_tenant(record.episode, call)
        self._earners["call", call] = earner
        if record.episode != call:
            self._earners["episode", record.episode] = earner
        if response_id:
            self._earners["response", name_in_same_tenant(record.episode, response_id)] = earner
        while len(self._earners) > MAX_TARGETS:
            self._earners.popitem(last=False)

    def version_of_target(self, kind: str, target: str) -> tuple[str, str] | None:
        """Return policy and version of a target's newest call, or None if not remembered."""
        earner = self._earners.get((kind, target))
        if earner is None and kind == "episode":
            # An episode of a single call may have that call's id as its name.
            return self._earners.get(("call", target))
        return earner


# A client may state metrics of any name, so only the names that Pawl defines become labels.
NAMED_METRICS: Final = frozenset({"reward", "tool_status"})


def metric_label(metric: str) -> str:
    """Return the label for a stated metric: its name if Pawl defines it, else `other`."""
    return metric if metric in NAMED_METRICS else "other"


class FeedbackEndpoint:
    """Take one worker's feedback: parse it, make it durable, and answer."""

    def __init__(
        self,
        recorder: Recorder,
        targets: RecentTargets,
        lookup: Lookup,
        intake: Intake,
        keys: IdempotencyStore,
    ) -> None:
        self._recorder = recorder
        self._targets = targets
        self._lookup = lookup
        self._intake = intake
        self._keys = keys

    async def handle(self, exchange: Exchange, usage: Usage | None) -> None:
        """Answer one POST; `usage` counts against the limits of the client's key, if it needs one.

        Raises:
            BadRequest: a statement is malformed, or there are more than the key's limit for a
                minute; nothing was taken.
            TooMany: the key's limit leaves no room for the statements now; nothing was taken.
            KeyReused: the `Idempotency-Key` belongs to another body; nothing was taken.
            TooLarge: the body is larger than `PAWL_MAX_FEEDBACK_KB`.
            Overloaded: there is no room for the body now.
            SpoolFull: the feedback could not be made durable; the client may send it again.
        """
        with self._intake.budget.claim() as claim:
            record = await self._read(exchange, claim)
            if usage is not None:
                usage.count_statements(monotonic(), len(record.items))
            key, body_hash = record.idempotency_key, record.body_hash
            if key is None or body_hash is None:
                answer = await self._record_and_answer(record, exchange.key_name, False)
            else:
                record_body = partial(self._record_and_answer, record, exchange.key_name)
                answer = await self._keys.answer_once(key, body_hash, record_body)
            exchange.reply(answer.status, b"", [JSON], answer.body)

    async def _read(self, exchange: Exchange, claim: BudgetShare) -> FeedbackRecord:
        intake = self._intake
        body = await intake.read_bytes(exchange, claim, intake.max_feedback, LIMIT_SETTING)
        key = exchange.headers_by_name().get("idempotency-key")
        parse = partial(parse_feedback, body, datetime.now(UTC), key, exchange.tenant)
        record = await intake.run_in_thread(parse) if len(body) > LONG_BYTES else parse()
        return msgspec.structs.replace(record, api_key=exchange.api_key)

    async def _record_and_answer(
        self, record: FeedbackRecord, key: str | None, durable: bool
    ) -> FeedbackAnswer:
        """Record feedback unless it is known to be durable, and return the answer to the client.

        `key` is the name of the client's API key, None without one.
        """
        known = await self._known_targets(record)
        if not durable:
            await self._make_durable(record)
        results = [
            {
                "id": str(item.id),
                "status": "stored" if (item.target_kind, item.target) in known else "pending",
            }
            for item in record.items
        ]
        all_known = all(result["status"] == "stored" for result in results)
        log.debug("feedback", key=key, items=len(results), repeated=durable, all_known=all_known)
        return FeedbackAnswer(200 if all_known else 202, msgspec.json.encode({"results": results}))

    async def _known_targets(self, record: FeedbackRecord) -> set[tuple[str, str]]:
        targets = {(item.target_kind, item.target) for item in record.items}
        known: set[tuple[str, str]] = {
            target for target in targets if self._targets.version_of_target(*target) is not None
        }
        missing = targets - known
        if missing:
            stored = await self._lookup.ask(
                lambda driver: known_targets(driver, missing), within_s=LOOK_UP_S
            )
            known |= stored or set[tuple[str, str]]()
        return known

    async def _make_durable(self, record: FeedbackRecord) -> None:
        if not await self._recorder.append(record):
            raise SpoolFull(
                "The feedback could not be written to disk and was not taken; "
                "free space in PAWL_SPOOL_DIR and send it again"
            )
        for item in record.items:
            earner = self._targets.version_of_target(item.target_kind, item.target)
            FEEDBACK.labels(metric_label(item.metric), "known" if earner else "pending").inc()
            if item.tool is not None:
                TOOL_STATUS.labels(item.tool.status).inc()
            elif item.metric == REWARD_METRIC and isinstance(item.value, float):
                REWARD.labels(*(earner or ("", ""))).observe(item.value)
                REWARD_SUM.labels(*(earner or ("", ""))).inc(item.value)
