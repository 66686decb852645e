"""Any shape of a reply in `choices`: it passes, and is read again as it was read."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from proxy.formats.base import read_request
from proxy.formats.chat import CHAT
from proxy.formats.choices import StreamReader
from proxy.formats.completions import COMPLETIONS
from tests.unit.proxy.formats.test_choices import asked, event

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "index",
                    "delta",
                    "message",
                    "logprobs",
                    "content",
                    "token_ids",
                    "tool_calls",
                    "text",
                    "function",
                    "id",
                    "logprob",
                    "finish_reason",
                    "token_logprobs",
                    "arguments",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(st.lists(JSON, max_size=3), JSON, JSON)
def test_no_shape_of_a_reply_breaks_the_call(choices: Any, prompt_ids: Any, usage: Any) -> None:
    body = json.dumps({"choices": choices, "prompt_token_ids": prompt_ids, "usage": usage}).encode()
    for wire_format in (CHAT, COMPLETIONS):
        request = wire_format.rewrite(read_request(b'{"model":"m"}'), "m@1", want_ids=True)
        whole = wire_format.whole_reader(request, "m@1")
        whole.feed(body)
        assert isinstance(json.loads(whole.finish()), dict)
        whole.facts()
        streamed = wire_format.stream_reader(request, "m@1")
        out = streamed.feed(b"data: " + body + b"\n\n") + streamed.finish()
        assert out.endswith(b"\n\n") or out == b""
        streamed.facts()


CHOICE = st.fixed_dictionaries(
    {"index": st.integers(0, 1) | JSON},
    optional={
        "delta": st.fixed_dictionaries(
            {},
            optional={
                "role": st.just("assistant") | JSON,
                "content": st.text(max_size=3) | JSON,
                "tool_calls": JSON,
                "x": JSON,
            },
        ),
        "text": st.text(max_size=3) | JSON,
        "message": JSON,
        "logprobs": JSON
        | st.fixed_dictionaries(
            {"content": st.lists(st.fixed_dictionaries({"logprob": st.floats(-9, 0) | JSON}))}
        ),
        "token_ids": st.lists(st.integers(-1, 2**31), max_size=3) | JSON,
        "prompt_token_ids": st.lists(st.integers(0, 9), max_size=3) | JSON,
        "finish_reason": st.sampled_from([None, "stop"]) | JSON,
    },
)
EVENT = st.fixed_dictionaries(
    {"choices": st.lists(CHOICE, max_size=2) | JSON},
    optional={
        "id": st.text(max_size=3) | JSON,
        "model": st.just("agent@3") | JSON,
        "usage": JSON,
        "prompt_token_ids": st.lists(st.integers(0, 9), max_size=3) | JSON,
    },
)


@given(st.lists(EVENT, max_size=4), st.sampled_from([b"data: [DONE]\n\n", b""]), st.booleans())
def test_read_again_at_once_a_stream_says_the_same(
    events: list[Any], end: bytes, injected: bool
) -> None:
    raw = b"".join(event(said) + b"\n\n" for said in events) + end
    request = asked() if injected else asked(return_token_ids=True, logprobs=True)
    fed, reread = (StreamReader(request, "agent@3", "chat.completion") for _ in range(2))
    fed.feed(raw)
    reread.read(raw)
    assert (fed.finish() is None, fed.facts()) == (reread.finish() is None, reread.facts())
    assert fed.ended == reread.ended
