"""Write the OpenAPI 3.1 document of the data port and the admin port."""

import json
from collections.abc import Mapping
from typing import Any, Final

from proxy.feedback.statements import MAX_ITEMS
from proxy.formats.base import WireFormat
from proxy.keeper.admin import OPEN
from proxy.settings import ProxySettings
from store.keys import Scope

from .errors import ADMIN, CALL, FEEDBACK, NOT_READ, ErrorClass, error_classes
from .headers import FAULT, IDEMPOTENCY, REPLY, REQUEST, RETRY_AFTER, Header
from .routes import (
    BELOW_MARK,
    forwarded_routes,
    prefix_parts,
    recorded_paths,
)
from .schemas import (
    Schema,
    admin_paths,
    admin_schemas,
    error_schemas,
    feedback_schemas,
)
from .texts import FEEDBACK as FEEDBACK_TEXT
from .texts import FORWARDED, INTRODUCTION, PREFIX, RECORDED

JSON: Final = "application/json"
# Either will do on every route; which scope a key needs is said by each (OpenAPI 3.1 allows roles
# for schemes of any type).
SCHEMES: Final[Schema] = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "A key of `pawl keys create`."},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
ANY: Final[Schema] = {"description": "As the upstream's API has it; passed through."}
VERSION: Final = "1"


def openapi_text() -> str:
    """Return `openapi.json`."""
    return json.dumps(openapi(), indent=2, ensure_ascii=False) + "\n"


def openapi() -> Schema:
    """Return the document."""
    calls = {path: {"post": _call(one)} for path, one in recorded_paths().items()}
    admin = {path: _admin(path, meaning) for path, meaning in admin_paths().items()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Pawl", "version": VERSION, "description": _text(INTRODUCTION)},
        "servers": [_data_port()],
        "paths": {**calls, "/feedback": {"post": _feedback()}, **admin},
        "components": {
            "schemas": feedback_schemas() | error_schemas() | admin_schemas(),
            "securitySchemes": SCHEMES,
        },
        "x-pawl-forwarded": {"description": _text(FORWARDED), "routes": _forwarded()},
    }


def _data_port() -> Schema:
    parts = "".join(f"[/{part}/{{{part}}}]" for part in prefix_parts())
    return {
        "url": "http://{address}{prefix}",
        "description": "Data port",
        "variables": {
            "address": _variable("listen", "PAWL_LISTEN"),
            "prefix": {"default": "", "description": f"{parts}. {_text(PREFIX)}"},
        },
    }


def _variable(field: str, name: str) -> Schema:
    return {"default": ProxySettings.model_fields[field].default, "description": name}


def _call(wire_format: WireFormat) -> Schema:
    body: Schema = {
        "description": "The upstream's request body. The proxy reads `model`, which selects a "
        "policy, `stream`, and the fields that name an episode or set the sampling.",
        "content": {JSON: {"schema": {"type": "object"}}},
        "required": True,
    }
    passed = {JSON: {"schema": ANY}, "text/event-stream": {"schema": ANY}}
    return {
        "operationId": f"create_{wire_format.name}",
        "summary": "Call a model; recorded.",
        "security": _security("infer"),
        "description": _text(RECORDED),
        "parameters": [_parameter(header) for header in REQUEST],
        "requestBody": body,
        "responses": {
            "default": {
                "description": "The upstream's reply, with its status.",
                "headers": _headers((*REPLY, FAULT)),
                "content": passed,
            },
            **_errors(CALL, f"{wire_format.errors.api}Error"),
        },
    }


def _feedback() -> Schema:
    statement = _ref("Statement")
    several = {"type": "array", "items": statement, "minItems": 1, "maxItems": MAX_ITEMS}
    return {
        "operationId": "state_feedback",
        "summary": "State rewards, other metrics and tool statuses.",
        "security": _security("feedback"),
        "description": _text(FEEDBACK_TEXT),
        "parameters": [_parameter(IDEMPOTENCY)],
        "requestBody": {
            "content": {JSON: {"schema": {"oneOf": [statement, several]}}},
            "required": True,
        },
        "responses": {
            "200": _results("All statements are durable, and all targets are known."),
            "202": _results("All statements are durable; some targets are not known yet."),
            **_errors(FEEDBACK, "OpenAIError"),
        },
    }


def _results(description: str) -> Schema:
    content = {JSON: {"schema": _ref("FeedbackResults")}}
    return {"description": description, "content": content}


def _errors(where: str, schema: str, not_read: Mapping[int, str] = NOT_READ) -> Schema:
    """Return the proxy's own error replies on a route, by status, and those of `not_read`."""
    by_status: dict[int, list[ErrorClass]] = {}
    for one in error_classes():
        if where in one.where:
            by_status.setdefault(one.status, []).append(one)
    return {
        str(status): _error(by_status.get(status, []), not_read.get(status), schema)
        for status in sorted({*by_status, *not_read})
    }


def _error(classes: list[ErrorClass], not_read: str | None, schema: str) -> Schema:
    meanings = [f"{one.name} ({one.fault}): {_text(one.meaning)}" for one in classes]
    waits = any(one.retry_after_s is not None for one in classes)
    return {
        "description": " ".join([*meanings, *([not_read] if not_read else [])]),
        "headers": _headers((FAULT, *([RETRY_AFTER] if waits else []))),
        "content": {JSON: {"schema": _ref(schema)}},
    }


def _admin(path: str, meaning: str) -> Schema:
    schemas: dict[str, Any] = {"/healthz": _ref("Health"), "/readyz": _ref("Readiness")}
    kind = JSON if path in schemas else "text/plain"
    content = {kind: {"schema": schemas.get(path, {"type": "string"})}}
    replies = {"200": {"description": "OK", "content": content}}
    if path == "/readyz":
        replies["503"] = {"description": "No worker takes calls now.", "content": content}
    if path not in OPEN:
        replies |= _errors(ADMIN, "OpenAIError", {})
    return {
        "servers": [
            {
                "url": "http://{address}",
                "description": "Admin port",
                "variables": {"address": _variable("admin_listen", "PAWL_ADMIN_LISTEN")},
            }
        ],
        "get": {
            "operationId": path.strip("/"),
            "summary": meaning.partition(": see [")[0],
            "security": [] if path in OPEN else _security("read"),
            "responses": replies,
        },
    }


def _security(scope: Scope) -> list[Schema]:
    return [{name: [scope]} for name in SCHEMES]


def _forwarded() -> list[Schema]:
    return [
        {
            "methods": list(one.methods),
            "paths": [_plain(path) for path in one.paths],
            "account": one.administers,
            "kept": one.keeps,
            "security": _security("admin" if one.administers else "infer"),
        }
        for one in forwarded_routes()
    ]


def _plain(path: str) -> str:
    start, found, count = path.partition(BELOW_MARK)
    return f"{start}[/{{id}}] (0 to {count} times)" if found else path


def _parameter(header: Header) -> Schema:
    return {
        "name": header.name,
        "in": "header",
        "description": header.meaning,
        "schema": header.schema,
        "example": header.example,
    }


def _headers(headers: tuple[Header, ...]) -> Schema:
    return {one.name: {"description": one.meaning, "schema": {"type": "string"}} for one in headers}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _text(text: str) -> str:
    return " ".join(text.split())
