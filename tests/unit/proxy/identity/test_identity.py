"""Who a call belongs to: what names it first, then what it repeats, else an episode of its own."""

import json
from typing import Any
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.formats.base import ModelRequest, ReplySummary
from proxy.formats.chat import CHAT
from proxy.identity.call_memory import CallMemory, provided_fingerprints
from proxy.identity.identify import CallIdentity, identify, retry_count
from proxy.routing import Kind, Route
from store.records import ToolCall
from store.tenants import DEFAULT, own_digests, scoped, tenant_of

CALL, EARLIER = UUID("01a1f80b-8bb3-758b-b889-c07dbbff7a56"), UUID(int=1)
PLAIN = Route(kind=Kind.CALL, path="/v1/chat/completions", wire_format=CHAT)
NAMED = Route(kind=Kind.CALL, path="/v1/chat/completions", task="t", episode="u", agent="a")
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
FIRST: dict[str, Any] = {"messages": [{"role": "user", "content": "q"}]}
NEXT: dict[str, Any] = {
    "messages": [
        *FIRST["messages"],
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "r"},
    ]
}

TOOL = ToolCall(id="chatcmpl-tool-0123456789abcdef", name="f", arguments="{}")
ANSWER = {"messages": [{"role": "tool", "tool_call_id": TOOL.id, "content": "1"}]}


def who(
    headers: dict[str, str] | None = None,
    route: Route = PLAIN,
    fields: dict[str, Any] | None = None,
    stitches: CallMemory | None = None,
) -> CallIdentity:
    fields = FIRST if fields is None else fields
    body = json.dumps(fields).encode()
    request = ModelRequest(body, fields=fields)
    return identify(headers or {}, route, request, str(CALL), stitches or CallMemory())


def remembering(*episodes: str) -> CallMemory:
    """A memory in which each of these was asked FIRST, and replied "a"."""
    stitches = CallMemory()
    for episode in episodes:
        stitches.provide(provided_fingerprints(CHAT.turns, FIRST, ReplySummary(text="a")), episode)
    return stitches


def test_without_any_fingerprint_a_call_is_an_episode_of_its_own() -> None:
    found = who()
    assert (found.episode, found.method, found.agent) == (str(CALL), "own", "default")
    assert (found.task, found.confidence, found.needs) == (None, "certain", ())


def test_headers_win_over_the_url_and_the_url_over_the_rest() -> None:
    others = {"x-session-id": "s", "baggage": "pawl.agent=b,pawl.task=c"}
    found = who(others | {"x-pawl-episode": "h"}, NAMED)
    assert (found.episode, found.method) == ("h", "header")
    assert (found.agent, found.task) == ("a", "t")
    found = who(others, NAMED)
    assert (found.episode, found.method, found.confidence) == ("u", "url", "certain")


def test_a_tools_session_wins_over_what_the_content_says() -> None:
    found = who({"x-session-id": "s"}, fields=NEXT, stitches=remembering("e1"))
    assert (found.episode, found.method, found.needs) == ("session:s", "session", ())


@pytest.mark.parametrize(
    ("value", "wrong"), [("", "empty"), ("x" * 257, "longer"), ("a\x00b", "unprintable")]
)
@pytest.mark.parametrize("header", ["x-pawl-episode", "x-session-id"])
def test_an_unusable_name_is_a_warning_not_an_error(header: str, value: str, wrong: str) -> None:
    found = who({header: value})
    assert found.method == "own"
    assert wrong in found.warnings[0]
    assert header in found.warnings[0]


def test_an_unusable_name_gives_way_to_the_next() -> None:
    found = who({"x-pawl-episode": "", "x-session-id": "s"})
    assert (found.episode, len(found.warnings)) == ("session:s", 1)


@pytest.mark.parametrize(
    ("headers", "fields", "agent"),
    [
        ({"x-openai-subagent": "review"}, {}, "review"),
        ({"x-litellm-agent-id": "writer"}, {}, "writer"),
        ({"x-claude-code-agent-id": "a1b2"}, {}, "subagent"),
        ({"x-parent-session-id": "p", "x-session-id": "s"}, {}, "subagent"),
        ({}, {"metadata": {"agent_name": "checker"}}, "checker"),
        ({}, {"metadata": {"pawl_agent": "w", "agent_name": "checker"}}, "w"),
        ({"baggage": "gen_ai.agent.name=b"}, {}, "b"),
        ({"baggage": "gen_ai.agent.name=b,pawl.agent=p"}, {}, "p"),
        ({"x-pawl-agent": "ours", "x-openai-subagent": "review"}, {}, "ours"),
    ],
)
def test_the_agents_role(headers: dict[str, str], fields: dict[str, Any], agent: str) -> None:
    assert who(headers, fields=fields).agent == agent


def test_the_task_by_metadata_and_baggage() -> None:
    assert who(fields={"metadata": {"pawl_task": "t1"}}).task == "t1"
    assert who({"baggage": "pawl.task=t2"}).task == "t2"


def test_words_that_go_on_are_left_to_the_ledger_and_keep_their_version() -> None:
    found = who({"traceparent": TRACEPARENT}, fields=NEXT, stitches=remembering("e1"))
    assert (found.episode, found.method, found.confidence) == (str(CALL), "own", "likely")
    assert found.needs == provided_fingerprints(CHAT.turns, FIRST, ReplySummary(text="a"))
    assert found.follows == "e1"


@pytest.mark.parametrize("episodes", [(), ("e1", "e2")])
def test_words_that_nobody_or_several_said_are_followed_by_nobody(episodes: tuple[str]) -> None:
    found = who(fields=NEXT, stitches=remembering(*episodes))
    assert (found.method, found.confidence, len(found.needs)) == ("own", "likely", 1)
    assert found.follows == found.episode == str(CALL)


def test_a_tool_call_that_is_answered_joins() -> None:
    stitches = CallMemory()
    stitches.provide(
        provided_fingerprints(CHAT.turns, FIRST, ReplySummary(tool_calls=(TOOL,))), "e1", "e0"
    )
    found = who({"traceparent": TRACEPARENT}, fields=ANSWER, stitches=stitches)
    assert (found.episode, found.method, found.confidence) == ("e1", "tool_call", "certain")
    assert (found.follows, found.needs) == ("e0", ())


def test_a_tool_call_that_two_episodes_were_given_is_in_doubt() -> None:
    stitches = CallMemory()
    for episode in ("e1", "e2"):
        stitches.provide(
            provided_fingerprints(CHAT.turns, FIRST, ReplySummary(tool_calls=(TOOL,))), episode
        )
    found = who({"traceparent": TRACEPARENT}, fields=ANSWER, stitches=stitches)
    assert (found.episode, found.method, found.confidence) == (str(CALL), "own", "doubtful")
    assert found.needs


def test_a_trace_joins_what_repeats_nothing() -> None:
    found = who({"traceparent": TRACEPARENT})
    assert found.episode == f"trace:{TRACEPARENT[3:35]}"
    assert (found.method, found.confidence) == ("trace", "likely")
    assert who({"traceparent": "00-broken"}).method == "own"


def test_a_retry_joins_the_attempt_that_failed() -> None:
    stitches = CallMemory()
    stitches.failed(json.dumps(FIRST).encode(), "e1", EARLIER)
    assert who(stitches=stitches).method == "own"
    found = who({"x-stainless-retry-count": "1"}, stitches=stitches)
    assert (found.episode, found.method, found.retry) == ("e1", "retry", 1)
    assert (found.retry_of, found.confidence) == (EARLIER, "likely")
    again = who({"x-stainless-retry-count": "2"}, stitches=stitches)
    assert (again.method, again.retry_of) == ("own", None)


def test_a_named_retry_repeats_its_own_attempt() -> None:
    stitches = CallMemory()
    stitches.failed(json.dumps(FIRST).encode(), "e1", EARLIER)
    headers = {"x-stainless-retry-count": "1"}
    other = who(headers | {"x-pawl-episode": "e2"}, stitches=stitches)
    same = who(headers | {"x-pawl-episode": "e1"}, stitches=stitches)
    assert (other.retry_of, same.retry_of, same.method) == (None, EARLIER, "header")


@pytest.mark.parametrize(
    ("value", "count"), [("0", 0), ("3", 3), ("", 0), ("-1", 0), ("many", 0), ("9999", 0), ("²", 0)]
)
def test_what_an_sdk_counts(value: str, count: int) -> None:
    assert retry_count({"x-stainless-retry-count": value}) == count


@given(
    st.dictionaries(
        st.sampled_from(["x-pawl-episode", "x-session-id", "baggage", "traceparent"]), st.text()
    ),
    st.dictionaries(st.sampled_from(["metadata", "conversation", "session_id"]), st.text()),
)
def test_no_value_fails_a_call(headers: dict[str, str], fields: dict[str, Any]) -> None:
    found = who(headers, fields=fields)
    assert found.episode.strip()
    assert found.episode.isprintable()


def test_another_tenant_joins_nothing_that_was_said_or_failed_here() -> None:
    stitches = CallMemory()
    first = identify({}, PLAIN, ModelRequest(b"", fields=FIRST), scoped("a", "1"), stitches)
    told = own_digests(
        "a", provided_fingerprints(CHAT.turns, FIRST, ReplySummary(tool_calls=(TOOL,)))
    )
    stitches.provide(told, first.episode)
    stitches.failed(b"body", first.episode, CALL)
    fields: dict[str, Any] = {"messages": [*FIRST["messages"], *ANSWER["messages"]]}
    request = ModelRequest(b"body", fields=fields)
    retry = {"x-stainless-retry-count": "1"}
    for tenant in ("b", DEFAULT):
        found = identify(retry, PLAIN, request, scoped(tenant, "2"), stitches)
        assert (found.episode, found.retry_of) == (scoped(tenant, "2"), None)
        assert not set(found.needs) & set(told)
    joined = identify({}, PLAIN, request, scoped("a", "2"), stitches)
    assert (joined.episode, joined.method) == (scoped("a", "1"), "tool_call")
    again = identify(retry, PLAIN, request, scoped("a", "3"), stitches)
    assert (again.episode, again.retry_of) == (scoped("a", "1"), CALL)


def test_all_names_of_a_call_are_its_tenants() -> None:
    named = identify({}, NAMED, ModelRequest(b"", fields=FIRST), scoped("a", "1"), CallMemory())
    assert (named.episode, named.task, named.agent) == (scoped("a", "u"), scoped("a", "t"), "a")
    traced = identify(
        {"traceparent": TRACEPARENT}, PLAIN, ModelRequest(b""), scoped("a", "1"), CallMemory()
    )
    assert traced.episode.startswith(scoped("a", "trace:"))
    # The task decides about the split by the name that was given.
    evaluated = msgspec.structs.replace(NAMED, task="eval/t")
    found = identify({}, evaluated, ModelRequest(b"", fields=FIRST), scoped("a", "1"), CallMemory())
    assert (found.split, found.task) == ("eval", scoped("a", "eval/t"))


def test_no_name_that_a_client_gives_is_another_tenants() -> None:
    for name in ("b\x1fu", "\x1fu", "default\x1fu"):
        found = who({"x-pawl-episode": name, "x-pawl-task": name})
        assert (tenant_of(found.episode), found.task) == (DEFAULT, None)
        assert found.warnings
