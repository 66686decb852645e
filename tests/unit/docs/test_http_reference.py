"""The document of the HTTP API has the routes, headers, errors and fields of the code, no other."""

import ast
import json
import re
from datetime import UTC, datetime
from typing import Any, get_args

import pytest
from jsonschema import Draft202012Validator

from proxy.counting.board import ProcessState, State, readiness
from proxy.door.openai_paths import RULES
from proxy.door.routes import Kind, find_route
from proxy.errors import BadRequest, NotAllowed
from proxy.feedback.statements import parse_feedback
from proxy.identity.names import episode_names, read_hints
from proxy.keeper.admin import admin_app
from proxy.keeper.progress import Progress
from scripts.reference.http import errors, headers, routes
from scripts.reference.http.openapi import openapi
from store.ids import new_id
from tests.conftest import ROOT

DOCUMENT = openapi()
SOURCES = {path: path.read_text() for path in sorted((ROOT / "proxy").rglob("*.py"))}


# Routes


def test_every_recorded_path_is_in_the_document_and_no_other() -> None:
    calls = {path for (_, path), kind in routes.exact_routes().items() if kind is Kind.CALL}
    own = set(DOCUMENT["paths"]) - {"/feedback", "/healthz", "/readyz", "/metrics"}
    assert own == calls == set(routes.recorded_paths())
    for path in own:
        assert set(DOCUMENT["paths"][path]) == {"post"}
        assert find_route("POST", path).kind is Kind.CALL
    assert find_route("POST", "/feedback").kind is Kind.FEEDBACK


def forwarded() -> list[tuple[str, str]]:
    """Every method and path of the list of forwarded routes, with an id in each place."""
    return [
        (method, re.sub(r"\{\w+\}", "x1", path.replace("[/{id}] (0 to ", "/x1 ").partition(" ")[0]))
        for route in DOCUMENT["x-pawl-forwarded"]["routes"]
        for method in route["methods"]
        for path in route["paths"]
    ]


def test_every_route_that_is_listed_as_forwarded_is_let_through() -> None:
    for method, path in forwarded():
        assert find_route(method, path).kind is Kind.FORWARD, (method, path)


def test_every_route_that_is_let_through_is_listed() -> None:
    listed = forwarded()
    for rule in RULES:
        for method in rule.methods:
            assert any(one == method and rule.pattern.match(path) for one, path in listed)
    exact = {route for route, kind in routes.exact_routes().items() if kind is Kind.FORWARD}
    assert exact <= set(listed)


def test_the_number_of_segments_that_is_listed_is_the_largest() -> None:
    for one in routes.forwarded_routes():
        for path in one.paths:
            start, found, count = path.partition(routes.BELOW_MARK)
            if found:
                assert find_route("GET", start + "/x" * int(count)).kind is Kind.FORWARD
                with pytest.raises(NotAllowed):
                    find_route("GET", start + "/x" * (int(count) + 1))


def test_the_prefix_is_the_one_that_routes_take() -> None:
    prefix = "".join(f"/{part}/x" for part in routes.prefix_parts())
    route = find_route("POST", f"{prefix}/v1/chat/completions")
    assert {getattr(route, part) for part in routes.prefix_parts()} == {"x"}
    description = DOCUMENT["servers"][0]["variables"]["prefix"]["description"]
    assert all(f"[/{part}/{{{part}}}]" in description for part in routes.prefix_parts())


def test_the_admin_ports_routes_are_those_of_its_application() -> None:
    nothing: Any = None
    served = {
        resource.canonical
        for resource in admin_app(nothing, nothing, nothing, nothing).router.resources()
    }
    assert served == {path for path, item in DOCUMENT["paths"].items() if "get" in item}


# Headers


def test_every_header_of_ours_in_the_sources_is_described() -> None:
    named = {
        name for text in SOURCES.values() for name in re.findall(r"x-pawl-[a-z]+[a-z-]*", text)
    }
    described = {
        one.name for one in (*headers.REQUEST, *headers.REPLY, headers.FAULT, headers.TENANT)
    }
    assert named | {"x-pawl-agent", "x-pawl-task", "x-pawl-split"} == described


def test_foreign_names_of_an_episode_are_in_the_order_that_counts() -> None:
    sources = headers.episode_sources()
    fields: dict[str, Any] = {"metadata": {}}
    sent: dict[str, str] = {}
    for one in sources:
        if one.place == "header":
            sent[one.name] = "v"
        elif one.place == "body field":
            fields[one.name] = "v"
        elif one.place.startswith("`metadata`"):
            fields["metadata"][one.name] = "v"
    fields["metadata"]["user_id"] = json.dumps({"session_id": "v"})
    sent["baggage"] = ",".join(f"{one.name}=v" for one in sources if one.place == "W3C baggage")
    told = [name.namespace for name in episode_names(read_hints(sent, fields), fields)]
    assert told == [one.namespace for one in sources]


# Errors


def test_every_error_class_is_either_described_or_never_an_answer() -> None:
    assert set(errors.WHERE) == set(errors.subclasses())
    assert errors.codes_by_class().keys() >= {
        one.name for one in errors.error_classes() if one.codes
    }


def test_every_code_in_the_sources_is_described() -> None:
    tree = [node for text in SOURCES.values() for node in ast.walk(ast.parse(text))]
    keywords = [node for node in tree if isinstance(node, ast.keyword) and node.arg == "code"]
    constants = [one for keyword in keywords for one in ast.walk(keyword.value)]
    said = {one.value for one in constants if isinstance(one, ast.Constant)}
    assert said - {None} == {code for one in errors.error_classes() for code in one.codes}


def test_every_status_of_what_is_not_read_is_described() -> None:
    names = ("connection.py", "parsing.py")
    modules = [ROOT / "proxy" / "http" / name for name in names]
    nodes = [node for path in modules for node in ast.walk(ast.parse(path.read_text()))]
    numbers = {node.value for node in nodes if isinstance(node, ast.Constant)}
    assert {one for one in numbers if one in range(400, 600)} == set(errors.NOT_READ)


# Schemas


def references(value: object) -> list[str]:
    """Every `$ref` in a document."""
    if isinstance(value, list):
        return [found for one in value for found in references(one)]
    if not isinstance(value, dict):
        return []
    below = [found for one in value.values() for found in references(one)]
    return [*below, *([value["$ref"]] if "$ref" in value else [])]


def test_the_documents_schemas_are_schemas_and_all_are_used() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)
    assert {f"#/components/schemas/{name}" for name in schemas} == set(references(DOCUMENT))


STATEMENTS: list[tuple[bool, Any]] = [
    (True, {"value": 0.5, "episode": "e"}),
    (True, {"metric": "reward", "value": 1, "response": "chatcmpl-1"}),
    (True, {"metric": "latency", "value": -2, "call": str(new_id())}),
    (True, {"metric": None, "value": 1, "episode": "e", "call": None}),
    (True, {"metric": "tool_status", "value": "ok", "episode": "e"}),
    (True, {"metric": "tool_status", "value": "error", "episode": "e", "id": "c", "ms": 3.5}),
    (True, [{"value": 1, "episode": "e"}, {"value": 0, "episode": "f"}]),
    (False, []),
    (False, "text"),
    (False, {"value": 1}),
    (False, {"episode": "e"}),
    (True, {"value": True, "episode": "e"}),
    (True, {"metric": "verdict", "value": "good", "episode": "e"}),
    (True, {"metric": "verdict", "value": "v1.2", "episode": "e", "withdrawn": False}),
    (True, {"withdrawn": True, "episode": "e"}),
    (True, {"withdrawn": True, "value": None, "episode": "e"}),
    (False, {"value": None, "episode": "e"}),
    (False, {"withdrawn": False, "episode": "e"}),
    (False, {"withdrawn": True, "value": 1, "episode": "e"}),
    (False, {"withdrawn": "yes", "value": 1, "episode": "e"}),
    (False, {"metric": "tool_status", "withdrawn": True, "episode": "e"}),
    (False, {"value": "0.5", "episode": "e"}),
    (False, {"value": "True", "episode": "e"}),
    (False, {"value": "-1e3", "episode": "e"}),
    (False, {"value": "", "episode": "e"}),
    (False, {"value": "g" * 257, "episode": "e"}),
    (False, {"value": 1, "episode": ""}),
    (False, {"value": 1, "episode": "e" * 1025}),
    (False, {"value": 1, "episode": "e\0"}),
    (False, {"value": 1, "episode": "e", "response": "r"}),
    (False, {"value": 1, "episode": "e", "id": "c"}),
    (False, {"value": 1, "episode": "e", "unknown": 1}),
    (False, {"metric": "tool_status", "value": "fine", "episode": "e"}),
    (False, {"metric": "tool_status", "value": "ok", "episode": "e", "ms": "3"}),
    (False, [{"value": 1, "episode": "e"}, {"value": 1}]),
]


@pytest.mark.parametrize(("good", "body"), STATEMENTS)
def test_the_schema_of_feedback_takes_what_feedback_takes(good: bool, body: Any) -> None:
    content = DOCUMENT["paths"]["/feedback"]["post"]["requestBody"]["content"]
    schema = content["application/json"]["schema"] | {"components": DOCUMENT["components"]}
    assert Draft202012Validator(schema).is_valid(body) is good
    try:
        parse_feedback(json.dumps(body).encode(), datetime.now(UTC), None)
    except BadRequest:
        assert not good
    else:
        assert good


@pytest.mark.parametrize(
    ("good", "key"),
    [(True, "k"), (True, "run 7"), (True, "k" * 256), (False, ""), (False, "k" * 257)],
)
def test_the_schema_of_an_idempotency_key_takes_what_feedback_takes(good: bool, key: str) -> None:
    [parameter] = DOCUMENT["paths"]["/feedback"]["post"]["parameters"]
    assert Draft202012Validator(parameter["schema"]).is_valid(key) is good
    try:
        parse_feedback(b'{"value": 1, "episode": "e"}', datetime.now(UTC), key)
    except BadRequest:
        assert not good
    else:
        assert good


def test_the_schema_of_readiness_has_the_fields_that_are_told() -> None:
    schema = DOCUMENT["components"]["schemas"]["Readiness"]["properties"]
    state = get_args(State)[0]
    workers = readiness([ProcessState(name="w", state=state, since=0.0, restarts=0)])[1]
    assert set(workers[0]) == set(schema["workers"]["items"]["properties"])
    assert set(Progress().told()) == set(schema["drain"]["properties"])
