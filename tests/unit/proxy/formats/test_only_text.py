"""What a request shows besides text: in every API, in every place where it may stand."""

import json
from typing import Any

import msgspec
import pytest

from proxy.formats.raw_json import parse_object
from proxy.formats.registry import FORMATS
from proxy.ingester.transcribe import transcribe
from tests.support.records import captured

URL = "data:image/png;base64,AAAA"
SOURCE = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
# Parts of a content, by API.
MEDIA: dict[str, list[dict[str, Any]]] = {
    "chat": [
        {"type": "image_url", "image_url": {"url": URL}},
        {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}},
        {"type": "file", "file": {"file_id": "f"}},
        {"type": "video_url", "video_url": {"url": URL}},
        {"type": "audio_url", "audio_url": {"url": URL}},
        {"type": "image_embeds", "image_embeds": "AA"},
        {"type": "prompt_embeds", "data": "AA"},
        {"type": "image", "source": SOURCE},
        # vLLM reads these as images, too.
        {"image_url": URL},
        {"type": "text", "text": "x", "uuid": "u", "image_url": URL},
        {"type": "hologram"},
        {"type": ["text"]},
    ],
    "responses": [
        {"type": "input_image", "image_url": URL},
        {"type": "input_file", "file_id": "f"},
        {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}},
    ],
    "messages": [
        {"type": "image", "source": SOURCE},
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x"}},
        {"type": "container_upload", "file_id": "f"},
    ],
}
TEXTS: dict[str, list[Any]] = {
    "chat": [
        "x",
        {"type": "text", "text": "x"},
        {"text": "x"},
        {"type": "refusal", "refusal": "x"},
        {"type": "thinking", "thinking": "x"},
    ],
    "responses": [{"type": "input_text", "text": "x"}, {"type": "output_text", "text": "x"}],
    "messages": [
        {"type": "text", "text": "x"},
        {"type": "thinking", "thinking": "x", "signature": "s"},
        {"type": "redacted_thinking", "data": "x"},
        # What a tool is given is data, whatever it looks like.
        {"type": "tool_use", "id": "t", "name": "draw", "input": {"type": "image", "file": 1}},
        {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "image"}},
        {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "image"}},
        {"type": "tool_result", "tool_use_id": "t", "content": "x"},
        {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "x"}]},
        {"type": "search_result", "source": "s", "content": [{"type": "text", "text": "x"}]},
    ],
}
FIELD = {"chat": "messages", "responses": "input", "messages": "messages"}


def only_text(api: str, request: Any) -> bool:
    parsed = parse_object(json.dumps(request).encode())
    assert parsed is not None
    return FORMATS[api].turns.only_text(parsed)


def places(api: str, part: Any) -> list[dict[str, Any]]:
    """Requests with the part in every place that the API has for one."""
    turns: list[list[Any]] = [
        [{"role": "user", "content": [part]}],
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": ["a", part]}],
        [{"role": "user", "content": [part, "q"]}, {"role": "user", "content": "q"}],
    ]
    result: dict[str, Any] = {"type": "tool_result", "tool_use_id": "t"}
    match api:
        case "chat":
            turns.append([{"role": "tool", "tool_call_id": "t", "content": [part]}])
            turns.append([{"role": "user", "content": [result | {"content": [part]}]}])
        case "responses":
            turns += [
                [{"type": kind, "call_id": "c", "output": [part]}]
                for kind in ("function_call_output", "custom_tool_call_output")
            ]
            turns.append([{"type": "message", "role": "user", "content": part}])
        case "messages":
            turns.append([{"role": "user", "content": [result | {"content": [part]}]}])
    return [{FIELD[api]: turn} for turn in turns]


@pytest.mark.parametrize("api", MEDIA)
def test_request_with_an_image_sound_or_file_anywhere_is_not_text(api: str) -> None:
    for part in MEDIA[api]:
        for request in places(api, part):
            assert not only_text(api, request), request


@pytest.mark.parametrize("api", TEXTS)
def test_request_with_text_parts_anywhere_is_text(api: str) -> None:
    for part in TEXTS[api]:
        for request in places(api, part):
            assert only_text(api, request), request


@pytest.mark.parametrize(
    ("api", "request_", "is_text"),
    [
        ("chat", {"messages": [], "modalities": ["text"]}, True),
        ("chat", {"messages": [], "modalities": None, "audio": {"voice": "v"}}, True),
        ("chat", {"messages": [], "modalities": ["text", "audio"]}, False),
        ("chat", {"messages": [], "modalities": "audio"}, False),
        ("chat", {"messages": [{"role": "assistant", "audio": {"id": "a"}}]}, False),
        ("chat", {"messages": [{"role": "assistant", "audio": None, "content": None}]}, True),
        ("chat", {"messages": ["odd"]}, False),
        ("chat", {"messages": "odd"}, True),
        ("chat", {}, True),
        ("completions", {"prompt": "x"}, True),
        ("completions", {"prompt": [[1, 2]], "prompt_embeds": None}, True),
        ("completions", {"prompt": "", "prompt_embeds": "AA"}, False),
        ("responses", {"input": "x"}, True),
        ("responses", {"input": [{"type": "function_call", "arguments": "{}"}]}, True),
        ("responses", {"input": [{"type": "reasoning", "summary": []}]}, True),
        ("responses", {"input": [{"type": "computer_call_output", "output": {}}]}, False),
        ("responses", {"input": [{"type": "image_generation_call", "result": "AA"}]}, False),
        ("responses", {"input": [{"type": ["message"]}]}, False),
        ("responses", {"prompt": {"id": "p", "variables": {"name": "x"}}}, True),
        ("responses", {"prompt": {"id": "p"}}, True),
        (
            "responses",
            {"prompt": {"variables": {"x": {"type": "input_file", "file_id": "f"}}}},
            False,
        ),
        ("messages", {"messages": [], "system": [{"type": "text", "text": "x"}]}, True),
        ("messages", {"messages": [], "system": [{"type": "image", "source": SOURCE}]}, False),
    ],
)
def test_fields_of_each_api_decide_whether_a_request_is_text(
    api: str, request_: Any, is_text: bool
) -> None:
    assert only_text(api, request_) is is_text


@pytest.mark.parametrize(("api", "field"), [*FIELD.items(), ("completions", "prompt_embeds")])
def test_call_with_media_is_recorded_as_not_text(api: str, field: str) -> None:
    shown: Any = places(api, MEDIA[api][0])[0][field] if api in MEDIA else "AA"
    body = {"model": "m", "temperature": 1.0, field: shown}
    record = transcribe(captured(dialect=api, request=json.dumps(body).encode()))
    assert (record.trainable, record.reason) == (False, "not_text")
    plain = {"model": "m", "temperature": 1.0}
    record = transcribe(captured(dialect=api, request=json.dumps(plain).encode()))
    assert record.reason != "not_text"


def test_request_with_a_number_that_python_cannot_hold_is_not_text() -> None:
    content = b'{"messages": [{"role": "user", "content": [{"type": "text", "x": 1e400}]}]}'
    parsed = parse_object(content)
    assert parsed is not None
    assert not FORMATS["chat"].turns.only_text(parsed)
    assert isinstance(parsed["messages"], msgspec.Raw)
