"""Replies of a real vLLM: what the client sees is what it would have seen without us."""

import json
from collections.abc import Iterable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.recordings import Followed, asked, cut, follow, normalised, recordings, renamed

MESSAGES = recordings("messages")
RESPONSES = recordings("responses")
BOTH = {
    name: (api, recording)
    for api, recorded in (("messages", MESSAGES), ("responses", RESPONSES))
    for name, recording in recorded.items()
}
# vLLM itself refuses a whole reply whose tool call was cut short.
SAME = sorted(BOTH.keys() - {"messages_cut_tool_whole"})
STREAMED = [name for name in SAME if name.endswith("streamed")]
# Ids, log-probabilities.
COUNTS = {
    "messages_text": (12, 12),
    "messages_tool": (14, 14),
    "messages_cut_tool": (6, 6),
    "messages_thinking": (37, 37),
    "messages_stop": (34, 34),
    "responses_text_whole": (16, 16),
    # vLLM told 15: that of the token which ended the text is missing.
    "responses_text_streamed": (16, None),
    "responses_cut": (6, 6),
    "responses_tool": (14, None),
    "responses_thinking_whole": (16, 16),
    "responses_thinking_streamed": (16, None),
}


def answer(name: str, pieces: Iterable[bytes] | None = None) -> Followed:
    api, recording = BOTH[name]
    upstream = recording["upstream"].encode()
    return follow(api, asked(api, recording), [upstream] if pieces is None else pieces)


@pytest.mark.parametrize("name", SAME)
def test_client_sees_the_same_reply_as_without_a_proxy(name: str) -> None:
    reply = answer(name)
    assert normalised(reply.seen) == normalised(renamed(BOTH[name][1]["direct"]).encode())
    assert reply.ended


@pytest.mark.parametrize("name", sorted(BOTH))
def test_every_token_id_has_its_log_probability_or_is_known_to_lack_it(name: str) -> None:
    facts = answer(name).facts
    expected = COUNTS.get(name) or COUNTS[name.rpartition("_")[0]]
    sampled = facts.sampled
    logprobs = None if sampled.sampled_logprobs is None else len(sampled.sampled_logprobs)
    assert (len(sampled.sampled_ids or ()), logprobs) == expected
    assert sampled.completion_tokens == expected[0]
    usage = facts.usage or {}
    cached = sum(usage.get(f"cache_{kind}_input_tokens") or 0 for kind in ("read", "creation"))
    assert len(sampled.prompt_ids or ()) == usage["input_tokens"] + cached


@pytest.mark.parametrize("kind", ["text", "tool", "thinking", "stop", "cut_tool"])
def test_streamed_and_unstreamed_replies_are_recorded_with_the_same_tokens(kind: str) -> None:
    whole, streamed = (answer(f"messages_{kind}_{how}").facts for how in ("whole", "streamed"))
    assert whole.sampled == streamed.sampled


@pytest.mark.parametrize("name", STREAMED)
@pytest.mark.parametrize("ending", [b"\n", b"\r\n"])
@settings(deadline=None)
@given(cuts=st.lists(st.integers(0, 20_000), max_size=10))
@example(cuts=list(range(20_000)))
def test_recorded_stream_is_read_the_same_however_its_bytes_are_cut(
    name: str, ending: bytes, cuts: list[int]
) -> None:
    stream = BOTH[name][1]["upstream"].encode().replace(b"\n", ending)
    wanted, again = answer(name), answer(name, cut(stream, cuts))
    assert again.seen.replace(b"\r\n", b"\n") == wanted.seen
    assert again[1:] == wanted[1:]


@pytest.mark.parametrize("name", STREAMED)
def test_stream_cut_off_anywhere_has_not_ended(name: str) -> None:
    stream = BOTH[name][1]["upstream"].encode()
    last = stream.rstrip().rindex(b"\n\n")
    for end in range(0, last, max(1, last // 60)):
        assert not answer(name, [stream[:end]]).ended


@pytest.mark.parametrize("name", sorted(BOTH))
def test_summary_of_a_reply_has_its_text_id_and_tool_calls(name: str) -> None:
    _, facts, summary, _ = answer(name)
    reply = json.loads(facts.reply or b"")
    blocks = reply.get("content") or [
        {"type": "text", "text": part["text"]}
        for item in reply.get("output", [])
        for part in item.get("content") or []
        if part["type"] == "output_text"
    ]
    assert summary.text == "".join(b["text"] for b in blocks if b["type"] == "text")
    assert (summary.response_id, summary.tool_calls) == (reply["id"], facts.tool_calls)
