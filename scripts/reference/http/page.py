"""Write the page of the HTTP API: routes, headers, feedback and errors."""

from collections.abc import Sequence

from proxy.formats.messages.errors import ANTHROPIC_BY_STATUS

from ..markdown import code, page, paragraph, table, table_with_notes
from .errors import NOT_READ, error_classes
from .headers import (
    FAULT,
    IDEMPOTENCY,
    REPLY,
    REQUEST,
    RETRY_AFTER,
    TENANT,
    Header,
    episode_sources,
)
from .routes import BELOW_MARK, Forwarded, forwarded_routes, recorded_paths
from .schemas import admin_paths, feedback_fields
from .texts import (
    ADMIN,
    AGENT,
    EPISODE,
    ERROR_BODIES,
    ERROR_CLASSES,
    ERROR_NOT_READ,
    FEEDBACK,
    FEEDBACK_EXAMPLES,
    FORWARDED,
    IDENTITY,
    INTRODUCTION,
    KEYS,
    PREFIX,
    RECORDED,
    TRAINER,
)


def http_page() -> str:
    """Return `http.md`."""
    return page(
        "HTTP API",
        paragraph(INTRODUCTION),
        "## Keys",
        paragraph(KEYS),
        "## Recorded calls",
        *_recorded(),
        "## Names in the URL",
        paragraph(PREFIX),
        "## Headers",
        *_headers(),
        "## `POST /feedback`",
        *_feedback(),
        "## Forwarded routes",
        *_forwarded(),
        "## Errors",
        *_errors(),
        "## Admin port",
        *_admin(),
    )


def _recorded() -> list[str]:
    rows = [(code(f"POST {path}"), one.title) for path, one in recorded_paths().items()]
    return [paragraph(RECORDED), table(("route", "format"), rows)]


def _headers() -> list[str]:
    sources = [
        (one.place, code(one.name), code(one.namespace) if one.namespace else "")
        for one in episode_sources()
    ]
    return [
        "### Of a request",
        _header_table(REQUEST),
        paragraph(IDENTITY),
        paragraph(EPISODE),
        table(("where", "name", "namespace"), sources),
        paragraph(AGENT),
        "### Of a reply",
        _header_table((*REPLY, FAULT, RETRY_AFTER, TENANT)),
    ]


def _header_table(headers: tuple[Header, ...]) -> str:
    rows = [(code(one.name), code(one.example), one.meaning) for one in headers]
    return table_with_notes(("header", "example", "meaning"), rows)


def _feedback() -> list[str]:
    fields = table_with_notes(("field", "type", "meaning"), feedback_fields())
    answers = table(
        ("status", "meaning"),
        [
            ("200", "All statements are durable, and all targets are known."),
            ("202", "All statements are durable; some targets are not known yet."),
        ],
    )
    key = _header_table((IDEMPOTENCY,))
    return [paragraph(FEEDBACK), FEEDBACK_EXAMPLES, fields, key, answers]


def _forwarded() -> list[str]:
    rows = [
        (
            ", ".join(one.methods),
            _paths(one),
            "yes" if one.administers else "",
            "yes" if one.keeps else "",
        )
        for one in forwarded_routes()
    ]
    return [paragraph(FORWARDED), table(("methods", "paths", "account", "kept"), rows)]


def _paths(route: Forwarded) -> str:
    return ", ".join(_path(path) for path in route.paths)


def _path(path: str) -> str:
    start, found, count = path.partition(BELOW_MARK)
    return f"{code(start)} and up to {count} segments below it" if found else code(path)


def _errors() -> list[str]:
    rows = [
        (
            str(one.status),
            code(one.name),
            one.fault,
            code(one.kind),
            ", ".join(map(code, one.codes)),
            one.meaning,
        )
        for one in error_classes()
    ]
    anthropic = [(str(status), code(name)) for status, name in sorted(ANTHROPIC_BY_STATUS.items())]
    return [
        paragraph(ERROR_CLASSES),
        _table_of_errors(rows),
        paragraph(ERROR_BODIES),
        table(("status", "Anthropic's type"), anthropic),
        paragraph(ERROR_NOT_READ),
        table(("status", "meaning"), [(str(status), text) for status, text in NOT_READ.items()]),
    ]


def _table_of_errors(rows: Sequence[Sequence[str]]) -> str:
    return table_with_notes(("status", "class", "fault", "type", "codes", "meaning"), rows)


def _admin() -> list[str]:
    rows = [(code(f"GET {path}"), meaning) for path, meaning in admin_paths().items()]
    return [paragraph(ADMIN), table(("route", "meaning"), rows), paragraph(TRAINER)]
