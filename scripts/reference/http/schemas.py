"""Derive JSON schemas of what Pawl reads and writes over HTTP from the code's own limits."""

from typing import Any, Final, get_args

from proxy.counting.board import State as ProcessPhase
from proxy.feedback import statements
from proxy.keeper.progress import MOST_REASON
from proxy.keeper.progress import State as DrainPhase
from store.records import REWARD, TOOL_STATUSES

Schema = dict[str, Any]

ADMIN: Final = {
    "/healthz": "200 while the keeper process answers.",
    "/readyz": "200 while some worker takes calls, else 503. The body tells of workers, database, "
    "drain and lapses; a database that is away does not make it 503.",
    "/metrics": "Prometheus metrics: see [metrics.md](metrics.md).",
}
MEANINGS: Final = {
    "metric": f"What is stated; `{REWARD}` if left out. It is what is trained on, unless the "
    f"recipe names other metrics; `{statements.TOOL_STATUS}` states how a tool execution ended.",
    "value": "A finite number, `true` (1), `false` (0), or a text of at most "
    f"{statements.MAX_LABEL} characters, which counts for what the recipe says; for `tool_status` "
    "one of " + ", ".join(f"`{one}`" for one in TOOL_STATUSES) + ".",
    statements.WITHDRAWN: "`true` in place of a value: what was stated of the metric about the "
    "target does not count any more. Not for `tool_status`.",
    "episode": "Target: the episode's name, as in `x-pawl-episode` of the reply.",
    "call": "Target: the call's id, as in `x-pawl-call` of the reply.",
    "response": "Target: the `id` in the body of the reply that the agent got.",
    "id": "Only for `tool_status`: id of the tool call.",
    "name": "Only for `tool_status`: name of the tool.",
    "detail": "Only for `tool_status`: what happened.",
    "ms": "Only for `tool_status`: duration in milliseconds.",
}
TYPES: Final = {
    "value": "number, boolean or text, required unless `withdrawn`",
    statements.WITHDRAWN: "boolean",
    "ms": "number",
    "call": "UUID",
}
# What a text must not be: a number, or a truth value, in quotes.
QUOTED: Final = (
    r"^\s*([+-]?(\d[\d_]*\.?\d*([eE][+-]?\d+)?|\.\d+([eE][+-]?\d+)?|[nN][aA][nN]"
    r"|[iI][nN][fF]([iI][nN][iI][tT][yY])?)|[tT][rR][uU][eE]|[fF][aA][lL][sS][eE])\s*$"
)
# U+0000 is no character of a text in PostgreSQL.
TEXT: Final[Schema] = {
    "type": ["string", "null"],
    "maxLength": statements.MAX_TEXT,
    "pattern": "^[^\\u0000]*$",
}


def admin_paths() -> dict[str, str]:
    """Return the routes of the admin port, and what each answers."""
    return dict(ADMIN)


def feedback_fields() -> list[tuple[str, str, str]]:
    """Return name, type and meaning of each field of a statement."""
    text = f"text, at most {statements.MAX_TEXT} characters"
    return [(f"`{name}`", TYPES.get(name, text), meaning) for name, meaning in MEANINGS.items()]


def feedback_schemas() -> dict[str, Schema]:
    """Return the schemas of what `/feedback` takes and answers, by name."""
    return {
        "Statement": {"oneOf": [_ref("MetricStatement"), _ref("ToolStatement")]},
        "MetricStatement": _statement(statements.OF_METRICS, _metric()),
        "ToolStatement": _statement(statements.COMMON | statements.ABOUT_TOOLS, _tool_status()),
        "FeedbackResults": _results(),
    }


def _metric() -> Schema:
    metric = TEXT | {"default": REWARD, "not": {"const": statements.TOOL_STATUS}}
    label = {
        "type": "string",
        "minLength": 1,
        "maxLength": statements.MAX_LABEL,
        "pattern": TEXT["pattern"],
        "not": {"pattern": QUOTED},
    }
    value = {"oneOf": [{"type": ["number", "boolean", "null"]}, label]}
    withdrawn = {"type": ["boolean", "null"]}
    return {
        "properties": {"metric": metric, "value": value, statements.WITHDRAWN: withdrawn},
        "required": [],
        "anyOf": [
            {
                "required": ["value"],
                "properties": {
                    "value": {"not": {"type": "null"}},
                    statements.WITHDRAWN: {"not": {"const": True}},
                },
            },
            {
                "required": [statements.WITHDRAWN],
                "properties": {statements.WITHDRAWN: {"const": True}, "value": {"type": "null"}},
            },
        ],
    }


def _tool_status() -> Schema:
    return {
        "properties": {
            "metric": {"const": statements.TOOL_STATUS},
            "value": {"enum": list(TOOL_STATUSES)},
            "ms": {"type": ["number", "null"]},
        },
        "required": ["metric", "value"],
    }


def _statement(fields: frozenset[str], special: Schema) -> Schema:
    """Return the schema of a statement: texts, unless `special` says more, and one target."""
    call = {"type": ["string", "null"], "format": "uuid"}
    properties = {name: TEXT for name in MEANINGS if name in fields} | {"call": call}
    described = {
        name: {**schema, "description": MEANINGS[name]}
        for name, schema in (properties | special["properties"]).items()
    }
    return {
        "type": "object",
        "properties": described,
        "required": special["required"],
        "additionalProperties": False,
        "oneOf": [_one_target(name) for name in statements.TARGETS],
        **({"anyOf": special["anyOf"]} if "anyOf" in special else {}),
    }


def _one_target(name: str) -> Schema:
    """Return what holds where a statement has this target: the others are not there, or null."""
    others: Schema = {other: {"type": "null"} for other in statements.TARGETS if other != name}
    return {
        "required": [name],
        "properties": {name: {"type": "string", "minLength": 1}} | others,
    }


def _results() -> Schema:
    result = {
        "type": "object",
        "properties": {
            "id": {"type": "string", "format": "uuid"},
            "status": {"enum": ["stored", "pending"]},
        },
        "required": ["id", "status"],
    }
    return {
        "type": "object",
        "properties": {"results": {"type": "array", "items": result}},
        "required": ["results"],
    }


def error_schemas() -> dict[str, Schema]:
    """Return the schemas of errors, in OpenAI's and in Anthropic's shape."""
    text: Schema = {"type": "string"}
    maybe: Schema = {"type": ["string", "null"]}
    openai = {"message": text, "type": text, "param": maybe, "code": maybe}
    anthropic = {"type": text, "message": text}
    return {
        "OpenAIError": _object(error=_object(**openai)),
        "AnthropicError": _object(type={"const": "error"}, error=_object(**anthropic)),
    }


def admin_schemas() -> dict[str, Schema]:
    """Return the schemas of `/healthz` and `/readyz`."""
    number = {"type": "number"}
    worker = _object(
        name={"type": "string"},
        state={"enum": list(get_args(ProcessPhase))},
        since={"type": "string", "format": "date-time"},
        restarts={"type": "integer"},
        last_exit={"type": ["integer", "null"]},
    )
    drain = _object(
        state={"enum": list(get_args(DrainPhase))},
        for_s=number,
        reason={"type": "string", "maxLength": MOST_REASON},
        held={"type": "integer"},
    )
    return {
        "Health": _object(status={"const": "ok"}),
        "Readiness": _object(
            status={"type": "string"},
            workers={"type": "array", "items": worker},
            database={"type": "string"},
            serving={"type": "object", "additionalProperties": {"type": "integer"}},
            drain=drain,
            lapse_s=number,
        ),
    }


def _object(**properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}
