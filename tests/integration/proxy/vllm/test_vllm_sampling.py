"""What vLLM makes of a request's settings is what is recorded, or the call is not trainable."""

import json
import warnings
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from proxy.ingester.transcribe import transcribe
from proxy.trainable import NUMERIC_SETTINGS
from store.records import CallRecord
from store.values.sampling import distribution_of
from tests.support.proxy.grammars import recorded, written
from tests.support.records import captured

# Importing vLLM takes its time.
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240)]
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "q"}]}
APIS = ("chat", "completions", "responses")
LONG = "1" + "0" * 400
# JSON texts: what a client may write where a number is meant.
TEMPERATURES = (
    *("0", "0.0", "-0.0", "1", "0.7", "1e-3", "1e-6", "1e-300", "1e400", LONG, "-1", "2", "2.5"),
    *('"0"', '"0.7"', '" 0.7\\n"', '"1e-3"', '"1e-6"', '"-0"', '"+1"', '"0_1"', '".5"', '"1."'),
    *('"nan"', '"inf"', '"Infinity"', '"1e400"', '"0x1"', '""', '"\\u0661"', '"\\u00a01"', '"hot"'),
    *("true", "false", "null", "[]", "[1]", "{}"),
)
NUMBER_TEXTS = st.one_of(
    st.sampled_from(TEMPERATURES),
    st.floats(min_value=-3, max_value=3).map(repr),
    st.floats(min_value=0, max_value=0.02).map(repr),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.integers().map(str),
    st.from_regex(r'"[ +\-0-9._e]{1,6}"', fullmatch=True),
)


@pytest.fixture(scope="module")
def vllm_params() -> Any:
    """What vLLM samples with, by API and the fields of a request; None where it refuses."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest
        from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
        from vllm.exceptions import VLLMValidationError

    def read(api: str, body: str) -> Any:
        fields = json.loads(body)
        try:
            if api == "chat":
                return ChatCompletionRequest(**fields).to_sampling_params(16, {})
            if api == "completions":
                return CompletionRequest(**fields).to_sampling_params(16, {})
            return ResponsesRequest(**fields).to_sampling_params(16, {})
        except (ValueError, TypeError, OverflowError, VLLMValidationError):
            return None

    return read


def body_of(api: str, more: str) -> str:
    said = {"chat": '"messages":[]', "completions": '"prompt":"q"', "responses": '"input":"q"'}
    return f'{{"model":"m",{said[api]}{more}}}'


def assert_agrees(params: Any, found: dict[str, Any], reason: str | None) -> None:
    """A trainable call was sampled from the distribution that the trainer reads of its record."""
    if params is None:
        return
    if reason == "greedy":
        assert params.temperature == 0
    if reason is not None:
        return
    read = distribution_of(found)
    for name in ("temperature", "top_p", "min_p", "min_tokens", "repetition_penalty"):
        assert getattr(read, name) == getattr(params, name)
    for name in ("presence_penalty", "frequency_penalty"):
        assert getattr(read, name) == getattr(params, name)
    assert read.temperature == found["temperature"] > 0
    assert read.top_k == max(params.top_k, 0)
    biases = {token: bias for token, bias in (params.logit_bias or {}).items() if bias}
    assert dict(read.logit_bias) == biases
    assert set(read.bad_words) == set(params.bad_words or ())
    assert set(read.allowed_token_ids) == set(params.allowed_token_ids or ())
    if read.min_tokens:
        assert set(read.stop_token_ids) == set(params.stop_token_ids or ())
    assert written(params.structured_outputs) == read.grammar
    assert not params.watermarking


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("value", TEMPERATURES)
def test_record_of_a_trainable_call_has_the_temperature_that_vllm_uses(
    vllm_params: Any, api: str, value: str
) -> None:
    body = body_of(api, f',"temperature":{value}')
    params, (found, reason) = vllm_params(api, body), recorded(api, body)
    assert_agrees(params, found, reason)
    if params is not None and value != '"0_1"':
        # Of what it takes, all that is written plainly is understood.
        plain = value not in ('"\\u00a01"',)
        assert (reason != "unreadable_sampling") == plain


@settings(max_examples=300)
@given(st.sampled_from(APIS), NUMBER_TEXTS, st.sampled_from(sorted(NUMERIC_SETTINGS)), NUMBER_TEXTS)
@example("chat", '"0"', "top_p", '"0.5"')
@example("chat", "1e-3", "top_k", '"1"')
@example("completions", "1", "top_p", '"1.0"')
def test_record_of_a_trainable_call_has_the_sampling_numbers_that_vllm_uses(
    vllm_params: Any, api: str, value: str, name: str, other: str
) -> None:
    body = body_of(api, f',"temperature":{value},"{name}":{other}')
    assert_agrees(vllm_params(api, body), *recorded(api, body))


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ('"temperature":"0"', "greedy"),
        ('"temperature":"0.7"', None),
        ('"temperature":1e-6', None),
        ('"temperature":"hot"', "unreadable_sampling"),
        ('"temperature":0,"temperature":0.5', None),
        ('"temperature":0.5,"temperature":0', "greedy"),
        ('"temperature":0.5,"temp\\u0065rature":0', "greedy"),
        # vLLM ignores what it does not know; another version may know it.
        ('"Temperature":0', "unreadable_sampling"),
        ('"top_p":"0.5"', None),
        ('"top_p":"0"', "unreadable_sampling"),
        ('"top_p":"1.0"', None),
        ('"top_p":true', None),
        ('"top_k":"1"', None),
        ('"top_k":1.5', "unreadable_sampling"),
        ('"top_k":"0"', None),
        ('"top_k":-1.0', None),
        ('"presence_penalty":false', None),
        ('"repetition_penalty":"1.1"', None),
        ('"logit_bias":{"1":"5"}', None),
        ('"logit_bias":{"1":500,"2":0}', None),
        ('"logit_bias":{"01":5,"1":6}', "unreadable_sampling"),
        ('"watermarking":true', "reshaped_distribution"),
        ('"watermarking":"yes"', "reshaped_distribution"),
        ('"vllm_xargs":{"x":1}', "reshaped_distribution"),
        ('"top_p":null,"temperature":null,"top_k":null', None),
    ],
)
def test_each_spelling_of_a_sampling_setting_has_its_reason_and_vllms_value(
    vllm_params: Any, api: str, more: str, reason: str | None
) -> None:
    body = body_of(api, "," + more)
    params, (found, why) = vllm_params(api, body), recorded(api, body)
    assert why == reason
    assert_agrees(params, found, why)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize(
    "more",
    [
        *('"min_tokens":"3"', '"min_tokens":3,"stop_token_ids":[5,6,5]', '"bad_words":["a","a"]'),
        *('"allowed_token_ids":[1]', '"allowed_token_ids":[7,1,7],"top_p":0.5'),
    ],
)
def test_settings_that_vllm_ignores_in_responses_make_a_response_untrainable(
    vllm_params: Any, api: str, more: str
) -> None:
    """Responses may name these, and vLLM samples without them."""
    body = body_of(api, "," + more)
    found, why = recorded(api, body)
    assert why == ("reshaped_distribution" if api == "responses" else None)
    assert_agrees(vllm_params(api, body), found, why)


@pytest.mark.parametrize("value", ["true", '"true"', "1", '"yes"', "1.0"])
def test_beam_search_is_recorded_as_reshaped_distribution(value: str) -> None:
    assert (
        recorded("chat", body_of("chat", f',"use_beam_search":{value}'))[1]
        == "reshaped_distribution"
    )


@pytest.mark.parametrize(
    "more",
    [
        '"x":NaN,"temperature":0.5',
        '"tools":[{"type":"function","function":{"name":"f","strict":true,"parameters":{"a":1e400}}}]',
        '"text":{"format":{"type":"json_schema","schema":{"a":1e400}}}',
        '"thinking":{"type":"enabled","budget_tokens":1e400}',
        '"output_config":{"format":{"type":"json_schema"},"x":1e400}',
    ],
)
def test_request_that_pawls_json_parser_refuses_is_recorded_as_unreadable_sampling(
    more: str,
) -> None:
    assert recorded("chat", body_of("chat", "," + more))[1] == "unreadable_sampling"


@pytest.mark.parametrize("strict", ["true", "1", '"yes"'])
def test_strict_tool_in_any_spelling_is_recorded_as_constrained_sampling(strict: str) -> None:
    tool = f'{{"type":"function","function":{{"name":"f","strict":{strict}}}}}'
    assert recorded("chat", body_of("chat", f',"tools":[{tool}]'))[1] == "constrained_sampling"


def said(request: dict[str, Any], **changes: Any) -> CallRecord:
    return transcribe(captured(request=json.dumps(CHAT | request).encode(), **changes))


def test_record_has_the_sampling_settings_that_vllm_used() -> None:
    record = said({"temperature": 1e-3, "top_k": "-1", "seed": 3})
    assert (record.trainable, record.reason) == (True, None)
    assert json.loads(record.sampling) == {"temperature": 0.01, "top_k": -1.0, "seed": 3}
    assert said({}, default_temperature=1e-4).sampling == b'{"temperature":0.01}'
    assert said({}, default_temperature=0.0).reason == "greedy"
    card = said(
        {"top_k": 5, "top_p": None},
        default_temperature=0.6,
        sampling_defaults={"top_p": 0.95, "top_k": 20},
    )
    assert json.loads(card.sampling) == {"temperature": 0.6, "top_p": 0.95, "top_k": 5}
    assert card.reason is None
    assert said({}, sampling_defaults={"top_p": -1.0}).reason == "unreadable_sampling"
    unreadable = said({"temperature": "warm"})
    assert unreadable.reason == "unreadable_sampling"
    assert json.loads(unreadable.sampling)["temperature"] == "warm"


@pytest.mark.parametrize("wire_format", ["chat", "messages"])
def test_sampling_settings_of_the_messages_api_are_read_as_in_chat(wire_format: str) -> None:
    """Its requests go to vLLM as chat completions, settings as they are."""

    def reason(**settings: Any) -> str | None:
        return said({"max_tokens": 5} | settings, dialect=wire_format).reason

    assert reason(temperature="0") == "greedy"
    assert reason(temperature="0.5", top_p="1.0") is None
    assert reason(top_k="1", top_p=0.5) is None
    # What chat completions has no words for goes as it is, and no ids come back.
    assert reason(thinking="on") == {"chat": "unreadable_sampling"}.get(wire_format, "no_token_ids")


@pytest.mark.parametrize("logprob", ["-9999.0", "0.5", "1e30", "-1e30"])
def test_impossible_log_probability_makes_a_call_untrainable(logprob: str) -> None:
    reply = captured().reply.replace(b"-1.5", logprob.encode())
    assert said({}, reply=reply).reason == "impossible_logprobs"
