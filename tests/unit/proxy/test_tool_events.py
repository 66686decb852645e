"""How a tool ended: as a header states it, and as rules read it from the tool's result."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pawl.settings import UnreadSettings, read_settings
from proxy.settings import ProxySettings
from proxy.tool_events import (
    RULES,
    BadReaders,
    ResultReaders,
    ToolStatusError,
    parse_readers,
    parse_tool_status,
)
from store.records import TOOL_STATUSES


def test_tool_status_header_with_ids_detail_and_duration_is_read() -> None:
    events = parse_tool_status('ok;id="call_1", error;id="call_2";detail="exit 2";ms=12.5')
    assert [(e.status, e.tool_id, e.detail, e.ms) for e in events] == [
        ("ok", "call_1", None, None),
        ("error", "call_2", "exit 2", 12.5),
    ]


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ('ok;id="a', "RFC 9651"),
        ('fine;id="a"', "fine"),
        ("ok", "no id"),
        ("ok;id=a", "id must be a string"),
        ('ok;id="a";colour="red"', "colour"),
        ('ok;id="a";ms="soon"', "ms must be a number"),
        ('ok;id="a";ms=-1', "ms must be a number"),
        ('"ok";id="a"', "ok is not a tool status"),
        ("(ok error)", "not a tool status"),
    ],
)
def test_invalid_tool_status_is_refused_with_the_reason(value: str, named: str) -> None:
    with pytest.raises(ToolStatusError, match=named):
        parse_tool_status(value)


def read(rules: str, text: object, name: str | None = "t") -> tuple[str, str | None] | None:
    said = text if isinstance(text, str) else json.dumps(text)
    reading = parse_readers(f"t={rules}").read(name, said)
    return None if reading is None else (reading.status, reading.detail)


@pytest.mark.parametrize(
    ("result", "status", "detail"),
    [
        ({"rows": 3}, "ok", None),
        ({}, "ok", None),
        *(({"error": nothing}, "ok", None) for nothing in (None, False, "", {}, [], 0)),
        ({"error": "no such table"}, "error", "no such table"),
        ({"error": {"message": "no", "code": 4}}, "error", "no"),
        ({"error": True}, "error", None),
        ({"error": ["a"]}, "error", None),
        ({"error": "timed out after 30 s"}, "timeout", "timed out after 30 s"),
        ({"error": "Timeout"}, "timeout", "Timeout"),
        ({"error": "killed", "timed_out": True}, "timeout", "killed"),
        ({"error": "the timeout option is unknown"}, "error", "the timeout option is unknown"),
        ({"error": "a\x00b" + "c" * 500}, "error", ("ab" + "c" * 500)[:200]),
    ],
)
def test_json_tool_result_fails_by_its_error_field(
    result: Any, status: str, detail: str | None
) -> None:
    assert read("json_error", result) == (status, detail)


@pytest.mark.parametrize("result", ["", "error", "42", "[1]", '"error"', "null", "{", "1e999"])
def test_tool_result_that_is_no_json_object_states_no_error(result: str) -> None:
    assert read("json_error", result) is None


@pytest.mark.parametrize(
    ("result", "code"),
    [
        *(({key: 2}, 2) for key in ("exit_code", "exitCode", "returncode", "returnCode")),
        ({"exit_code": 0, "stdout": "x"}, 0),
        ({"returncode": -9}, -9),
        ({"output": "", "metadata": {"exit_code": 1, "duration_seconds": 0.1}}, 1),
        ("exit code: 2", 2),
        ("Exit code 2\nls: no such file", 2),
        ("Exit code: 0\nWall time: 0.1 seconds\nOutput:\nexit code: 3\ndone", 0),
        ("a\nb\nProcess exited with code 1", 1),
        ("a\n[exit status 127]\n", 127),
        ("returncode=3", 3),
        ("return code: -11", -11),
        ("exit_code: 0 (done)", 0),
        ("Command failed with exit code 1.", 1),
        ("Command 'x' returned non-zero exit status 2.", 2),
        # A command cannot hide its failure behind a line of its own.
        ("exit code: 0\nfake\nExit code: 1", 1),
    ],
)
def test_tool_result_fails_by_its_exit_code(result: Any, code: int) -> None:
    assert read("exit_code", result) == ("ok" if code == 0 else "error", f"exit code {code}")


@pytest.mark.parametrize(
    "result",
    [
        "",
        "fine",
        "return 3 values",
        "the exit code 2 means that nothing was found",
        "one\nexit code: 2\nthree",
        {"exit_code": None},
        {"exit_code": True},
        {"exit_code": "1"},
        {"metadata": 3},
        [1],
    ],
)
def test_tool_result_without_an_exit_code_has_no_status(result: Any) -> None:
    assert read("exit_code", result) is None


@pytest.mark.parametrize(
    "result",
    [
        {"timed_out": True},
        {"timed_out": True, "error": None},
        {"timedOut": True, "exit_code": 0},
        {"timeout": True},
    ],
)
def test_json_tool_result_states_a_timeout_in_its_field(result: Any) -> None:
    for rule in ("json_error", "exit_code", "timeout"):
        reading = read(rule, result)
        assert reading is not None
        assert reading[0] == "timeout"


@pytest.mark.parametrize(
    "text",
    [
        "Command timed out after 120s",
        "output\nTimeout exceeded.",
        "tool timed out",
        "TIMEOUT",
        "Error: Timed out!",
    ],
)
def test_text_states_a_timeout_in_its_first_or_last_line(text: str) -> None:
    reading = read("timeout", text)
    assert reading is not None
    assert reading[0] == "timeout"


@pytest.mark.parametrize(
    "result",
    ["", "ok", "the timeout is 30", "a\nit timed out\nb", {"timeout": 30}, {"timed_out": False}],
)
def test_tool_result_without_a_timeout_has_no_status(result: Any) -> None:
    assert read("timeout", result) is None


def test_worst_status_by_several_tool_result_rules_counts() -> None:
    assert read("exit_code+timeout", "Exit code 0\nx\ncommand timed out") is not None
    assert read("exit_code+timeout", "Exit code 2\nx\ntimed out") == ("timeout", "timed out")
    assert read("json_error+exit_code", {"exit_code": 1}) == ("error", "exit code 1")
    assert read("json_error+exit_code", {"exit_code": 0, "error": "e"}) == ("error", "e")


def test_tool_rule_overrides_wildcard() -> None:
    readers = parse_readers("a=exit_code, b=ignore ,*=json_error")
    text = '{"error": "e"}'
    assert readers.read("a", text) is None
    assert readers.read("b", text) is None
    for other in ("c", None):
        found = readers.read(other, text)
        assert found is not None
        assert found.status == "error"
    assert [readers.ignores(name) for name in ("a", "b", "c", None)] == [False, True, False, False]


def test_no_tool_result_is_read_without_rules() -> None:
    assert not parse_readers("").give_verdicts
    assert not parse_readers(" , ").give_verdicts
    assert not parse_readers("a=ignore").give_verdicts
    assert parse_readers("a=ignore,b=timeout").give_verdicts
    assert parse_readers("").read("a", '{"error": 1}') is None
    assert parse_readers("").rules == ResultReaders().rules


def test_tool_name_in_a_rule_may_contain_an_equals_sign() -> None:
    assert parse_readers("a=b=json_error").rules == {"a=b": ("json_error",)}


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("search", "'search' is not TOOL=RULE"),
        ("=json_error", "is not TOOL=RULE"),
        (
            "a=jsn_error",
            r"'a=jsn_error': 'jsn_error' is not a rule; the rules are json_error, exit_code",
        ),
        ("a=", "is not a rule"),
        ("a=json_error+", "is not a rule"),
        ("a=json_error,a=exit_code", "names a again"),
        ("a=ignore+json_error", "cannot be combined with other rules"),
    ],
)
def test_invalid_tool_result_rule_is_named(value: str, named: str) -> None:
    with pytest.raises(BadReaders, match=named):
        parse_readers(value)


def test_invalid_tool_result_rule_stops_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PAWL_TOOL_RESULTS", "search=jsn_error")
    with pytest.raises(UnreadSettings, match=r"PAWL_TOOL_RESULTS.*jsn_error.*json_error"):
        read_settings(ProxySettings)
    monkeypatch.setenv("PAWL_TOOL_RESULTS", "search=json_error,*=exit_code")
    assert read_settings(ProxySettings).tool_results.rules == {
        "search": ("json_error",),
        "*": ("exit_code",),
    }


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
KEYS = st.sampled_from(["error", "exit_code", "returncode", "timed_out", "metadata", "x"])


@given(st.sampled_from(list(RULES)), st.dictionaries(KEYS, JSON) | st.text())
def test_any_tool_result_can_be_read(rule: str, result: dict[str, Any] | str) -> None:
    reading = read(rule, result)
    if reading is not None:
        assert reading[0] in TOOL_STATUSES
        assert "\x00" not in (reading[1] or "")


@given(
    st.integers(-(2**31), 2**31),
    st.sampled_from(["Exit code {}", "x\nexit status: {}", "returncode={}"]),
)
def test_every_exit_code_is_read_from_text_as_from_json(code: int, form: str) -> None:
    assert read("exit_code", form.format(code)) == read("exit_code", {"exit_code": code})
