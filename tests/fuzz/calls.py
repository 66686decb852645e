"""Requests and replies of the four APIs, each field as it should be or anything else."""

from typing import Final

from tests.fuzz.tape import Grammar, Tape
from tests.fuzz.texts import anything, damaged, deep, either, listed, one_of, quoted, shaped

FORMATS: Final = ("chat", "completions", "messages", "responses")
WORDS: Final = one_of(b'"hi"', b'""', b"null", b'"\\ud83d"', b'"\\u0000"')
COUNTS: Final = one_of(b"0", b"1", b"2", b"-1", b"null", b"1.0", b"true", b"99999999999999999999")
IDS: Final = one_of(b"[1,2]", b"[3]", b"[]", b"null", b"[-1]", b"[1.5]", b"[4294967296]", b'["1"]')
MODELS: Final = one_of(b'"m"', b'"m"', b'"m@1"', b'"other"', b"null", b'"\\u0000"')
FLAGS: Final = one_of(b"true", b"false", b"null", b'"true"')
NAMES: Final = one_of(b'"call_a1b2c3d4"', b'"call_1"', b'""', b"null", b'"\\ud800"')


def _told_deep(tape: Tape) -> bytes:
    return quoted(deep(tape))


_plain_arguments: Final = one_of(b'"{}"', b'"{\\"a\\":1"', b'""', b"null", b'"1e400"')
ARGUMENTS: Final = either(_plain_arguments, _plain_arguments, _plain_arguments, deep, _told_deep)

_function: Final = shaped({"name": NAMES, "arguments": ARGUMENTS})
_tool_calls: Final = listed(
    shaped({"index": COUNTS, "id": NAMES, "type": one_of(b'"function"'), "function": _function}), 2
)
_part_kinds: Final = one_of(
    *(b'"text"', b'"input_text"', b'"tool_use"', b'"tool_result"', b'"thinking"')
)
_parts: Final = listed(
    shaped(
        {
            "type": _part_kinds,
            "text": WORDS,
            "id": NAMES,
            "name": NAMES,
            "input": either(one_of(b"{}", b'{"a":1}'), anything, deep),
            "tool_use_id": NAMES,
            "is_error": FLAGS,
            "content": WORDS,
        }
    ),
    2,
)
_message: Final = shaped(
    {
        "role": one_of(b'"user"', b'"assistant"', b'"tool"', b'"system"'),
        "content": either(WORDS, _parts),
        "tool_calls": either(one_of(b"null"), _tool_calls),
        "tool_call_id": NAMES,
        "type": one_of(b'"message"', b'"function_call"', b'"function_call_output"'),
        "call_id": NAMES,
        "arguments": ARGUMENTS,
        "output": WORDS,
    }
)
_messages: Final = listed(_message)
_tools: Final = listed(shaped({"type": WORDS, "name": NAMES, "function": _function}), 2)

# Any request to any API: fields of the others are strange ones to each.
requests: Final[Grammar] = damaged(
    shaped(
        {
            "model": MODELS,
            "messages": _messages,
            "stream": FLAGS,
            "max_tokens": COUNTS,
            "temperature": one_of(b"1", b"0", b'"0"', b"1e-6", b"1e400", b"null"),
            "logprobs": either(FLAGS, COUNTS),
            "input": either(WORDS, _messages),
            "prompt": either(WORDS, IDS),
            "stop": either(WORDS, WORDS, WORDS, deep),
            "tools": _tools,
            "tool_choice": one_of(b'"auto"', b'{"type":"auto"}'),
            "metadata": shaped({"pawl_episode": NAMES, "session_id": NAMES, "user_id": ARGUMENTS}),
            "previous_response_id": NAMES,
            "conversation": NAMES,
        }
    )
)

_logprobs: Final = one_of(
    b"null",
    b'{"content":[{"logprob":-0.5},{"logprob":-1e400}]}',
    b'{"content":null}',
    b'{"token_logprobs":[null,-1]}',
    b"[]",
)
_usage: Final = one_of(b"null", b'{"completion_tokens":2}', b'{"completion_tokens":"2"}', b"{}")
_words: Final = shaped({"role": WORDS, "content": WORDS, "tool_calls": _tool_calls})
_choice: Final = shaped(
    {
        "index": COUNTS,
        "delta": _words,
        "message": _words,
        "text": WORDS,
        "finish_reason": one_of(b"null", b'"stop"', b'"tool_calls"'),
        "token_ids": IDS,
        "prompt_token_ids": IDS,
        "logprobs": _logprobs,
    }
)
_completion: Final = shaped(
    {
        "id": NAMES,
        "object": one_of(b'"chat.completion"'),
        "model": MODELS,
        "choices": listed(_choice, 2),
        "usage": _usage,
        "prompt_token_ids": IDS,
    }
)
_error: Final = one_of(
    b'{"error":{"message":"no","type":"BadRequestError"}}',
    b'{"object":"error","message":"no","type":1}',
    b'{"error":"no"}',
)
_said: Final = shaped(
    {
        "id": NAMES,
        "type": one_of(b'"message"'),
        "model": MODELS,
        "content": _parts,
        "stop_reason": WORDS,
        "usage": _usage,
    }
)
_message_kinds: Final = one_of(
    *(b'"message_start"', b'"content_block_start"', b'"content_block_delta"'),
    *(b'"content_block_stop"', b'"message_delta"', b'"message_stop"', b'"ping"'),
)
_block_delta: Final = shaped(
    {
        "type": one_of(b'"input_json_delta"', b'"text_delta"'),
        "text": WORDS,
        "partial_json": ARGUMENTS,
        "stop_reason": WORDS,
    }
)
_message_event: Final = shaped(
    {
        "type": _message_kinds,
        "index": COUNTS,
        "message": _said,
        "content_block": shaped({"type": one_of(b'"tool_use"', b'"text"'), "text": WORDS}),
        "delta": _block_delta,
        "usage": _usage,
    }
)
_item: Final = shaped(
    {
        "type": one_of(b'"message"', b'"function_call"', b'"reasoning"'),
        "id": NAMES,
        "call_id": NAMES,
        "name": NAMES,
        "arguments": ARGUMENTS,
        "content": listed(shaped({"type": WORDS, "text": WORDS, "logprobs": _logprobs}), 2),
    }
)
_response: Final = shaped(
    {
        "id": NAMES,
        "model": MODELS,
        "status": one_of(b'"completed"', b'"failed"', b"null"),
        "output": listed(_item, 2),
        "usage": _usage,
        "input_messages": listed(shaped({"tokens": IDS}), 2),
        "output_messages": listed(shaped({"tokens": IDS}), 2),
    }
)
_response_kinds: Final = one_of(
    *(b'"response.created"', b'"response.output_text.delta"', b'"response.completed"'),
    *(b'"response.output_item.done"', b'"response.failed"', b'"error"'),
)
_response_event: Final = shaped(
    {
        "type": _response_kinds,
        "response": _response,
        "item": _item,
        "delta": WORDS,
        "output_index": COUNTS,
        "sequence_number": COUNTS,
    }
)
_payload: Final = either(
    _completion, _completion, _message_event, _response_event, _error, anything
)

# A reply in one piece.
wholes: Final[Grammar] = damaged(either(_completion, _said, _response, _error, anything))

_ENDS: Final = (b"\n\n", b"\n\n", b"\n\n", b"\r\n\r\n", b"\n", b"\r\r", b"")
_EVENTS: Final = (b"", b"", b"", b"event: message_stop\n", b"event: response.completed\n")
_LINES: Final = (
    *(b"data: [DONE]\n\n", b": ping\n\n", b"data:\n\n", b"id: 1\n", b"\n", b"data\n\n"),
    *(b'data: {"choices":[{"index":0,\ndata: "delta":{}}]}\n\n', b"\xef\xbb\xbfdata: 1\n\n"),
)


def _event(tape: Tape) -> bytes:
    if tape.rarely():
        return tape.pick(_LINES)
    return tape.pick(_EVENTS) + b"data: " + _payload(tape) + tape.pick(_ENDS)


def _stream(tape: Tape) -> bytes:
    events = [_event(tape) for _ in range(tape.below(6))]
    return b"".join(events) + tape.pick((b"data: [DONE]\n\n", b""))


# A reply of server-sent events.
streams: Final[Grammar] = damaged(_stream)
