"""List the dashboard's rows, and the proxy's panels: title, sentence, unit and queries.

A metric gets its panel by one line in a band; the band's panels then share the width again.
"""

from typing import Final

from .kinds import (
    Band,
    Query,
    Row,
    in_the_time_shown,
    lines,
    number,
    quantiles,
    rate,
    rate_of_policy,
    stack,
)
from .learning_panels import LEARNING, VERSIONS

TRAFFIC: Final = Row(
    "Traffic",
    Band(
        8,
        stack(
            "Calls by status",
            "Recorded calls by how they ended.",
            "reqps",
            rate_of_policy("pawl_calls_total", "status"),
        ),
        stack(
            "Calls by version",
            "Which version of a policy answered. After a promotion the new one takes over as episodes end.",
            "reqps",
            rate_of_policy(
                "pawl_calls_total", "policy", "version", legend="{{policy}}@{{version}}"
            ),
        ),
        lines(
            "Tokens",
            "Recorded tokens, read and sampled.",
            "suffix:tokens/s",
            rate_of_policy("pawl_tokens_total", "kind"),
        ),
        lines(
            "Calls in flight",
            "Calls being answered now.",
            "short",
            Query("sum(pawl_calls_in_flight)", "in flight"),
            decimals=0,
        ),
    ),
    Band(
        7,
        stack(
            "Not trainable, by reason",
            "Calls that cannot carry loss.",
            "reqps",
            rate("pawl_calls_not_trainable_total", "reason"),
        ),
        stack(
            "Explored, by setting",
            "Calls of which a policy's exploration changed a setting; one may count for several.",
            "reqps",
            rate_of_policy(
                "pawl_calls_explored_total", "policy", "kind", legend="{{policy}}, {{kind}}"
            ),
        ),
        lines(
            "Passed through unrecorded",
            "Model lists, embeddings and the like.",
            "reqps",
            rate("pawl_forwarded_total", "path", "status"),
        ),
        lines(
            "Refused, and let through with a warning",
            "What the proxy itself refused, and calls with a malformed header.",
            "reqps",
            rate("pawl_refused_total", "reason"),
            rate("pawl_warnings_total", legend="malformed header"),
        ),
    ),
)

LATENCY: Final = Row(
    "Latency",
    Band(
        8,
        lines(
            "Call",
            "From a request's arrival to its reply's end.",
            "s",
            *quantiles("pawl_call_seconds"),
        ),
        lines(
            "Call, p95",
            "Streamed replies and whole ones.",
            "s",
            Query(
                "histogram_quantile(0.95, sum by (le, stream) (rate(pawl_call_seconds_bucket[$__rate_interval])))",
                "stream {{stream}}",
            ),
        ),
        lines(
            "First chunk",
            "From a request's arrival to the first byte passed on.",
            "s",
            *quantiles("pawl_first_chunk_seconds"),
        ),
        lines(
            "Added by the proxy",
            "Proxy time a call took beside its upstream's: before the request left, and at its end.",
            "s",
            *quantiles("pawl_added_seconds"),
        ),
    ),
)

RECORDS: Final = Row(
    "Records and durability",
    Band(
        4,
        number(
            "Database",
            "PostgreSQL as the proxy sees it. While it is away, agents are served and records wait on disk.",
            "none",
            Query("min(pawl_database_up)", "database"),
            "orange",
            1,
            "green",
            "away",
            "up",
        ),
        number(
            "Waiting on disk",
            "Records that are not in PostgreSQL yet.",
            "short",
            Query("sum(pawl_records_spooled)", "spooled"),
            "green",
            1000,
            "orange",
        ),
        number(
            "Dead letters",
            "Records the database refused, in the time shown.",
            "short",
            in_the_time_shown("pawl_records_dead_lettered_total", "dead letters"),
            "green",
            0.5,
            "orange",
        ),
        number(
            "Dropped",
            "Records that could not be written to disk, in the time shown.",
            "short",
            in_the_time_shown("pawl_records_dropped_total", "dropped"),
            "green",
            0.5,
            "red",
        ),
    ),
    Band(
        8,
        lines(
            "Records",
            "Each record that is made ends in exactly one of stored, spooled, dead-lettered, dropped, deleted.",
            "suffix:records/s",
            rate("pawl_records_total", legend="made"),
            rate("pawl_records_stored_total", legend="stored"),
            rate("pawl_records_dead_lettered_total", legend="dead-lettered"),
            rate("pawl_records_dropped_total", legend="dropped"),
            rate("pawl_records_deleted_total", legend="of deleted episodes"),
        ),
        lines(
            "Spool",
            "Records on disk, and bytes of the oldest segment, still to be stored.",
            "short",
            Query("sum(pawl_records_spooled)", "records"),
            Query("sum(pawl_spool_lag_bytes)", "bytes of the oldest segment"),
            bytes_right="bytes of the oldest segment",
        ),
        lines(
            "Records not accounted for",
            "Made, less stored, spooled, dead-lettered, dropped and deleted. A few while they are being written; a number that stays is a fault.",
            "short",
            Query(
                "sum(pawl_records_total) - sum(pawl_records_stored_total) - sum(pawl_records_spooled) - sum(pawl_records_dead_lettered_total) - sum(pawl_records_dropped_total) - sum(pawl_records_deleted_total)",
                "not accounted for",
            ),
            min=None,
            decimals=0,
        ),
    ),
)

ROWS: Final = [TRAFFIC, LATENCY, RECORDS, LEARNING, VERSIONS]
