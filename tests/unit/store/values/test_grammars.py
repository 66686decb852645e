"""A recorded grammar is a part of what a call was sampled from."""

from typing import Any

import pytest

from store.values.grammars import KINDS, Grammar, read_grammar
from store.values.sampling import Distribution, distribution_of


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_recorded_is_read(kind: Any) -> None:
    assert read_grammar({"kind": kind, "text": "x"}) == Grammar(kind=kind, text="x")


@pytest.mark.parametrize(
    "value",
    [
        *(None, "a", [], {}, {"kind": "regex"}, {"kind": "odd", "text": ""}),
        *(
            {"kind": "json", "text": 7},
            {"kind": "json", "text": "", "x": 1},
            {"kind": [], "text": ""},
        ),
    ],
)
def test_nothing_else_is(value: Any) -> None:
    assert read_grammar(value) is None


def test_it_makes_a_distribution_that_looks_back_and_knows_its_stops() -> None:
    asked = {"kind": "regex", "text": "a+"}
    found = distribution_of({"temperature": 1.0, "grammar": asked, "stop_token_ids": [9, 4]})
    assert found.grammar == Grammar(kind="regex", text="a+")
    assert found.stop_token_ids == (4, 9)
    assert found.needs_history
    assert not found.is_plain
    assert hash(found) == hash(
        distribution_of({"temperature": 1.0, "grammar": dict(asked), "stop_token_ids": [4, 9]})
    )


def test_none_is_no_grammar() -> None:
    assert distribution_of({"temperature": 1.0, "grammar": None}) == Distribution(temperature=1.0)
