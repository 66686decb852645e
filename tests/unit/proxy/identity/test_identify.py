"""Identity: who a call belongs to, by names first, then by what it repeats; and its split."""

import json
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.formats.base import ModelRequest, ReplySummary
from proxy.formats.chat import CHAT
from proxy.identity.call_memory import CallMemory, provided_fingerprints
from proxy.identity.identify import (
    MAX_BAGGAGE,
    SESSION_HEADERS,
    CallIdentity,
    episode_names,
    identify,
    parse_baggage,
    read_hints,
    retry_count,
    split_without_body,
    trace_context,
)
from proxy.routing import Route, find_route
from store.records import EVAL_TASKS, ToolCall
from store.tenants import DEFAULT, scoped, tenant_of

CALL, EARLIER = UUID("01a1f80b-8bb3-758b-b889-c07dbbff7a56"), UUID(int=1)
PATH = "/v1/chat/completions"
# The name of Codex's main agent; a sub-agent's is a path below it.
CODEX_MAIN = "/root"
PLAIN = find_route("POST", PATH)
NAMED = find_route("POST", "/task/t/episode/u/agent/a" + PATH)
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
    memory: CallMemory | None = None,
) -> CallIdentity:
    fields = FIRST if fields is None else fields
    body = json.dumps(fields).encode()
    request = ModelRequest(body, fields=fields)
    return identify(headers or {}, route, request, str(CALL), memory or CallMemory())


SAID = provided_fingerprints(CHAT.turns, FIRST, ReplySummary(text="a"))
ASKED_FOR_A_TOOL = provided_fingerprints(CHAT.turns, FIRST, ReplySummary(tool_calls=(TOOL,)))


def remembering(provided: Sequence[bytes], *episodes: str) -> CallMemory:
    """A memory in which each of the episodes provided the same."""
    memory = CallMemory()
    for episode in episodes:
        memory.provide(provided, episode)
    return memory


def test_without_any_fingerprint_a_call_is_an_episode_of_its_own() -> None:
    found = who()
    assert (found.episode, found.method, found.agent) == (str(CALL), "own", "default")
    assert (found.task, found.confidence, found.needs) == (None, "certain", ())


def test_episode_name_in_a_header_wins_over_the_url_and_the_url_over_other_sources() -> None:
    others = {"x-session-id": "s", "baggage": "pawl.agent=b,pawl.task=c"}
    found = who(others | {"x-pawl-episode": "h"}, NAMED)
    assert (found.episode, found.method) == ("h", "header")
    assert (found.agent, found.task) == ("a", "t")
    found = who(others, NAMED)
    assert (found.episode, found.method, found.confidence) == ("u", "url", "certain")


def test_session_header_wins_over_fingerprints_of_the_content() -> None:
    found = who({"x-session-id": "s"}, fields=NEXT, memory=remembering(SAID, "e1"))
    assert (found.episode, found.method, found.needs) == ("session:s", "session", ())


@pytest.mark.parametrize(
    ("value", "wrong"), [("", "empty"), ("x" * 257, "longer"), ("a\x00b", "unprintable")]
)
@pytest.mark.parametrize("header", ["x-pawl-episode", "x-session-id"])
def test_unusable_episode_name_gives_a_warning_and_no_error(
    header: str, value: str, wrong: str
) -> None:
    found = who({header: value})
    assert found.method == "own"
    assert wrong in found.warnings[0]
    assert header in found.warnings[0]


def test_unusable_episode_name_gives_way_to_the_next_source_of_a_name() -> None:
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
def test_agent_is_named_by_tools_metadata_and_baggage(
    headers: dict[str, str], fields: dict[str, Any], agent: str
) -> None:
    assert who(headers, fields=fields).agent == agent


@pytest.mark.parametrize(
    ("headers", "agent_name", "lane"),
    [
        ({}, None, None),
        ({"x-claude-code-session-id": "s"}, None, None),
        ({"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a1b2"}, None, "a1b2"),
        ({"x-session-affinity": "s"}, None, None),
        ({"x-parent-session-id": "p", "x-session-affinity": "s"}, None, "s"),
        ({}, CODEX_MAIN, None),
        ({}, f"{CODEX_MAIN}/reviewer", f"{CODEX_MAIN}/reviewer"),
        ({}, 7, None),
    ],
)
def test_lane_is_the_thread_that_a_client_names_for_its_sub_agent(
    headers: dict[str, str], agent_name: object, lane: str | None
) -> None:
    turn = json.dumps({"request_kind": "turn", "agent_name": agent_name})
    fields = {"client_metadata": {"x-codex-turn-metadata": turn}} if agent_name else {}
    assert who(headers, fields=fields).lane == lane


def test_task_is_named_by_metadata_and_baggage() -> None:
    assert who(fields={"metadata": {"pawl_task": "t1"}}).task == "t1"
    assert who({"baggage": "pawl.task=t2"}).task == "t2"


def test_call_that_repeats_words_is_left_to_the_ledger_and_follows_their_episode() -> None:
    found = who({"traceparent": TRACEPARENT}, fields=NEXT, memory=remembering(SAID, "e1"))
    assert (found.episode, found.method, found.confidence) == (str(CALL), "own", "likely")
    assert found.needs == SAID
    assert found.follows == "e1"


@pytest.mark.parametrize("episodes", [(), ("e1", "e2")])
def test_call_that_repeats_words_of_no_or_several_episodes_follows_no_episode(
    episodes: tuple[str],
) -> None:
    found = who(fields=NEXT, memory=remembering(SAID, *episodes))
    assert (found.method, found.confidence, len(found.needs)) == ("own", "likely", 1)
    assert found.follows == found.episode == str(CALL)


def test_call_that_answers_a_tool_call_joins_the_tool_calls_episode() -> None:
    memory = CallMemory()
    memory.provide(ASKED_FOR_A_TOOL, "e1", "e0")
    found = who({"traceparent": TRACEPARENT}, fields=ANSWER, memory=memory)
    assert (found.episode, found.method, found.confidence) == ("e1", "tool_call", "certain")
    assert (found.follows, found.needs) == ("e0", ())


def test_call_that_answers_a_tool_call_of_two_episodes_is_doubtful() -> None:
    memory = remembering(ASKED_FOR_A_TOOL, "e1", "e2")
    found = who({"traceparent": TRACEPARENT}, fields=ANSWER, memory=memory)
    assert (found.episode, found.method, found.confidence) == (str(CALL), "own", "doubtful")
    assert found.needs


def test_call_that_repeats_nothing_joins_the_episode_of_its_trace() -> None:
    found = who({"traceparent": TRACEPARENT})
    assert found.episode == f"trace:{TRACEPARENT[3:35]}"
    assert (found.method, found.confidence) == ("trace", "likely")
    assert who({"traceparent": "00-broken"}).method == "own"


@pytest.mark.parametrize("fields", [NEXT, ANSWER], ids=["words", "tool call"])
def test_call_that_repeats_nothing_known_joins_the_episode_of_a_begun_trace(
    fields: dict[str, Any],
) -> None:
    traced, memory = {"traceparent": TRACEPARENT}, CallMemory()
    # Another proxy may have begun it: the ledger knows.
    found = who(traced, fields=fields, memory=memory)
    assert (found.episode, found.method) == (str(CALL), "own")
    assert found.needs
    who(traced, memory=memory)
    found = who(traced, fields=fields, memory=memory)
    assert found.episode == found.follows == f"trace:{TRACEPARENT[3:35]}"
    assert (found.method, found.confidence, found.needs) == ("trace", "likely", ())
    assert who(fields=fields, memory=memory).method == "own"


def test_call_that_repeats_another_episodes_words_is_left_to_the_ledger_despite_a_trace() -> None:
    traced, memory = {"traceparent": TRACEPARENT}, remembering(SAID, "e1")
    who(traced, memory=memory)
    found = who(traced, fields=NEXT, memory=memory)
    assert (found.episode, found.method, found.needs) == (str(CALL), "own", SAID)


def test_session_of_openclaw_is_a_single_episode() -> None:
    """It strips tool calls' ids, and ends each request with a message that no later one repeats.

    Each of its processes, which answers one message of the user's, has a trace of its own.
    """
    said: list[dict[str, Any]] = []
    memory, episodes = CallMemory(), []
    for turn in range(2):
        said.append({"role": "user", "content": f"q{turn}"})
        trace = TRACEPARENT.replace("0af", f"{turn}af")
        for reply in (
            ReplySummary(tool_calls=(ToolCall(id=f"{TOOL.id}{turn}", name="f", arguments="{}"),)),
            ReplySummary(text="done"),
        ):
            now = f"<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\n{len(said)}"
            context = {"role": "user", "content": [{"type": "text", "text": now}]}
            fields = {"messages": [*said, context]}
            found = who({"traceparent": trace}, fields=fields, memory=memory)
            episodes.append((found.episode, found.method))
            provided = provided_fingerprints(CHAT.turns, fields, reply)
            memory.provide(provided, found.episode, found.follows)
            stripped = [call.id.replace("-", "") for call in reply.tool_calls]
            calls = [{"id": one, "function": {"name": "f", "arguments": ""}} for one in stripped]
            said.append({"role": "assistant", "content": reply.text or None, "tool_calls": calls})
            said += [{"role": "tool", "tool_call_id": one, "content": "1"} for one in stripped]
    key = f"trace:{TRACEPARENT[3:35]}"
    assert episodes == [(key, method) for method in ("trace", "tool_call", "prefix", "tool_call")]


def test_a_retry_joins_the_attempt_that_failed() -> None:
    memory = CallMemory()
    memory.remember_failed(json.dumps(FIRST).encode(), "e1", EARLIER)
    assert who(memory=memory).method == "own"
    found = who({"x-stainless-retry-count": "1"}, memory=memory)
    assert (found.episode, found.method, found.retry) == ("e1", "retry", 1)
    assert (found.retry_of, found.confidence) == (EARLIER, "likely")
    again = who({"x-stainless-retry-count": "2"}, memory=memory)
    assert (again.method, again.retry_of) == ("own", None)


def test_retried_call_in_a_named_episode_repeats_only_an_attempt_of_that_episode() -> None:
    memory = CallMemory()
    memory.remember_failed(json.dumps(FIRST).encode(), "e1", EARLIER)
    headers = {"x-stainless-retry-count": "1"}
    other = who(headers | {"x-pawl-episode": "e2"}, memory=memory)
    same = who(headers | {"x-pawl-episode": "e1"}, memory=memory)
    assert (other.retry_of, same.retry_of, same.method) == (None, EARLIER, "header")


@pytest.mark.parametrize(
    ("value", "count"), [("0", 0), ("3", 3), ("", 0), ("-1", 0), ("many", 0), ("9999", 0), ("²", 0)]
)
def test_retry_count_is_read_from_the_header_of_an_sdk(value: str, count: int) -> None:
    assert retry_count({"x-stainless-retry-count": value}) == count


def test_episode_and_task_names_are_scoped_to_the_tenant() -> None:
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


def test_client_cannot_name_episodes_or_tasks_of_another_tenant() -> None:
    for name in ("b\x1fu", "\x1fu", "default\x1fu"):
        found = who({"x-pawl-episode": name, "x-pawl-task": name})
        assert (tenant_of(found.episode), found.task) == (DEFAULT, None)
        assert found.warnings


SESSION = "57a121ec-f78c-48c3-a745-e3036a3ecc33"
TRACE = "0af7651916cd43dd8448eb211c80319c"


def names_of(
    headers: dict[str, str], fields: dict[str, Any] | None = None
) -> list[tuple[str, str]]:
    told = read_hints(headers, fields or {})
    return [(name.key, name.method) for name in episode_names(told, fields or {})]


@pytest.mark.parametrize(("header", "namespace"), SESSION_HEADERS)
def test_session_header_of_a_coding_tool_names_an_episode(header: str, namespace: str) -> None:
    assert names_of({header: SESSION}) == [(f"{namespace}:{SESSION}", "session")]


def test_a_sub_agents_session_is_its_parents_episode() -> None:
    headers = {"x-session-id": "ses_child", "x-parent-session-id": "ses_parent"}
    assert names_of(headers)[0] == ("session:ses_parent", "session")


@pytest.mark.parametrize(
    "user_id",
    [
        f"user_{'0' * 64}_account__session_{SESSION}",
        f"user_{'0' * 64}_account_{SESSION[::-1]}_session_{SESSION}",
        json.dumps({"device_id": "d", "account_uuid": "", "session_id": SESSION}),
    ],
)
def test_claude_codes_session_is_read_from_the_user_id(user_id: str) -> None:
    expected = [(f"claude-code:{SESSION}", "session")]
    assert names_of({}, {"metadata": {"user_id": user_id}}) == expected


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
def test_user_id_of_a_person_and_malformed_metadata_name_no_episode(fields: dict[str, Any]) -> None:
    assert names_of({}, fields) == []


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
def test_fields_of_a_body_name_an_episode(fields: dict[str, Any], key: str, method: str) -> None:
    assert names_of({}, fields) == [(key, method)]


@pytest.mark.parametrize(
    ("baggage", "key"),
    [
        ("pawl.episode=e7", "e7"),
        ("other=1, session.id = s%20t ;ttl=3", "session:s t"),
        ("gen_ai.conversation.id=c", "conversation:c"),
        ("langfuse_session_id=l", "langfuse:l"),
    ],
)
def test_baggage_names_an_episode(baggage: str, key: str) -> None:
    assert names_of({"baggage": baggage}) == [(key, "baggage")]


def test_episode_names_are_ordered_by_header_metadata_field_and_baggage() -> None:
    fields = {"metadata": {"session_id": "m"}, "conversation": "c"}
    headers = {"baggage": "session.id=b", "x-session-id": "h"}
    assert [key for key, _ in names_of(headers, fields)] == [
        "session:h",
        "session:m",
        "conversation:c",
        "session:b",
    ]


@given(st.dictionaries(st.from_regex(r"[a-z._]{1,8}", fullmatch=True), st.text(max_size=8)))
def test_baggage_is_read_as_it_was_written(members: dict[str, str]) -> None:
    header = ",".join(f"{key}={quote(value, safe='')};p=1" for key, value in members.items())
    assert parse_baggage(header) == members


def test_baggage_longer_than_the_limit_is_ignored() -> None:
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
    context = trace_context({"traceparent": header})
    assert context == (trace and header.strip()[:55])
    assert (context and context[3:35]) == trace


def split_of(
    headers: dict[str, str] | None = None,
    prefix: str = "",
    metadata: Any = None,
    memory: CallMemory | None = None,
) -> CallIdentity:
    fields = {"messages": []} | ({} if metadata is None else {"metadata": metadata})
    return who(headers, find_route("POST", prefix + PATH), fields, memory)


def test_call_without_a_stated_split_is_for_training() -> None:
    assert split_of().split == "train"
    assert split_of({"x-pawl-task": "evaluate this"}).split == "train"


@pytest.mark.parametrize(
    ("headers", "prefix", "metadata"),
    [
        ({"x-pawl-split": "eval"}, "", None),
        ({"x-pawl-split": "Eval"}, "", None),
        ({}, "/split/eval", None),
        ({}, "/split/%20eval", None),
        ({}, "", {"pawl_split": "eval\n"}),
        ({}, "/task/t/episode/e/agent/a/split/eval", None),
        ({}, "/agent/a/split/eval", None),
        ({}, "", {"pawl_split": "eval"}),
        ({"baggage": "pawl.split=eval"}, "", None),
        ({"x-pawl-task": "eval/sums"}, "", None),
        ({}, "/task/eval%2Fsums", None),
        ({}, "", {"pawl_task": "eval/sums"}),
    ],
)
def test_split_of_evaluation_is_read_from_every_source(
    headers: dict[str, str], prefix: str, metadata: Any
) -> None:
    found = split_of(headers, prefix, metadata)
    assert (found.split, found.warnings) == ("eval", ())


def test_first_source_of_a_split_counts() -> None:
    assert split_of({"x-pawl-split": "train"}, "/split/eval").split == "train"
    assert split_of({"x-pawl-split": "train", "x-pawl-task": "eval/x"}).split == "train"
    assert split_of({}, "/split/eval", {"pawl_split": "train"}).split == "eval"


@pytest.mark.parametrize(
    ("headers", "prefix", "where"),
    [
        ({"x-pawl-split": "test"}, "", "x-pawl-split 'test' is no split (train and eval are)"),
        ({"x-pawl-split": ""}, "", "x-pawl-split '' is no split"),
        ({}, "/split/dev", "/split/ in the URL 'dev' is no split"),
    ],
)
def test_an_unknown_split_is_ignored_with_a_warning(
    headers: dict[str, str], prefix: str, where: str
) -> None:
    found = split_of(headers, prefix)
    assert found.split == "train"
    [warning] = found.warnings
    assert warning.startswith(where)
    assert split_of(headers | {"x-pawl-task": "eval/x"}, prefix).split == "eval"


def test_prefix_of_evaluation_tasks_can_be_set() -> None:
    route = find_route("POST", "/task/held-out:7" + PATH)
    found = identify({}, route, ModelRequest(b""), "own", CallMemory(), eval_tasks="held-out:")
    assert found.split == "eval"


def test_split_of_an_unreadable_body_is_read_from_headers_and_url() -> None:
    assert split_without_body({"x-pawl-split": "eval"}, PLAIN, EVAL_TASKS) == "eval"
    assert split_without_body({"x-pawl-task": "eval/x"}, PLAIN, EVAL_TASKS) == "eval"
    assert split_without_body({}, find_route("POST", "/split/eval" + PATH), EVAL_TASKS) == "eval"
    assert split_without_body({}, PLAIN, EVAL_TASKS) == "train"


def test_retried_call_joins_only_a_failed_attempt_of_its_own_split() -> None:
    again = {"x-stainless-retry-count": "1"}
    memory = CallMemory()
    memory.remember_failed(b'{"messages": []}', "e", UUID(int=1), "eval")
    assert split_of(again, memory=memory).method == "own"
    assert split_of(again | {"x-pawl-split": "eval"}, memory=memory).episode == "e"


@given(st.text(), st.text())
def test_split_is_the_first_known_value_of_header_and_metadata(header: str, metadata: str) -> None:
    found = split_of({"x-pawl-split": header}, metadata={"pawl_split": metadata})
    first, second = (value.strip().lower() for value in (header, metadata))
    assert found.split == ("eval" if "eval" in (first, second) and first != "train" else "train")
