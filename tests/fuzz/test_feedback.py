"""Any body and any key to /feedback: statements, or a refusal that says what is wrong."""

from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st

from proxy.errors import BadRequest
from proxy.feedback_body import parse_feedback
from proxy.formats.errors import OPENAI
from proxy.spool.segments import decode_payload, encode_frame, read_frames
from tests.fuzz.profile import fuzzing
from tests.fuzz.tape import made
from tests.fuzz.texts import anything, damaged, either, listed, one_of, shaped

NOW = datetime(2026, 1, 1, tzinfo=UTC)
_texts = one_of(b'"e1"', b"null", b'"\\u0000"', b'"\\ud800"', b'"\xff"', b'"' + b"a" * 1025 + b'"')
_reward = shaped(
    {
        "metric": one_of(b'"reward"', b"null", b'"m"', b'""', b'"\\u0000"'),
        "value": one_of(b"1", b"0.5", b"-1e308", b'"ok"', b"1e400", b"true", b"null"),
        "correction": one_of(
            b"null", b'"so"', b'" "', b'"\\ud800"', b'"' + b"a" * 65_537 + b'"', b"1"
        ),
        "episode": _texts,
    }
)
_tool_event = shaped(
    {
        "metric": one_of(b'"tool_status"'),
        "value": one_of(b'"ok"', b'"error"', b"[]", b"{}", b"1"),
        "call": one_of(b'"018f0000-0000-7000-8000-000000000000"', b'"{018f}"', b'"\\ud800"'),
        "id": _texts,
        "name": _texts,
        "detail": _texts,
        "ms": one_of(b"1", b"-1", b"null", b"1e400"),
    }
)
_plain = one_of(
    b'{"value":1,"episode":"e"}',
    b'{"metric":"tool_status","value":"ok","response":"r","id":"t","name":"n","ms":1.5}',
)
one_statement = either(_plain, _reward, _tool_event)
bodies = made(damaged(one_statement)) | made(damaged(listed(one_statement))) | made(anything)
keys = st.sampled_from((None, None, "k", "", "k" * 257, "\udcff", "\0")) | st.text(max_size=4)


@fuzzing(1_000)
@given(bodies | st.binary(max_size=30), keys)
def test_any_body_is_feedback_or_refused(body: bytes, key: str | None) -> None:
    try:
        record = parse_feedback(body, NOW, key)
    except BadRequest as refusal:
        # The refusal itself must reach the client.
        assert_can_be_sent(refusal)
        return
    [(_, payload)] = read_frames(encode_frame(record))
    assert decode_payload(payload) == record
    for item in record.items:
        for text in (item.metric, item.target, item.correction or ""):
            # PostgreSQL's texts are UTF-8 without NUL.
            assert b"\0" not in text.encode()


def assert_can_be_sent(refusal: BadRequest) -> None:
    assert refusal.message
    assert OPENAI.body(refusal.message, refusal.kind, refusal.param, refusal.code)
