"""What a request asks, whatever instructions are beside it."""

import json
from typing import Any

import msgspec
import pytest

from proxy.ingester.transcribe import question_digest
from store.records import CallRecord, Tokens
from store.write.rows import derived_task, episode_row, no_question
from tests.support.records import call, tokens

USER = {"role": "user", "content": "What is 2 + 2?"}
# Of what `USER` says, whichever format it is in.
SUM = "4dcdf32cc3a491b4e5eea4d62896a2a3008bac50bb9659bfb200471a016375f0"


def digest_of(dialect: str, request: bytes | None) -> bytes | None:
    return question_digest(call(dialect=dialect, request=request))


def task_of(record: CallRecord) -> str | None:
    return derived_task(record, question_digest)


def chat(*messages: Any, **fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": messages, **fields}).encode()


def clock(time: str, role: str = "system") -> dict[str, str]:
    return {"role": role, "content": f"Be brief. It is {time}."}


@pytest.mark.parametrize(
    ("dialect", "request_", "digest"),
    [
        (
            "chat",
            b'{"model":"m","messages":[{"role":"system","content":"It is 10:01."},'
            b'{"role":"user","content":"What is 2 + 2?"}]}',
            SUM,
        ),
        (
            "chat",
            '{"messages":[{"role":"user","content":[{"type":"text","text":"\\u00fcber 😀"},'
            '{"type":"image_url","image_url":{"url":"data:,x"}}]},'
            '{"role":"assistant","content":"4"},{"role":"user","content":"And 3?"}]}'.encode(),
            "a5563fb2abe16210cfda9703fdd96c39f4d9eb17f320e4efadfc752f5f1c2bf8",
        ),
        (
            "messages",
            b'{"system":[{"type":"text","text":"It is 10:02."}],"messages":[{"role":"user",'
            b'"content":"What is 2 + 2?"}]}',
            SUM,
        ),
        (
            "messages",
            b'{"system":"It is 10:01.","messages":[{"role":"user","content":[{"type":"tool_result",'
            b'"tool_use_id":"t","content":"4"},{"type":"text","text":"What is 2 + 2?"}]}]}',
            SUM,
        ),
        ("responses", b'{"instructions":"Be brief.","input":"What is 2 + 2?"}', SUM),
        ("chat", chat(clock("10:02", "developer"), USER, temperature=0.5), SUM),
        (
            "responses",
            b'{"input":[{"type":"reasoning","summary":[]},{"role":"user","content":'
            b'[{"type":"input_text","text":"What is 2 + 2?"}]},'
            b'{"type":"function_call_output","call_id":"c","output":"4"}]}',
            SUM,
        ),
    ],
)
def test_digests_of_questions_never_change(dialect: str, request_: bytes, digest: str) -> None:
    """Names of groups are made of these digests: another digest would be another group."""
    assert (digest_of(dialect, request_) or b"").hex() == digest


def test_another_question_is_another_digest() -> None:
    other = digest_of("chat", chat(clock("10:01"), {"role": "user", "content": "2 + 3?"}))
    assert other not in (None, bytes.fromhex(SUM))


@pytest.mark.parametrize("text", ["What is 2 + 2?", 'a "b" \\ c', "\u00fcber\n", "\U0001f600", ""])
def test_escaping_of_a_questions_text_does_not_change_its_digest(text: str) -> None:
    escaped = "".join(rf"\u{unit:04x}" for unit in _utf16(text))
    written = [json.dumps(text), f'"{escaped}"', json.dumps([{"type": "text", "text": text}])]
    bodies = [
        f'{{"messages": [{json.dumps(USER)}, {{"role": "user", "content": {content}}}]}}'
        for content in written
    ]
    assert len({digest_of("chat", body.encode()) for body in bodies}) == 1


def _utf16(text: str) -> list[int]:
    data = text.encode("utf-16-le", errors="surrogatepass")
    return [int.from_bytes(data[at : at + 2], "little") for at in range(0, len(data), 2)]


def test_question_is_made_of_user_messages_alone() -> None:
    found = digest_of("chat", chat(USER))
    example = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    assert digest_of("chat", chat(*example, USER)) != found
    told = {"role": "tool", "tool_call_id": "c", "content": "4"}
    answered = chat(USER, {"role": "assistant", "content": None}, told)
    assert digest_of("chat", answered) == found
    image = {"type": "image_url", "image_url": {"url": "data:,x"}}
    assert digest_of("chat", chat({"role": "user", "content": [image]})) not in (found, None)


def test_boundaries_between_messages_change_the_question_digest() -> None:
    one, other = ("ab", "c"), ("a", "bc")
    found = [
        digest_of("chat", chat(*({"role": "user", "content": text} for text in texts)))
        for texts in (one, other)
    ]
    assert found[0] != found[1]


@pytest.mark.parametrize(
    "request_",
    [
        None,
        b"",
        b"nonsense",
        b'"text"',
        b'{"messages": 1}',
        b'{"messages": ["text"]}',
        b'{"messages": {"role": "user", "content": "x"}}',
        b'{"messages": "text"}',
        b'{"messages": [{"role": 1e400}, {"role": "user", "content": "x"}]}',
        b'{"messages": []}',
        b'{"messages": [{"role": "system", "content": "x"}]}',
        b'{"messages": [{"role": "user", "content": null}]}',
        b'{"messages": [{"role": "user", "content": ""}]}',
        b'{"messages": [{"role": "user", "content": ' + b"[" * 5000 + b"]" * 5000 + b"}]}",
    ],
)
def test_request_without_a_question_has_no_question_digest(request_: bytes | None) -> None:
    assert digest_of("chat", request_) is None


def test_plain_prompt_of_a_completion_has_no_question_digest() -> None:
    assert digest_of("completions", b'{"prompt": "2 + 2"}') is None


def test_unnamed_task_is_derived_from_the_question_or_the_prompt_ids() -> None:
    ids = [tokens([1, 2, number], [4]) for number in range(2)]
    one, other = (
        call(tokens=own, request=chat(clock(f"10:0{number}"), USER))
        for number, own in enumerate(ids)
    )
    assert task_of(one) == task_of(other)
    assert (task_of(one) or "").startswith("prompt:")
    # Without a question the prompt's ids, as before; without ids there is nothing to compare.
    plain = [task_of(call(tokens=own)) for own in ids]
    assert None not in plain
    assert plain[0] != plain[1]
    assert plain == [derived_task(call(tokens=own), no_question) for own in ids]
    assert task_of(call(tokens=tokens([], []))) is None
    # What was asked is known without them.
    unknown = call(tokens=tokens([], []), request=chat(USER))
    assert task_of(unknown) == task_of(one)
    # What was refused from the start is no try at it.
    assert task_of(msgspec.structs.replace(unknown, http_status=400)) is None


def test_task_is_derived_from_a_first_call_of_another_model() -> None:
    """A planner elsewhere gives no ids, and what it plans is another text each time."""
    rows = [
        episode_row(
            [
                call(policy=None, policy_version=None, tokens=Tokens(), request=chat(USER)),
                call(request=chat({"role": "user", "content": f"Plan {number}: add them."})),
            ],
            question_digest,
        )
        for number in range(2)
    ]
    tasks = {row[3] for row in rows}
    assert len(tasks) == 1
    assert None not in tasks
