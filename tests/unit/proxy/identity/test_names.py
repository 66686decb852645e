"""Names that tools and frameworks give their sessions: read, kept apart, put aside if unusable."""

import json
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.identity.identify import (
    MAX_BAGGAGE,
    SESSION_HEADERS,
    episode_names,
    parse_baggage,
    read_hints,
    trace_id,
)

SESSION = "57a121ec-f78c-48c3-a745-e3036a3ecc33"
TRACE = "0af7651916cd43dd8448eb211c80319c"


def keys(headers: dict[str, str], fields: dict[str, Any] | None = None) -> list[tuple[str, str]]:
    told = read_hints(headers, fields or {})
    return [(name.key, name.method) for name in episode_names(told, fields or {})]


@pytest.mark.parametrize(("header", "namespace"), SESSION_HEADERS)
def test_a_tools_session_header_names_an_episode(header: str, namespace: str) -> None:
    assert keys({header: SESSION}) == [(f"{namespace}:{SESSION}", "session")]


def test_equal_ids_of_two_tools_are_two_episodes() -> None:
    names = {keys({header: "1"})[0][0] for header in ("helicone-session-id", "x-litellm-trace-id")}
    assert len(names) == 2


def test_a_sub_agents_session_is_its_parents_episode() -> None:
    headers = {"x-session-id": "ses_child", "x-parent-session-id": "ses_parent"}
    assert keys(headers)[0] == ("session:ses_parent", "session")


@pytest.mark.parametrize(
    "user_id",
    [
        f"user_{'0' * 64}_account__session_{SESSION}",
        f"user_{'0' * 64}_account_{SESSION[::-1]}_session_{SESSION}",
        json.dumps({"device_id": "d", "account_uuid": "", "session_id": SESSION}),
    ],
)
def test_claude_codes_session_within_the_user_id(user_id: str) -> None:
    expected = [(f"claude-code:{SESSION}", "session")]
    assert keys({}, {"metadata": {"user_id": user_id}}) == expected


@pytest.mark.parametrize(
    "fields",
    [
        {"user": SESSION},
        {"user": f"user_1_account__session_{SESSION}"},
        {"metadata": {"user_id": "somebody"}},
        {"metadata": {"user_id": "{broken"}},
        {"metadata": {"user_id": 7}},
        {"metadata": {"user": SESSION}},
        {"safety_identifier": SESSION, "prompt_cache_key": SESSION},
        {"metadata": [SESSION]},
        {"metadata": {"session_id": True}},
        {"metadata": {"session_id": {"id": SESSION}}},
        {"conversation": None},
    ],
)
def test_a_person_is_no_run_and_an_odd_shape_no_name(fields: dict[str, Any]) -> None:
    assert keys({}, fields) == []


@pytest.mark.parametrize(
    ("fields", "key", "method"),
    [
        ({"metadata": {"pawl_episode": "e7"}}, "e7", "metadata"),
        ({"metadata": {"session_id": "s"}}, "session:s", "metadata"),
        ({"metadata": {"session_id": 7}}, "session:7", "metadata"),
        ({"metadata": {"conversation_id": "c"}}, "conversation:c", "metadata"),
        ({"metadata": {"thread_id": "t"}}, "thread:t", "metadata"),
        ({"metadata": {"litellm_session_id": "l"}}, "litellm:l", "metadata"),
        ({"litellm_session_id": "l"}, "litellm:l", "metadata"),
        ({"session_id": "s"}, "session:s", "metadata"),
        ({"conversation": "conv_1"}, "conversation:conv_1", "response"),
        ({"conversation": {"id": "conv_1"}}, "conversation:conv_1", "response"),
    ],
)
def test_fields_that_name_an_episode(fields: dict[str, Any], key: str, method: str) -> None:
    assert keys({}, fields) == [(key, method)]


@pytest.mark.parametrize(
    ("baggage", "key"),
    [
        ("pawl.episode=e7", "e7"),
        ("other=1, session.id = s%20t ;ttl=3", "session:s t"),
        ("gen_ai.conversation.id=c", "conversation:c"),
        ("langfuse_session_id=l", "langfuse:l"),
    ],
)
def test_baggage_that_names_an_episode(baggage: str, key: str) -> None:
    assert keys({"baggage": baggage}) == [(key, "baggage")]


def test_what_is_nearer_to_the_call_counts_first() -> None:
    fields = {"metadata": {"session_id": "m"}, "conversation": "c"}
    headers = {"baggage": "session.id=b", "x-session-id": "h"}
    assert [key for key, _ in keys(headers, fields)] == [
        "session:h",
        "session:m",
        "conversation:c",
        "session:b",
    ]


@given(st.text(max_size=60))
def test_any_baggage_is_read(header: str) -> None:
    for key in parse_baggage(header):
        assert key.strip() == key != ""


@given(st.dictionaries(st.from_regex(r"[a-z._]{1,8}", fullmatch=True), st.text(max_size=8)))
def test_baggage_is_read_as_it_was_written(members: dict[str, str]) -> None:
    header = ",".join(f"{key}={quote(value, safe='')};p=1" for key, value in members.items())
    assert parse_baggage(header) == members


def test_baggage_beyond_what_is_passed_on_says_nothing() -> None:
    assert parse_baggage("a=" + "x" * MAX_BAGGAGE) == {}


@pytest.mark.parametrize(
    ("header", "trace"),
    [
        (f"00-{TRACE}-b7ad6b7169203331-01", TRACE),
        (f" 00-{TRACE}-b7ad6b7169203331-00 ", TRACE),
        (f"cc-{TRACE}-b7ad6b7169203331-01-more", TRACE),
        (f"ff-{TRACE}-b7ad6b7169203331-01", None),
        (f"00-{'0' * 32}-b7ad6b7169203331-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"00-{TRACE.upper()}-b7ad6b7169203331-01", None),
        (f"00-{TRACE}-b7ad6b7169203331", None),
        ("", None),
    ],
)
def test_a_traceparent_names_its_trace(header: str, trace: str | None) -> None:
    assert trace_id(header) == trace
