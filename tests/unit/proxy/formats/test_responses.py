"""Responses: what is asked for beside the client's own request, and taken out again."""

import json
from typing import Any

import pytest

from proxy.formats.base import ModelRequest, ReplyFacts
from proxy.formats.responses import IDS, INCLUDE, LOGPROBS
from proxy.ingester.transcribe import transcribe
from store.values.packing import unpack_ids
from tests.support.recordings import PLAIN, VERSION, follow, rewritten, sse
from tests.support.records import captured

LOGPROB = {"token": "t", "logprob": -0.5, "top_logprobs": []}
TEXT = {"type": "output_text", "text": "hi", "annotations": [], "logprobs": [LOGPROB, LOGPROB]}
MESSAGE = {"type": "message", "id": "msg_1", "content": [TEXT]}
RESPONSE: dict[str, Any] = {
    "id": "resp_1",
    "model": VERSION,
    "status": "completed",
    "output": [MESSAGE],
    "top_logprobs": 0,
    "usage": {"output_tokens": 2},
    "input_messages": [{"type": "raw_message_tokens", "message": "x", "tokens": [1, 2]}],
    "output_messages": [{"type": "raw_message_tokens", "message": "hi", "tokens": [3, 4]}],
}
REQUEST = rewritten("responses")


def answered(request: ModelRequest, body: Any) -> tuple[dict[str, Any], ReplyFacts]:
    reply = follow("responses", request, [json.dumps(body).encode()], VERSION)
    return json.loads(reply.seen), reply.facts


@pytest.mark.parametrize(
    ("fields", "added"),
    [
        ({}, {IDS: True, INCLUDE: [LOGPROBS]}),
        ({"include": None}, {IDS: True, INCLUDE: [LOGPROBS]}),
        ({"include": ["a"]}, {IDS: True, INCLUDE: ["a", LOGPROBS]}),
        ({"include": [LOGPROBS]}, {IDS: True}),
        ({IDS: True}, {INCLUDE: [LOGPROBS]}),
        ({IDS: True, "include": [LOGPROBS], "top_logprobs": 2}, {}),
        ({"top_logprobs": 50}, {IDS: True, INCLUDE: [LOGPROBS], "top_logprobs": 0}),
        ({"top_logprobs": -1}, {IDS: True, INCLUDE: [LOGPROBS]}),
        ({"include": "odd"}, {}),
        ({"background": True}, {}),
    ],
)
def test_responses_request_asks_for_token_ids_and_log_probabilities(
    fields: dict[str, Any], added: dict[str, Any]
) -> None:
    request = rewritten("responses", **fields)
    own = PLAIN["responses"] | {"model": VERSION} | fields
    assert json.loads(request.body) == own | added
    assert request.injected == frozenset(added)


def test_no_field_is_added_to_a_responses_request_if_no_token_ids_are_wanted() -> None:
    request = rewritten("responses", want_ids=False)
    assert json.loads(request.body) == PLAIN["responses"] | {"model": VERSION}


def test_unstreamed_responses_reply_loses_the_added_fields_and_is_recorded() -> None:
    seen, facts = answered(REQUEST, RESPONSE)
    bare = MESSAGE | {"content": [TEXT | {"logprobs": None}]}
    nothing = dict.fromkeys(("top_logprobs", "input_messages", "output_messages"))
    assert seen == RESPONSE | {"model": "agent", "output": [bare]} | nothing
    sampled = facts.sampled
    assert (sampled.prompt_ids, sampled.sampled_ids) == ((1, 2), (3, 4))
    assert sampled.sampled_logprobs == (-0.5, -0.5)
    assert sampled.completion_tokens == 2


def test_token_ids_and_logprobs_that_the_responses_client_requested_reach_it() -> None:
    own: dict[str, Any] = {IDS: True, "include": [LOGPROBS]}
    seen, facts = answered(rewritten("responses", **own), RESPONSE)
    assert seen == RESPONSE | {"model": "agent"}
    assert facts.sampled.sampled_ids == (3, 4)


TURNS = RESPONSE["input_messages"] * 2
ODD = [{"author": {"role": "user"}, "type": "message"}]


@pytest.mark.parametrize(
    "change",
    [
        {"input_messages": TURNS},
        {"input_messages": ODD, "output_messages": ODD},
        {"input_messages": None, "output_messages": None},
        {"output": [MESSAGE, {"type": "mcp_call"}]},
        {"output": [MESSAGE, {"type": "web_search_call"}]},
    ],
)
def test_response_sampled_from_several_prompts_is_recorded_without_token_ids(change: Any) -> None:
    sampled = answered(REQUEST, RESPONSE | change)[1].sampled
    assert (sampled.prompt_ids, sampled.sampled_ids) == (None, None)


CALL = {"type": "function_call", "call_id": "c1", "name": "calc", "arguments": "{}"}
THOUGHT = {"type": "reasoning", "id": "rs_1", "content": [], "summary": []}


def test_response_of_tool_calls_alone_is_recorded_without_log_probabilities() -> None:
    _, facts = answered(REQUEST, RESPONSE | {"output": [CALL]})
    assert facts.sampled.sampled_ids == (3, 4)
    assert facts.sampled.sampled_logprobs is None
    assert facts.tool_calls[0].id == "c1"


def counting(thoughts: Any) -> dict[str, Any]:
    return {"usage": {"output_tokens": 2, "output_tokens_details": thoughts}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("asked", "change", "told"),
    [
        ({}, counting({"reasoning_tokens": 0}), True),
        ({"include_reasoning": True}, counting({"reasoning_tokens": 0}), True),
        ({"include_reasoning": None}, counting({"reasoning_tokens": 0}), True),
        # The beginning of a thought may stand in the prompt: vLLM counts none of its tokens then.
        ({}, counting({"reasoning_tokens": 0}) | {"output": [THOUGHT, CALL]}, False),
        ({"include_reasoning": False}, counting({"reasoning_tokens": 0}), False),
        ({}, counting({"reasoning_tokens": 1}), False),
        *(({}, counting(odd), False) for odd in ({}, None, 7, {"reasoning_tokens": "0"})),
        ({}, {}, False),
    ],
)
def test_response_is_thoughtless_only_if_no_thought_is_possible(
    stream: bool, asked: dict[str, Any], change: dict[str, Any], told: bool
) -> None:
    request = rewritten("responses", **asked, **({"stream": True} if stream else {}))
    reply = RESPONSE | {"output": [CALL]} | change
    last = sse({"type": "response.completed", "response": reply})
    body = last if stream else json.dumps(reply).encode()
    sampled = follow("responses", request, [body], VERSION).facts.sampled
    assert (sampled.sampled_ids, sampled.thoughtless) == ((3, 4), told)


@pytest.mark.parametrize("thoughts", [0, 3])
@pytest.mark.parametrize(
    ("asked", "kind"),
    [
        ({"tools": [{"type": "function", "name": "calc", "strict": True}]}, "tools"),
        ({"text": {"format": {"type": "json_object"}}}, "json"),
    ],
)
def test_call_constrained_by_a_grammar_is_trainable_unless_it_may_have_a_thought(
    asked: dict[str, Any], kind: str, thoughts: int
) -> None:
    request = json.dumps(PLAIN["responses"] | asked).encode()
    reply = RESPONSE | {"output": [CALL]} | counting({"reasoning_tokens": thoughts})
    record = transcribe(
        captured(
            dialect="responses",
            request=request,
            served_model=VERSION,
            policy_version=3,
            wanted_ids=True,
            reply=json.dumps(reply).encode(),
            tool_tag="hermes",
        )
    )
    assert record.reason == ("constrained_sampling" if thoughts else None)
    assert json.loads(record.sampling)["grammar"]["kind"] == kind
    assert (unpack_ids(record.tokens.sampled_ids), record.tokens.sampled_logprobs) == ([3, 4], b"")


@pytest.mark.parametrize("told", range(4))
def test_log_probabilities_are_recorded_only_if_every_token_id_has_a_value(told: int) -> None:
    text = TEXT | {"logprobs": [LOGPROB] * told}
    seen, facts = answered(REQUEST, RESPONSE | {"output": [MESSAGE | {"content": [text]}]})
    assert facts.sampled.sampled_ids == (3, 4)
    assert facts.sampled.sampled_logprobs == ((-0.5, -0.5) if told == 2 else None)
    assert seen["output"][0]["content"][0]["logprobs"] == (None if told else [])


def test_response_of_several_replies_is_recorded_without_sampled_token_ids() -> None:
    """Turns of the server's own: between two replies stands what the second one saw."""
    turns = RESPONSE["output_messages"] * 3
    sampled = answered(REQUEST, RESPONSE | {"output_messages": turns})[1].sampled
    assert (sampled.prompt_ids, sampled.sampled_ids) == ((1, 2), None)
    assert sampled.sampled_logprobs is None


def test_summary_of_a_torn_response_stream_is_its_text_so_far() -> None:
    events = [
        {"type": "response.created", "response": {"id": "resp_1", "output": []}},
        {"type": "response.output_text.delta", "delta": "h\u00e9", "logprobs": [LOGPROB]},
        {"type": "response.output_text.delta", "delta": "llo", "logprobs": []},
    ]
    reply = follow("responses", rewritten("responses", stream=True), [sse(*events)], VERSION)
    assert b"-0.5" not in reply.seen
    assert (reply.summary.response_id, reply.summary.text) == ("resp_1", "h\u00e9llo")
    assert not reply.ended
