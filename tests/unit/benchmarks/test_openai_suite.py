"""How two runs of openai-python's suite are compared."""

from pathlib import Path

import pytest

from benchmarks.openai_suite.compare import (
    REFUSAL,
    Outcome,
    compare,
    is_served,
    outcomes,
    requests_seen,
)
from benchmarks.openai_suite.sources import templates, under_v1
from proxy.door.routes import find_route
from proxy.errors import NotAllowed

SPEC = """openapi: 3.1.0
paths:
  /models:
    get: {}
  '/files/{file_id}':
    get: {}
  /files/recent:
    get: {}
components:
  /not-a-path: {}
"""


def test_paths_and_nothing_else_are_mounted_under_v1(tmp_path: Path) -> None:
    mounted = tmp_path / "spec.yml"
    mounted.write_text("\n".join(under_v1(SPEC.split("\n"))))
    assert templates(mounted) == ["/v1/models", "/v1/files/{file_id}", "/v1/files/recent"]
    assert "  /not-a-path" in mounted.read_text()


def test_requests_are_counted_by_the_most_exact_template() -> None:
    log = (
        "[11:00:00 AM] GET /v1/files/abc → 200 OK (1ms)\n"
        "[11:00:01 AM] GET /v1/files/recent?limit=2 → 200 OK (1ms)\n"
        "[11:00:01 AM] GET /v1/files/abc → 200 OK (1ms)\n"
        "           ✗ E2001 /v1/nothing: Path not found\n"
        "[11:00:02 AM] POST /v1/unknown → 404 Not Found (1ms)\n"
    )
    assert requests_seen(log, ["/v1/files/{file_id}", "/v1/files/recent"]) == {
        ("GET", "/v1/files/{file_id}"): 2,
        ("GET", "/v1/files/recent"): 1,
        ("POST", "/v1/unknown"): 1,
    }


def test_every_test_is_the_same_refused_or_different() -> None:
    passed, failed = Outcome(state="passed"), Outcome(state="failure", text="assert 1 == 2")
    refused = Outcome(state="failure", text=f"404: GET /v1/x {REFUSAL}.")
    direct = {"a": passed, "b": passed, "c": passed, "d": failed, "e": passed}
    found = compare(direct, {"a": passed, "b": refused, "c": failed, "d": failed})
    assert found.same == {"passed": 1, "failure": 1}
    assert found.refused == ("b",)
    assert found.different == (
        "c: passed direct, failure through the proxy",
        "e: passed direct, missing through the proxy",
    )


def test_a_report_is_read_whole(tmp_path: Path) -> None:
    report = tmp_path / "junit.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="t" name="a"/>'
        '<testcase classname="t" name="b"><failure message="no">where</failure></testcase>'
        '<testcase classname="t" name="c"><skipped message="why"/></testcase>'
        "</testsuite></testsuites>"
    )
    assert {name: seen.state for name, seen in outcomes(report).items()} == {
        "t::a": "passed",
        "t::b": "failure",
        "t::c": "skipped",
    }
    assert outcomes(report)["t::b"].text == "no\nwhere"


def test_a_refusal_is_known_by_the_allow_lists_own_words() -> None:
    assert is_served("POST", "/v1/chat/completions")
    assert is_served("GET", "/v1/models/{model}")
    assert not is_served("POST", "/v1/load_lora_adapter")
    with pytest.raises(NotAllowed, match=REFUSAL):
        find_route("POST", "/v1/load_lora_adapter")
