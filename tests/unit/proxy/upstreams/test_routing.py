"""Which upstream a model's name leads to."""

import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from proxy.upstreams.upstreams import ModelTable

TABLE = ModelTable(
    [["calculator", "qwen*"], ["gpt-*", "qwen-max", "claude@20240620"], ["gpt-oss*"]], default=0
)


@pytest.mark.parametrize(
    ("model", "number"),
    [
        ("calculator", 0),
        ("calculator@3", 0),
        ("qwen", 0),
        ("qwen-7b", 0),
        # A name said whole is before a beginning, and a version goes where its policy goes.
        ("qwen-max", 1),
        ("qwen-max@12", 1),
        ("gpt-4o", 1),
        ("gpt-oss-20b", 2),
        ("gpt-oss-20b@1", 2),
        # Some names have a date where a version stands.
        ("claude@20240620", 1),
        ("claude@20240620@2", 1),
        ("claude", 0),
        ("calculators", 0),
        (None, 0),
    ],
)
def test_a_name_finds_its_upstream(model: str | None, number: int) -> None:
    assert TABLE.find(model) == number


def test_without_a_default_the_others_are_nobodys() -> None:
    table = ModelTable([["a"], ["b*"]], default=None)
    assert [table.find(name) for name in ("a", "bb", "c", "a@x", "a@", None)] == [
        0,
        1,
        None,
        None,
        None,
        None,
    ]
    assert table.known == ("a", "b*")


names = st.text(alphabet="ab@1*", min_size=1, max_size=4).filter(lambda name: "*" not in name[:-1])


@given(
    st.lists(st.lists(names, max_size=4), max_size=4),
    st.text(alphabet="ab@1", max_size=6),
    st.integers(0, 99),
)
def test_a_version_is_where_its_policy_is_unless_it_is_named(
    claims: list[list[str]], model: str, version: int
) -> None:
    # A version has no versions of its own.
    assume(re.fullmatch(r".*@\d+", model) is None)
    said = [pattern for patterns in claims for pattern in patterns]
    table = ModelTable(claims, default=None)
    served = f"{model}@{version}"
    if not any(pattern == served or pattern.startswith(f"{model}@") for pattern in said):
        beginnings = [p[:-1] for p in said if p.endswith("*") and served.startswith(p[:-1])]
        if table.find(model) is not None or not beginnings:
            assert table.find(served) == table.find(model)


@given(st.lists(st.lists(names, min_size=1, max_size=3), min_size=1), st.text(alphabet="ab@1"))
def test_upstream_answers_only_models_it_claims(claims: list[list[str]], model: str) -> None:
    number = ModelTable(claims, default=None).find(model)
    if number is not None:
        policy = model.rpartition("@")[0]
        assert any(
            pattern in (model, policy) or (pattern.endswith("*") and model.startswith(pattern[:-1]))
            for pattern in claims[number]
        )
