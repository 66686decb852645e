"""POST /feedback: durable before the 2xx, with or without the database, in any order.

If all targets are known, the status is 200 (`stored`). A target that is not known yet gives 202
(`pending`) and is matched when it arrives. A repeat under an `Idempotency-Key` adds nothing.
"""

from collections import OrderedDict
from datetime import UTC, datetime
from functools import partial
from typing import Final

import msgspec
import structlog

from proxy.errors import SpoolFull
from proxy.feedback.idempotency import LOOK_UP_S, Answer, IdempotencyStore
from proxy.feedback.statements import parse_feedback
from proxy.http.exchange import Exchange
from proxy.http.wire import JSON
from proxy.intake import Claim, Intake
from proxy.lookup import Lookup
from proxy.metrics import FEEDBACK, REWARD, REWARD_SUM, TOOL_STATUS, metric_label
from proxy.spool.recorder import Recorder
from proxy.spool.segments import CapturedCall
from store.link.settle import known_targets
from store.records import REWARD as REWARD_METRIC
from store.records import FeedbackRecord
from store.tenants import same_tenant

log = structlog.get_logger()

SETTING: Final = "PAWL_MAX_FEEDBACK_KB"
# Targets of about 7,000 calls; the database knows the older ones.
CAPACITY: Final = 20_000
# A longer body takes more than about 10 ms to parse, which is done beside the event loop.
LONG_BYTES: Final = 128 * 1024


class RecentTargets:
    """Remember which policy version the last `CAPACITY` targets of feedback got, within bounds."""

    def __init__(self) -> None:
        """Begin empty."""
        self._earners: OrderedDict[tuple[str, str], tuple[str, str]] = OrderedDict()

    def remember(self, record: CapturedCall, call: str, response_id: str | None) -> None:
        """Remember a call, its reply's id and its episode as possible targets of feedback.

        They are targets for the tenant of the call, under their names as they are kept.
        """
        earner = (record.policy or "", str(record.policy_version or 0))
        call = same_tenant(record.episode, call)
        self._earners["call", call] = earner
        if record.episode != call:
            self._earners["episode", record.episode] = earner
        if response_id:
            self._earners["response", same_tenant(record.episode, response_id)] = earner
        while len(self._earners) > CAPACITY:
            self._earners.popitem(last=False)

    def earner(self, kind: str, target: str) -> tuple[str, str] | None:
        """Return policy and version of a target's call, or None if it is not remembered."""
        earner = self._earners.get((kind, target))
        if earner is None and kind == "episode":
            # An episode that consists of one call only has that call's id.
            return self._earners.get(("call", target))
        return earner


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
        """Store the parts of a worker that feedback needs."""
        self._recorder = recorder
        self._targets = targets
        self._lookup = lookup
        self._intake = intake
        self._keys = keys

    async def handle(self, exchange: Exchange) -> None:
        """Answer one POST.

        Raises:
            BadRequest: a statement is malformed; nothing was taken.
            KeyReused: the `Idempotency-Key` belongs to another body; nothing was taken.
            TooLarge: the body is larger than `PAWL_MAX_FEEDBACK_KB`.
            Overloaded: there is no room for the body now.
            SpoolFull: the feedback could not be made durable; the client may send it again.
        """
        with self._intake.budget.claim() as claim:
            record = await self._read(exchange, claim)
            key, body_hash = record.idempotency_key, record.body_hash
            if key is None or body_hash is None:
                answer = await self._state(record, False)
            else:
                answer = await self._keys.once(key, body_hash, partial(self._state, record))
            exchange.reply(answer.status, b"", [JSON], answer.body)

    async def _read(self, exchange: Exchange, claim: Claim) -> FeedbackRecord:
        intake = self._intake
        body = await intake.read_bytes(exchange, claim, intake.max_feedback, SETTING)
        key = exchange.lowered().get("idempotency-key")
        parse = partial(parse_feedback, body, datetime.now(UTC), key, exchange.tenant)
        record = await intake.beside(parse) if len(body) > LONG_BYTES else parse()
        return msgspec.structs.replace(record, api_key=exchange.api_key)

    async def _state(self, record: FeedbackRecord, durable: bool) -> Answer:
        """Record feedback unless it is known to be durable, and return the answer to the client."""
        known = await self._known(record)
        if not durable:
            await self._take(record)
        results = [
            {
                "id": str(item.id),
                "status": "stored" if (item.target_kind, item.target) in known else "pending",
            }
            for item in record.items
        ]
        all_known = all(result["status"] == "stored" for result in results)
        log.info("feedback", items=len(results), repeated=durable, all_known=all_known)
        return Answer(200 if all_known else 202, msgspec.json.encode({"results": results}))

    async def _known(self, record: FeedbackRecord) -> set[tuple[str, str]]:
        targets = {(item.target_kind, item.target) for item in record.items}
        known: set[tuple[str, str]] = {
            target for target in targets if self._targets.earner(*target) is not None
        }
        missing = targets - known
        if missing:
            in_ledger = await self._lookup.ask(
                lambda connection: known_targets(connection, missing), within_s=LOOK_UP_S
            )
            known |= in_ledger or set[tuple[str, str]]()
        return known

    async def _take(self, record: FeedbackRecord) -> None:
        if not await self._recorder.append(record):
            raise SpoolFull(
                "The feedback could not be written to disk and was not taken; "
                "free space in PAWL_SPOOL_DIR and send it again"
            )
        for item in record.items:
            earner = self._targets.earner(item.target_kind, item.target)
            FEEDBACK.labels(metric_label(item.metric), "known" if earner else "pending").inc()
            if item.tool is not None:
                TOOL_STATUS.labels(item.tool.status).inc()
            elif item.metric == REWARD_METRIC and isinstance(item.value, float):
                REWARD.labels(*(earner or ("", ""))).observe(item.value)
                REWARD_SUM.labels(*(earner or ("", ""))).inc(item.value)
