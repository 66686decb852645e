"""The reference is what the code says: generated pages, and the HTTP API's routes to fields."""

import ast
import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Final, get_args

import pytest
from jsonschema import Draft202012Validator

from pawl.settings import DoctorSettings, known_variables
from proxy import errors
from proxy import routing as routes
from proxy.errors import BadRequest, NotAllowed, ProxyError
from proxy.feedback_body import parse_feedback
from proxy.identity.identify import episode_names, read_hints
from proxy.ingester.admin import admin_app
from proxy.ingester.drain import DrainState
from proxy.metrics import CALLS
from proxy.routing import RULES, find_route
from proxy.shared_memory import ProcessState, State, readiness
from scripts.reference import FOLDER, METRICS, SETTINGS, metrics_of, name_of, pages
from store.ids import new_id
from tests.conftest import ROOT

DOCUMENT: Final[dict[str, Any]] = json.loads((ROOT / "docs/reference/openapi.json").read_text())
PAGE: Final = (ROOT / "docs/reference/http.md").read_text()
GENERATED: Final = pages()
SOURCES: Final = {path: path.read_text() for path in sorted((ROOT / "proxy").rglob("*.py"))}
# Errors that are never the answer to a request.
NEVER_ANSWERED: Final = (
    errors.NoModels,
    errors.SpoolInUse,
    errors.DoesNotStart,
    errors.BadUpstreams,
    errors.BadRedaction,
    errors.NoSpans,
)


def cells(heading: str) -> list[list[str]]:
    """The rows of the table below the heading, as the page has them."""
    text = PAGE.partition(heading)[2].partition("\n| --- ")[2].partition("\n\n")[0]
    return [[cell.strip(" `") for cell in line.split(" |")[:-1]] for line in text.split("\n| ")[1:]]


# Routes


def test_http_reference_lists_exactly_the_routes_of_recorded_calls() -> None:
    calls = {path for (_, path), route in routes._EXACT.items() if route.wire_format}
    documented = set(DOCUMENT["paths"]) - {"/feedback", "/healthz", "/readyz", "/metrics"}
    assert documented == calls == {row[0].split()[1] for row in cells("## Recorded calls")}
    assert all(set(DOCUMENT["paths"][path]) == {"post"} for path in documented)
    assert find_route("POST", "/feedback").scope == "feedback"


def forwarded() -> list[tuple[str, str]]:
    """Every method and path of the list of forwarded routes, with an id in each place."""
    return [
        (method, re.sub(r"\{\w+\}", "x1", path.replace("[/{id}] (0 to ", "/x1 ").partition(" ")[0]))
        for route in DOCUMENT["x-pawl-forwarded"]["routes"]
        for method in route["methods"]
        for path in route["paths"]
    ]


def test_every_route_documented_as_forwarded_is_forwarded() -> None:
    for method, path in forwarded():
        assert find_route(method, path).wire_format is None, (method, path)


def test_every_forwarded_route_is_documented() -> None:
    listed = forwarded()
    for methods, pattern, rule in RULES:
        matching = [
            route
            for route in DOCUMENT["x-pawl-forwarded"]["routes"]
            if (route["account"], route["kept"]) == (rule.manages_account, rule.reaches_stored)
        ]
        assert matching, rule.label
        for method in methods:
            assert any(one == method and pattern.match(path) for one, path in listed)
    exact = {where for where, route in routes._EXACT.items() if not route.wire_format}
    assert exact - {("POST", "/feedback")} <= set(listed)


def test_documented_number_of_path_segments_is_the_largest_accepted() -> None:
    for route in DOCUMENT["x-pawl-forwarded"]["routes"]:
        for path in route["paths"]:
            if most := re.search(r"\[/\{id\}\] \(0 to (\d+) times\)", path):
                start, count = path[: most.start()], int(most[1])
                assert find_route("GET", start + "/x" * count).wire_format is None
                with pytest.raises(NotAllowed):
                    find_route("GET", start + "/x" * (count + 1))


def test_documented_path_prefix_has_the_parts_that_routes_accept() -> None:
    prefix = "".join(f"/{part}/x" for part in routes.PREFIX_NAMES)
    route = find_route("POST", f"{prefix}/v1/chat/completions")
    assert {getattr(route, part) for part in routes.PREFIX_NAMES} == {"x"}
    description = DOCUMENT["servers"][0]["variables"]["prefix"]["description"]
    for part in routes.PREFIX_NAMES:
        assert f"[/{part}/{{{part}}}]" in description
        assert f"`/{part}/{{{part}}}`" in PAGE


def test_documented_admin_routes_are_exactly_the_served_admin_routes() -> None:
    nothing: Any = None
    served = {
        resource.canonical
        for resource in admin_app(nothing, nothing, nothing, nothing).router.resources()
    }
    assert served == {path for path, item in DOCUMENT["paths"].items() if "get" in item}


# Headers


def test_documented_headers_are_exactly_the_x_pawl_headers_of_the_sources() -> None:
    named = {
        name for text in SOURCES.values() for name in re.findall(r"x-pawl-[a-z]+[a-z-]*", text)
    }
    described = {row[0] for title in ("Of a request", "Of a reply") for row in cells(title)}
    assert named | {"x-pawl-agent", "x-pawl-task", "x-pawl-split"} == described - {"Retry-After"}
    components = DOCUMENT["components"]
    assert described - {"x-pawl-tenant"} == {
        *components["parameters"],
        *components["headers"],
    } - {"Idempotency-Key"}


def test_documented_sources_of_an_episodes_name_are_in_order_of_precedence() -> None:
    sources = cells("NAMESPACE:VALUE")
    fields: dict[str, Any] = {"metadata": {}}
    sent: dict[str, str] = {}
    for place, name, _ in sources:
        if place == "header":
            sent[name] = "v"
        elif place == "body field":
            fields[name] = "v"
        elif place.startswith("metadata"):
            fields["metadata"][name] = "v"
    fields["metadata"]["user_id"] = json.dumps({"session_id": "v"})
    sent["baggage"] = ",".join(f"{name}=v" for place, name, _ in sources if place == "W3C baggage")
    names = [name.namespace for name in episode_names(read_hints(sent, fields), fields)]
    assert names == [namespace for _, _, namespace in sources]


# Errors


def subclasses(root: type[ProxyError] = ProxyError) -> Iterator[type[ProxyError]]:
    for error in root.__subclasses__():
        if error.__module__ == errors.__name__:
            yield error
            yield from subclasses(error)


def test_every_error_that_a_client_can_get_is_described() -> None:
    answered = {
        (str(error.status), error.__name__, error.fault, error.kind)
        for error in subclasses()
        if error not in NEVER_ANSWERED
    }
    assert answered == {tuple(row[:4]) for row in cells("## Errors")}


def test_every_error_code_in_the_sources_is_documented() -> None:
    nodes = [node for text in SOURCES.values() for node in ast.walk(ast.parse(text))]
    keywords = [node for node in nodes if isinstance(node, ast.keyword) and node.arg == "code"]
    constants = [one for keyword in keywords for one in ast.walk(keyword.value)]
    codes = {one.value for one in constants if isinstance(one, ast.Constant)} - {None}
    assert codes == {code for row in cells("## Errors") for code in re.findall(r"\w+", row[4])}


def test_every_http_status_for_an_unreadable_request_is_documented() -> None:
    modules = [ROOT / "proxy" / "http" / name for name in ("server.py", "parsing.py")]
    nodes = [node for path in modules for node in ast.walk(ast.parse(path.read_text()))]
    numbers = {node.value for node in nodes if isinstance(node, ast.Constant)}
    statuses = {number for number in numbers if number in range(400, 600)}
    text = PAGE.partition("Bytes that are not a valid request")[2].partition("\n\n")[0]
    assert {int(number) for number in re.findall(r"\b[45]\d\d\b(?= \()", text)} == statuses


# Schemas


def references(value: object) -> list[str]:
    """Every `$ref` in a document."""
    if isinstance(value, list):
        return [found for one in value for found in references(one)]
    if not isinstance(value, dict):
        return []
    below = [found for one in value.values() for found in references(one)]
    return [*below, *([value["$ref"]] if "$ref" in value else [])]


def test_every_openapi_component_is_used_and_every_openapi_schema_is_valid() -> None:
    components = DOCUMENT["components"]
    for schema in components["schemas"].values():
        Draft202012Validator.check_schema(schema)
    kinds = components.keys() - {"securitySchemes"}
    defined = {f"#/components/{kind}/{name}" for kind in kinds for name in components[kind]}
    assert defined == set(references(DOCUMENT))


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
    (True, {"value": 0, "correction": "So it is.", "episode": "e"}),
    (True, {"withdrawn": True, "correction": None, "episode": "e"}),
    (False, {"correction": "So it is.", "episode": "e"}),
    (False, {"value": 0, "correction": "", "episode": "e"}),
    (False, {"value": 0, "correction": " \n", "episode": "e"}),
    (False, {"value": 0, "correction": "s" * 65_537, "episode": "e"}),
    (False, {"withdrawn": True, "correction": "So it is.", "episode": "e"}),
    (True, {"value": 0, "correction": "So it is.", "source": None, "episode": "e"}),
    (False, {"value": 0, "correction": "So it is.", "source": "judge", "episode": "e"}),
    (False, {"metric": "tool_status", "value": "ok", "correction": "So.", "episode": "e"}),
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
def test_openapi_feedback_schema_accepts_exactly_the_feedback_that_the_parser_accepts(
    good: bool, body: Any
) -> None:
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
def test_openapi_schema_accepts_exactly_the_idempotency_keys_that_the_parser_accepts(
    good: bool, key: str
) -> None:
    parameter = DOCUMENT["components"]["parameters"]["Idempotency-Key"]
    assert Draft202012Validator(parameter["schema"]).is_valid(key) is good
    try:
        parse_feedback(b'{"value": 1, "episode": "e"}', datetime.now(UTC), key)
    except BadRequest:
        assert not good
    else:
        assert good


def test_openapi_readiness_schema_has_the_fields_of_the_readiness_reply() -> None:
    schema = DOCUMENT["components"]["schemas"]["Readiness"]["properties"]
    state = get_args(State)[0]
    workers = readiness([ProcessState(name="w", state=state, since=0.0, restarts=0)])[1]
    assert set(workers[0]) == set(schema["workers"]["items"]["properties"])
    assert set(DrainState().readyz_fields()) == set(schema["drain"]["properties"])


# Generated pages


@pytest.mark.parametrize("name", sorted(GENERATED))
def test_generated_reference_page_is_up_to_date(name: str) -> None:
    assert (FOLDER / name).read_text() == GENERATED[name], f"{name} is out of date: run `make docs`"


def test_reference_folder_has_only_generated_pages_and_the_http_reference() -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(GENERATED) | {"http.md", "openapi.json"}


def test_every_setting_has_a_row_in_the_reference() -> None:
    named = set(re.findall(r"^\| `(\w+)` \|", GENERATED["settings.md"], re.MULTILINE))
    assert named == known_variables() | {"DATABASE_URL"}


def test_every_settings_class_that_a_command_reads_has_a_section_in_the_reference() -> None:
    folders = [ROOT / name for name in ("controller", "console", "pawl")]
    sources = [path.read_text() for folder in folders for path in folder.rglob("*.py")]
    read = {name for text in sources for name in re.findall(r"read_settings\(([A-Z]\w+)\)", text)}
    # It has the settings of all processes, and none of its own.
    documented = {field for kind in SETTINGS.values() for field in kind.model_fields}
    assert DoctorSettings.model_fields.keys() <= documented
    assert read <= {kind.__name__ for kind in (*SETTINGS.values(), DoctorSettings)}


def test_every_packaged_recipe_is_listed_in_the_reference() -> None:
    names = {path.stem for path in (ROOT / "trainer/recipes").glob("*.toml")}
    assert set(re.findall(r"^- \[`([\w-]+)`\]", GENERATED["recipe.md"], re.MULTILINE)) == names


def test_every_metric_has_a_row_in_the_reference() -> None:
    metrics = [metric for module in METRICS.values() for metric in metrics_of(module)]
    assert CALLS in metrics
    assert all(f"| `{name_of(metric)}` |" in GENERATED["metrics.md"] for metric in metrics)
