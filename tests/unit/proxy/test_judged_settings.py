"""Settings are judged once for all calls that send the same, with the result of each alone."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy import trainable as sampling
from proxy.formats.base import read_request
from proxy.formats.registry import FORMATS
from proxy.spool.segments import CapturedCall
from proxy.trainable import Judged, judged_settings, sampling_settings, why_not_replayed

VALUES = st.sampled_from(
    [
        *(None, 0, 0.7, 1, "1", "x", True, False, [], ["a"], {"type": "json_object"}),
        *("required", [{"type": "function", "function": {"name": "f", "strict": True}}]),
    ]
)
NAMES = (
    *("temperature", "top_p", "min_tokens", "stop_token_ids", "tools", "tool_choice", "n", "user"),
    *(
        "parallel_tool_calls",
        "response_format",
        "guided_json",
        "structured_outputs",
        "logit_bias",
        "metadata",
        "unknown",
    ),
)
FIELDS = st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=5)


def captured(
    dialect: str,
    defaults: dict[str, float],
    *,
    tool_grammars: bool,
    tool_tag: str | None = None,
) -> CapturedCall:
    """A call of which only what its settings follow from is said."""
    return CapturedCall(
        id=bytes(16),
        episode="e",
        method="call",
        confidence="certain",
        agent="default",
        task=None,
        dialect=dialect,
        policy=None,
        policy_version=None,
        served_model="m",
        wanted_ids=True,
        status="complete",
        http_status=200,
        streamed=False,
        request=b"",
        reply=b"",
        deflated=False,
        provides=(),
        needs=(),
        retry_of=None,
        retry=0,
        tool_events=(),
        default_temperature=0.5,
        started_at=0.0,
        first_chunk_ms=None,
        total_ms=1.0,
        sampling_defaults=defaults,
        tool_grammars=tool_grammars,
        tool_tag=tool_tag,
    )


@given(
    st.sampled_from(sorted(FORMATS)),
    FIELDS,
    st.sampled_from([{}, {"top_p": 0.9}, {"top_k": 3.0, "top_p": 1.0}]),
    st.sampled_from([(False, None), (True, None), (True, "hermes")]),
)
def test_it_is_what_the_call_s_own_fields_give(
    dialect: str,
    fields: dict[str, Any],
    defaults: dict[str, float],
    parser: tuple[bool, str | None],
) -> None:
    known = dict(zip(("tool_grammars", "tool_tag"), parser, strict=True))
    call = captured(dialect, defaults, **known)  # type: ignore[arg-type]
    rules = FORMATS[dialect].sampling
    settings = sampling_settings(fields, 0.5, rules, defaults, **known)  # type: ignore[arg-type]
    request = read_request(msgspec.json.encode(fields))
    for _ in range(2):
        found = judged_settings(call, request)
        assert found.recorded == msgspec.json.encode(settings)
        for sure in (False, True):
            assert found.why_not(sure) == why_not_replayed(settings, rules, sure=sure)


def test_a_request_that_cannot_be_read_has_no_settings() -> None:
    found = judged_settings(captured("chat", {}, tool_grammars=True), read_request(b"["))
    assert found.recorded == b'{"unreadable":["request"]}'
    assert found.why_not(True) == found.why_not(False) == "unreadable_sampling"


def test_equal_ones_are_judged_once_and_long_ones_are_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    judge, judged = sampling._judge, []

    def counted(*known: Any) -> Judged:
        judged.append(known)
        return judge(*known)

    monkeypatch.setattr(sampling, "_judge", counted)
    sampling._known.cache_clear()
    call = captured("chat", {}, tool_grammars=True)
    for size in (1, 1, 1, sampling.MOST_FIELD_BYTES, sampling.MOST_FIELD_BYTES):
        judged_settings(call, read_request(msgspec.json.encode({"user": "x" * size})))
    assert len(judged) == 3
    assert sampling._known.cache_info().currsize == 1
