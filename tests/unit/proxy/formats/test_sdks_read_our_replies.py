"""The vendors' own parsers on what our formats send."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

from proxy.formats.registry import FORMATS
from tests.support.recordings import asked, follow, recordings

if TYPE_CHECKING:
    import anthropic
    import openai

HI: Any = {"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}], "model": "agent"}


def transport(body: bytes, status: int = 200, *, stream: bool = False) -> httpx2.MockTransport:
    """A server that answers `body`, streams in pieces of seven bytes."""
    kind = "text/event-stream" if stream else "application/json"

    def pieces() -> Iterator[bytes]:
        yield from (body[i : i + 7] for i in range(0, len(body), 7))

    def answer(_: httpx2.Request) -> httpx2.Response:
        headers = {"content-type": kind}
        return httpx2.Response(status, headers=headers, content=pieces() if stream else body)

    return httpx2.MockTransport(answer)


def claude(body: bytes, status: int = 200, *, stream: bool = False) -> "anthropic.Anthropic":
    # All workers collect this file, and each would import the SDKs: one of them runs it.
    import anthropic

    client = httpx2.Client(transport=transport(body, status, stream=stream))
    return anthropic.Anthropic(
        api_key="x", base_url="http://pawl", http_client=client, max_retries=0
    )


def gpt(body: bytes, status: int = 200, *, stream: bool = False) -> "openai.OpenAI":
    import openai

    client = httpx2.Client(transport=transport(body, status, stream=stream))
    return openai.OpenAI(api_key="x", base_url="http://pawl/v1", http_client=client, max_retries=0)


def answer(api: str, name: str) -> bytes:
    recording = recordings(api)[f"{api}_{name}"]
    return follow(api, asked(api, recording), [recording["upstream"].encode()]).seen


@pytest.mark.parametrize(
    ("name", "reason", "kinds"),
    [
        ("text", "max_tokens", ["text"]),
        ("tool", "tool_use", ["tool_use"]),
        ("cut_tool", "max_tokens", ["tool_use"]),
        ("thinking", "end_turn", ["thinking", "text"]),
        ("stop", "stop_sequence", ["thinking"]),
    ],
)
def test_anthropics_sdk_reads_messages(name: str, reason: str, kinds: list[str]) -> None:
    whole = claude(answer("messages", f"{name}_whole")).messages.create(**HI)
    body = answer("messages", f"{name}_streamed")
    with claude(body, stream=True).messages.stream(**HI) as stream:
        events = list(stream)
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        assert (message.model, message.role, message.stop_reason) == ("agent", "assistant", reason)
        assert [block.type for block in message.content] == kinds
        assert message.stop_sequence == ("and" if name == "stop" else None)
        assert message.usage.output_tokens > 0
    texts = [e.text for e in events if e.type == "text"]
    assert "".join(texts) == "".join(b.text for b in streamed.content if b.type == "text")
    if name != "cut_tool":
        assert [b.to_dict() | {"id": "", "signature": ""} for b in whole.content] == [
            b.to_dict() | {"id": "", "signature": ""} for b in streamed.content
        ]


def test_anthropics_sdk_gets_a_tools_input_in_pieces() -> None:
    with claude(answer("messages", "tool_streamed"), stream=True).messages.stream(**HI) as stream:
        pieces = [e.partial_json for e in stream if e.type == "input_json"]
        [block] = stream.get_final_message().content
    assert json.loads("".join(pieces)) == {"expression": "12 * 34"}
    assert block.type == "tool_use"
    assert block.input == {"expression": "12 * 34"}


@pytest.mark.parametrize(("name", "kind"), [("text", "message"), ("tool", "function_call")])
def test_openais_sdk_reads_responses(name: str, kind: str) -> None:
    whole = gpt(answer("responses", f"{name}_whole")).responses.create(model="agent", input="x")
    body = answer("responses", f"{name}_streamed")
    with gpt(body, stream=True).responses.stream(model="agent", input="x") as stream:
        deltas = [e.delta for e in stream if e.type == "response.output_text.delta"]
        streamed = stream.get_final_response()
    for response in (whole, streamed):
        assert (response.model, [item.type for item in response.output]) == ("agent", [kind])
    assert "".join(deltas) == streamed.output_text == whole.output_text


def test_anthropics_sdk_raises_our_errors() -> None:
    import anthropic

    body = FORMATS["messages"].errors.body("no such model", "not_found_error")
    with pytest.raises(anthropic.NotFoundError, match="no such model"):
        claude(body, 404).messages.create(**HI)
    torn = FORMATS["messages"].errors.event("the upstream broke off")
    start = answer("messages", "text_streamed").partition(b"event: content_block_stop")[0]
    with (
        pytest.raises(anthropic.APIStatusError, match="broke off") as raised,
        claude(start + torn, stream=True).messages.stream(**HI) as stream,
    ):
        stream.until_done()
    assert raised.value.body == {
        "type": "error",
        "error": {"type": "api_error", "message": "the upstream broke off"},
    }


def test_openais_sdk_raises_our_errors() -> None:
    import openai

    for api in ("chat", "completions", "responses"):
        body = FORMATS[api].errors.body(
            "no such model", "invalid_request_error", "model", "not_found"
        )
        with pytest.raises(openai.NotFoundError, match="no such model") as refused:
            gpt(body, 404).models.list()
        assert (refused.value.param, refused.value.code) == ("model", "not_found")
    torn = FORMATS["chat"].errors.event("the upstream broke off")
    with pytest.raises(openai.APIError, match="broke off") as raised:
        list(
            gpt(torn, stream=True).chat.completions.create(
                model="agent", messages=HI["messages"], stream=True
            )
        )
    assert raised.value.type == "server_error"


def test_openais_sdk_reads_a_responses_error_event() -> None:
    import openai

    torn = FORMATS["responses"].errors.event("the upstream broke off")
    [event] = gpt(torn, stream=True).responses.create(model="agent", input="x", stream=True)
    assert isinstance(event, openai.types.responses.ResponseErrorEvent)
    assert (event.message, event.code, event.sequence_number) == (
        "the upstream broke off",
        "server_error",
        0,
    )
