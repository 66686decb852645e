"""What makes a call evaluation, and what is said of a split that nobody knows."""

from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.formats.base import ModelRequest
from proxy.formats.chat import CHAT
from proxy.identity.call_memory import CallMemory
from proxy.identity.identify import CallIdentity, identify, split_outside
from proxy.routing import Kind, Route, find_route
from store.records import EVAL_TASKS

PATH = "/v1/chat/completions"


def who(
    headers: dict[str, str] | None = None,
    prefix: str = "",
    metadata: Any = None,
    stitches: CallMemory | None = None,
) -> CallIdentity:
    fields: dict[str, Any] = {"messages": []} | ({} if metadata is None else {"metadata": metadata})
    route = find_route("POST", prefix + PATH)
    request = ModelRequest(b"{}", fields=fields)
    return identify(headers or {}, route, request, "own", stitches or CallMemory())


def test_a_call_that_says_nothing_is_for_training() -> None:
    assert who().split == "train"
    assert who({"x-pawl-task": "evaluate this"}).split == "train"


@pytest.mark.parametrize(
    ("headers", "prefix", "metadata"),
    [
        ({"x-pawl-split": "eval"}, "", None),
        ({"x-pawl-split": "Eval"}, "", None),
        ({}, "/split/eval", None),
        ({}, "/split/%20eval", None),
        ({}, "", {"pawl_split": "eval\n"}),
        ({}, "/task/t/episode/e/agent/a/split/eval", None),
        ({}, "/agent/a/split/eval", None),
        ({}, "", {"pawl_split": "eval"}),
        ({"baggage": "pawl.split=eval"}, "", None),
        ({"x-pawl-task": "eval/sums"}, "", None),
        ({}, "/task/eval%2Fsums", None),
        ({}, "", {"pawl_task": "eval/sums"}),
    ],
)
def test_each_way_to_say_that_it_is_evaluation(
    headers: dict[str, str], prefix: str, metadata: Any
) -> None:
    found = who(headers, prefix, metadata)
    assert (found.split, found.warnings) == ("eval", ())


def test_the_first_that_says_something_counts() -> None:
    assert who({"x-pawl-split": "train"}, "/split/eval").split == "train"
    assert who({"x-pawl-split": "train", "x-pawl-task": "eval/x"}).split == "train"
    assert who({}, "/split/eval", {"pawl_split": "train"}).split == "eval"


@pytest.mark.parametrize(
    ("headers", "prefix", "where"),
    [
        ({"x-pawl-split": "test"}, "", "x-pawl-split 'test' is no split (train and eval are)"),
        ({"x-pawl-split": ""}, "", "x-pawl-split '' is no split"),
        ({}, "/split/dev", "/split/ in the URL 'dev' is no split"),
    ],
)
def test_an_unknown_split_is_ignored_with_a_warning(
    headers: dict[str, str], prefix: str, where: str
) -> None:
    found = who(headers, prefix)
    assert found.split == "train"
    [warning] = found.warnings
    assert warning.startswith(where)
    assert who(headers | {"x-pawl-task": "eval/x"}, prefix).split == "eval"


def test_the_beginning_of_evaluations_tasks_can_be_set() -> None:
    route = Route(kind=Kind.CALL, path=PATH, wire_format=CHAT, task="held-out:7")
    found = identify({}, route, ModelRequest(b""), "own", CallMemory(), eval_tasks="held-out:")
    assert found.split == "eval"


def test_headers_and_url_say_it_of_a_body_that_cannot_be_read() -> None:
    plain = find_route("POST", PATH)
    assert split_outside({"x-pawl-split": "eval"}, plain, EVAL_TASKS) == "eval"
    assert split_outside({"x-pawl-task": "eval/x"}, plain, EVAL_TASKS) == "eval"
    assert split_outside({}, find_route("POST", "/split/eval" + PATH), EVAL_TASKS) == "eval"
    assert split_outside({}, plain, EVAL_TASKS) == "train"


def test_a_retry_repeats_an_attempt_of_its_own_split() -> None:
    again = {"x-stainless-retry-count": "1"}
    stitches = CallMemory()
    stitches.failed(b"{}", "e", UUID(int=1), "eval")
    assert who(again, stitches=stitches).method == "own"
    assert who(again | {"x-pawl-split": "eval"}, stitches=stitches).episode == "e"


@given(st.text(), st.text())
def test_no_value_fails_a_call(header: str, metadata: str) -> None:
    found = who({"x-pawl-split": header}, metadata={"pawl_split": metadata})
    first, second = (value.strip().lower() for value in (header, metadata))
    assert found.split == ("eval" if "eval" in (first, second) and first != "train" else "train")
