"""Fields by their path, and what spells a text in tokens."""

import pytest

from proxy.redaction.fields import with_field, without_ids

GONE = b'"[redacted]"'


@pytest.mark.parametrize(
    ("document", "path", "expected"),
    [
        (b'{"user": "u", "n": 1e400}', "user", b'{"user":"[redacted]","n":1e400}'),
        (b'{"a": {"b": {"c": 1}}}', "a.b", b'{"a":{"b":"[redacted]"}}'),
        (b'{"m": [{"c": "x"}, {"d": 1}]}', "m.*.c", b'{"m":[{"c":"[redacted]"},{"d": 1}]}'),
        (b'{"m": [{"c": "x"}, {"c": "y"}]}', "m.1.c", b'{"m":[{"c": "x"},{"c":"[redacted]"}]}'),
        (b'{"a": {"x": 1, "y": "2"}}', "a.*", b'{"a":{"x":"[redacted]","y":"[redacted]"}}'),
    ],
)
def test_a_field_is_replaced_whatever_it_holds(document: bytes, path: str, expected: bytes) -> None:
    assert with_field(document, path.split("."), GONE) == expected


@pytest.mark.parametrize(
    "document", [b'{"b": 1}', b'{"a": null}', b'{"a": "[redacted]"}', b'"a"', b"[1, 2]", b"{}"]
)
def test_what_the_path_does_not_lead_to_stays_as_it_is(document: bytes) -> None:
    assert with_field(document, ["a"], GONE) is document


def test_ids_and_log_probabilities_go_and_requests_for_them_stay() -> None:
    document = (
        b'{"prompt":[1,2],"logprobs":true,"top_logprobs":3,"prompt_token_ids":[1],"choices":'
        b'[{"token_ids":[4],"logprobs":{"content":[]},"text":"t"}],"n":[1,2]}'
    )
    assert without_ids(document) == (
        b'{"logprobs":true,"top_logprobs":3,"choices":[{"text":"t"}],"n":[1,2]}'
    )
    assert without_ids(b'{"prompt":["a","b"]}') == b'{"prompt":["a","b"]}'
