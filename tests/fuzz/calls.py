"""Requests and replies of the four APIs, each field as it should be or anything else."""

from typing import Any, Final

from tests.fuzz.tape import Grammar, Tape
from tests.fuzz.texts import anything, damaged, deep, either, listed, one_of, quoted, shaped

FORMATS: Final = ("chat", "completions", "messages", "responses")
WORDS: Final = one_of(b'"hi"', b'""', b"null", b'"\\ud83d"', b'"\\u0000"')
COUNTS: Final = one_of(b"0", b"1", b"2", b"-1", b"null", b"1.0", b"true", b"99999999999999999999")
IDS: Final = one_of(b"[1,2]", b"[3]", b"[]", b"null", b"[-1]", b"[1.5]", b"[4294967296]", b'["1"]')
MODELS: Final = one_of(b'"m"', b'"m"', b'"m@1"', b'"other"', b"null", b'"\\u0000"')
FLAGS: Final = one_of(b"true", b"false", b"null", b'"true"')
NAMES: Final = one_of(b'"call_a1b2c3d4"', b'"call_1"', b'""', b"null", b'"\\ud800"')


def _quoted_deep(tape: Tape) -> bytes:
    return quoted(deep(tape))


_plain_arguments: Final = one_of(b'"{}"', b'"{\\"a\\":1"', b'""', b"null", b'"1e400"')
ARGUMENTS: Final = either(_plain_arguments, _plain_arguments, _plain_arguments, deep, _quoted_deep)

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
_schema: Final = either(
    one_of(b"{}", b'{"type":"object"}', b'{"type":"string","enum":["a"]}', b'{"$ref":"#/a"}'),
    one_of(b'{"type":"array","items":{"type":"integer"},"minItems":1e400}', b"true", b"null"),
    anything,
    deep,
)
_offered: Final = shaped(
    {
        "name": NAMES,
        "description": WORDS,
        "parameters": _schema,
        "strict": FLAGS,
        "arguments": ARGUMENTS,
    }
)
_tools: Final = listed(
    shaped(
        {
            "type": either(one_of(b'"function"', b'"custom"', b'"web_search"'), WORDS),
            "name": NAMES,
            "function": _offered,
            "strict": FLAGS,
            "parameters": _schema,
            "input_schema": _schema,
        }
    ),
    2,
)
_tool_choice: Final = either(
    one_of(b'"auto"', b'"none"', b'"required"', b'{"type":"auto"}', b'{"type":"any"}', b'"x"'),
    shaped(
        {
            "type": one_of(b'"function"', b'"tool"', b'"allowed_tools"', b"null"),
            "name": NAMES,
            "function": shaped({"name": NAMES}),
            "mode": one_of(b'"auto"', b'"required"'),
            "tools": listed(shaped({"type": one_of(b'"function"'), "name": NAMES}), 2),
            "disable_parallel_tool_use": FLAGS,
        }
    ),
    anything,
)
_form: Final = either(
    shaped(
        {
            "type": one_of(b'"json_schema"', b'"json_object"', b'"text"', b'"structural_tag"'),
            "json_schema": shaped({"name": NAMES, "schema": _schema, "strict": FLAGS}),
            "schema": _schema,
            "name": NAMES,
            "strict": FLAGS,
        }
    ),
    anything,
)
_choices: Final = either(one_of(b'["a","b"]', b"[]", b"[1]", b"null"), listed(WORDS), anything)
_rule: Final = one_of(b'"[a-z]+"', b'"("', b'"root ::= "a""', b'""', b"null", b"1")
_structured: Final = shaped(
    {
        "json": _schema,
        "regex": _rule,
        "choice": _choices,
        "grammar": _rule,
        "json_object": FLAGS,
        "structural_tag": either(WORDS, _schema),
        "disable_any_whitespace": FLAGS,
        "disable_additional_properties": FLAGS,
        "whitespace_pattern": _rule,
    }
)
_amounts: Final = either(
    one_of(b"1", b"0", b"0.5", b'"0.5"', b"-1", b"1e-6", b"1e400", b"null", b"true"), anything
)
# By token, as text or as a number.
_bias: Final = either(
    one_of(b'{"5":1}', b'{"5":-100,"6":1e400}', b'{"x":1}', b'{"-1":"1"}', b"{}", b"null"), anything
)
_sampling: Final[dict[str, Grammar]] = {
    **dict.fromkeys(("top_p", "top_k", "min_p", "min_tokens", "n", "best_of"), _amounts),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), _amounts),
    "repetition_penalty": _amounts,
    "logit_bias": _bias,
    "bad_words": _choices,
    "allowed_token_ids": either(IDS, anything),
    "stop_token_ids": either(IDS, anything),
    "ignore_eos": FLAGS,
    "include_stop_str_in_output": FLAGS,
    "seed": COUNTS,
}
_grammars: Final[dict[str, Grammar]] = {
    "response_format": _form,
    "text": shaped({"format": _form}),
    "output_config": shaped({"format": _form}),
    "structured_outputs": either(_structured, _structured, anything),
    "guided_json": _schema,
    "guided_regex": _rule,
    "guided_choice": _choices,
    "guided_grammar": _rule,
    "guided_decoding_backend": WORDS,
    "structural_tag": either(WORDS, _schema),
    "parallel_tool_calls": FLAGS,
    "tool_choice": _tool_choice,
    "chat_template_kwargs": either(one_of(b'{"enable_thinking":false}', b"null"), anything),
    "reasoning": either(one_of(b'{"effort":"low"}', b"null"), anything),
    "thinking": either(one_of(b'{"type":"enabled"}', b"null"), anything),
    "reasoning_effort": WORDS,
}


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
            "metadata": shaped({"pawl_episode": NAMES, "session_id": NAMES, "user_id": ARGUMENTS}),
            "previous_response_id": NAMES,
            "conversation": NAMES,
        },
        few=_sampling | _grammars,
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


def recorded(tape: Tape) -> dict[str, Any]:
    """Make the fields of a recorded call that a client and a model server decide."""
    streamed = bool(tape.below(2))
    return {
        "dialect": tape.pick(FORMATS),
        "streamed": streamed,
        "request": requests(tape) if tape.below(4) else anything(tape),
        "reply": streams(tape) if streamed else wholes(tape),
        "wanted_ids": bool(tape.below(2)),
        "served_model": "m@1",
    }
