"""Define the proxy's Prometheus metrics in one place, so that names and labels stay few.

Workers and ingester count in shared files, and the ingester adds the counts up
(`proxy.shared_memory`); a gauge's `multiprocess_mode` says how its values are joined.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from http import HTTPStatus
from typing import Final, TypeVar, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from proxy.errors import ProxyError, Unexpected
from proxy.shared_memory import registry
from proxy.trainable import Reason
from store.records import ToolStatus

Metric = TypeVar("Metric", bound=MetricWrapperBase)


@cache
def labelled(metric: Metric, *values: str) -> Metric:
    """Return `metric.labels(*values)`, cached because it is on a call's path.

    A value must never be one that clients choose freely: each value becomes a time series.
    """
    return metric.labels(*values)


STANDARD_STATUSES: Final = frozenset(str(status.value) for status in HTTPStatus)


def status_label(status: int) -> str:
    """Return a reply's status as a label, or its class (`5xx`) if it is no standard status."""
    text = str(status)
    return text if text in STANDARD_STATUSES else status_class(status)


def status_class(status: int | None) -> str:
    """Return the class of a reply's status (`5xx`), or `none` if there was no reply."""
    return "none" if status is None else f"{str(status)[0]}xx"


SECONDS_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
ADDED_BUCKETS: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.1, 1)

CALLS = Counter(
    "pawl_calls_total",
    "Recorded calls by how they ended (`status`, as in `transitions.status`), by the class of the"
    " HTTP status that the client got (`answered`: `2xx`, `4xx`, `5xx`, or `none`), and whether the"
    " reply was streamed.",
    ["policy", "version", "status", "answered", "stream"],
)
# Counts settings that exploration changed, not calls of other versions.
EXPLORED = Counter(
    "pawl_calls_explored_total",
    "Recorded calls in which exploration changed a setting: `temperature`, `seed` or `strict`.",
    ["policy", "kind"],
)
NOT_TRAINABLE = Counter(
    "pawl_calls_not_trainable_total",
    "Calls that cannot be trained, by reason (as in `transitions.reason`).",
    ["reason"],
)
REDACTED = Counter(
    "pawl_redacted_total",
    "Records in which redaction replaced something before they were stored, by rule.",
    ["rule"],
)
WITHHELD = Counter(
    "pawl_withheld_total",
    "Calls stored without their content, as it could not be redacted, by reason.",
    ["reason"],
)
CALL_SECONDS = Histogram(
    "pawl_call_seconds",
    "From a request's arrival to its reply's end.",
    ["stream"],
    buckets=SECONDS_BUCKETS,
)
FIRST_CHUNK_SECONDS = Histogram(
    "pawl_first_chunk_seconds",
    "From a request's arrival to the first byte passed on.",
    buckets=SECONDS_BUCKETS,
)
ADDED_SECONDS = Histogram(
    "pawl_added_seconds",
    "Time that Pawl adds to a call: from its body's arrival until it can be sent on, and while its"
    " reply's end waits until the call's record is on disk.",
    buckets=ADDED_BUCKETS,
)
TOKENS = Counter("pawl_tokens_total", "Tokens recorded, `prompt` or `sampled`.", ["policy", "kind"])
IN_FLIGHT = Gauge("pawl_calls_in_flight", "Calls being answered now.", multiprocess_mode="livesum")
IN_FLIGHT_BYTES = Gauge(
    "pawl_in_flight_bytes",
    "Memory charged to requests and replies in flight; each worker has PAWL_IN_FLIGHT_MB.",
    multiprocess_mode="livesum",
)
FORWARDED = Counter(
    "pawl_forwarded_total",
    "Requests passed through unrecorded, by route without ids and HTTP status.",
    ["path", "status"],
)
REFUSED = Counter(
    "pawl_refused_total",
    "Requests refused by the proxy itself, by class of error: `Unexpected` for those that failed "
    "unforeseen (status 500), and `slow_head`, `slow_body` and `slow_write` for connections that "
    "were closed as their client was too slow.",
    ["reason"],
)

# Each record is in exactly one of five states, so that at any moment
# recorded = stored + spooled + dead-lettered + dropped + deleted.
RECORDED = Counter("pawl_records_total", "Records seen, of calls and of feedback.")
STORED = Counter("pawl_records_stored_total", "Records that are in PostgreSQL.")
DEAD_LETTERS = Counter("pawl_records_dead_lettered_total", "Records the database refused.")
DROPPED = Counter(
    "pawl_records_dropped_total", "Records that could not be written to disk, or vanished from it."
)
DELETED = Counter(
    "pawl_records_deleted_total",
    "Records about deleted episodes only, or calls of dropped days, that came later and were not "
    "stored.",
)
OUTDATED = Counter(
    "pawl_outdated_total",
    "Removed as older than PAWL_KEEP_DAYS: `episodes`, `calls`, `statements`, dead `letters`, and"
    " `unspent` episodes, which no policy had consumed; and `pending` statements, whose target did"
    " not come in PAWL_KEEP_PENDING_DAYS or which were too many.",
    ["what"],
)
# Workers count only here, in one step, and the ingester adds the number to both totals that include
# it (`exposed_registry`): two steps could be observed, or interrupted by a kill, halfway.
UNWRITTEN = Counter(
    "pawl_records_unwritten_total",
    "Records that could not be written to disk; pawl_records_dropped_total has them too.",
)
RECORDING_OUTAGE_SECONDS = Gauge(
    "pawl_recording_outage_seconds",
    "Seconds for which a worker has been losing records without saying of which episodes.",
    multiprocess_mode="livemostrecent",
)
SPOOLED = Gauge(
    "pawl_records_spooled",
    "Records on disk that are not in PostgreSQL yet.",
    multiprocess_mode="livemostrecent",
)
DRAIN_STUCK = Gauge(
    "pawl_drain_stuck_seconds",
    "Seconds for which a record could not be stored though PostgreSQL answers; 0: none.",
    multiprocess_mode="livemostrecent",
)
SPOOL_COMMIT = Gauge(
    "pawl_spool_commit_seconds",
    "Seconds for which a worker's disk has been busy with one commit; large: the disk hangs.",
    multiprocess_mode="livemax",
)
DRAIN_LAG = Gauge(
    "pawl_spool_lag_bytes",
    "Bytes on disk that are not stored yet.",
    multiprocess_mode="livemostrecent",
)

FEEDBACK = Counter(
    "pawl_feedback_total",
    "Statements taken on /feedback: `reward`, `tool_status` or `other`; the target was `known` or"
    " is `pending`.",
    ["metric", "result"],
)
KEY_CONFLICTS = Counter(
    "pawl_feedback_key_conflicts_total",
    "Feedback bodies stored although another body has the same idempotency key; both are stored.",
)
LATE = Counter(
    "pawl_late_feedback_total",
    "Statements of the reward that came after their episode was trained on; they are kept, and "
    "count for all but training.",
    ["policy"],
)
REWARD = Histogram(
    "pawl_reward",
    "Rewards as stated, by the policy version that earned them.",
    ["policy", "version"],
    buckets=(-1, -0.5, 0, 0.1, 0.25, 0.5, 0.75, 0.9, 1, 10),
)
# prometheus_client gives a histogram with a negative bucket no sum. Rewards may be negative, so
# this sum may fall: it is a gauge, for PromQL's delta() and not for rate().
REWARD_SUM = Gauge(
    "pawl_reward_stated_sum",
    "Sum of the rewards as stated, by the policy version that earned them.",
    ["policy", "version"],
    multiprocess_mode="sum",
)
EVAL_EPISODES = Gauge(
    "pawl_eval_episodes",
    "Episodes of evaluation, by the policy version that worked on them.",
    ["policy", "version"],
    multiprocess_mode="livemostrecent",
)
EVAL_REWARD = Gauge(
    "pawl_eval_reward",
    "Reward of the episodes of evaluation: the `mean`, and `low` and `high` of its 95 % interval.",
    ["policy", "version", "figure"],
    multiprocess_mode="livemostrecent",
)

TOOL_STATUS = Counter("pawl_tool_events_total", "Tool executions by how they ended.", ["status"])
WARNINGS = Counter(
    "pawl_warnings_total",
    "Requests from which a header or field was dropped: malformed, or not allowed for tenants.",
)
SPANS = Counter(
    "pawl_spans_total",
    "Spans of calls, with PAWL_OTEL: `sent` to the collector, or `dropped`, as when it is away.",
    ["outcome"],
)
SERVING = Gauge(
    "pawl_serving_version",
    "The version that new episodes get.",
    ["policy"],
    multiprocess_mode="livemostrecent",
)
DATABASE_UP = Gauge(
    "pawl_database_up", "1 while PostgreSQL answers.", multiprocess_mode="livemostrecent"
)


def refusal_classes(kind: type[ProxyError] = ProxyError) -> Iterator[type[ProxyError]]:
    """Yield the classes of errors that requests are refused with; others prevent the start."""
    for error in kind.__subclasses__():
        if error is Unexpected or error.status != ProxyError.status:
            yield error
        yield from refusal_classes(error)


SLOW_STEPS: Final = ("head", "body", "write")
# Label values that exist from the start; rules, routes, policies and versions appear when counted.
INITIAL_LABELS: Final[Mapping[MetricWrapperBase, Iterable[Iterable[str]]]] = {
    NOT_TRAINABLE: [get_args(Reason)],
    WITHHELD: [("not_json", "unreadable")],
    CALL_SECONDS: [("true", "false")],
    REFUSED: [
        [*(error.__name__ for error in refusal_classes()), *(f"slow_{step}" for step in SLOW_STEPS)]
    ],
    OUTDATED: [("episodes", "calls", "statements", "letters", "unspent", "pending")],
    FEEDBACK: [("reward", "tool_status", "other"), ("known", "pending")],
    TOOL_STATUS: [get_args(ToolStatus)],
    SPANS: [("sent", "dropped")],
}


TOTAL: Final = "_total"
# Totals that include `UNWRITTEN`.
TOTALS_WITH_UNWRITTEN: Final = frozenset({"pawl_records", "pawl_records_dropped"})
UNWRITTEN_NAME: Final = "pawl_records_unwritten"


def exposed_registry(is_shown: Callable[[str], bool] | None = None) -> CollectorRegistry:
    """Return the metrics of all processes for `/metrics`, with unwritten records in the totals.

    With `is_shown`, only samples of policies are returned, and only of those that it accepts.
    """
    together = CollectorRegistry()
    together.register(_Exposed(registry(), is_shown))
    return together


class _Exposed(Collector):
    def __init__(self, counted: CollectorRegistry, is_shown: Callable[[str], bool] | None) -> None:
        self._counted = counted
        self._is_shown = is_shown

    def collect(self) -> Iterator[Family]:
        families = list(self._counted.collect())
        # Summed once, so that both totals include the same number.
        unwritten = sum(_total(family) for family in families if family.name == UNWRITTEN_NAME)
        for family in families:
            shown = family
            if family.name in TOTALS_WITH_UNWRITTEN:
                shown = Family(family.name, family.documentation, family.type)
                shown.add_sample(family.name + TOTAL, {}, _total(family) + unwritten)
            if self._is_shown is not None:
                samples = shown.samples
                shown = Family(family.name, family.documentation, family.type)
                shown.samples = [
                    sample
                    for sample in samples
                    if (policy := sample.labels.get("policy")) and self._is_shown(policy)
                ]
                if not shown.samples:
                    continue
            yield shown


def _total(family: Family) -> float:
    return sum(sample.value for sample in family.samples if sample.name == family.name + TOTAL)
