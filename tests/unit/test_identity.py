"""Who a call belongs to: headers first, then the URL, else an episode of its own."""

from uuid import UUID

import pytest

from proxy.identity import identify
from proxy.routes import Kind, Route

CALL = UUID("01a1f80b-8bb3-758b-b889-c07dbbff7a56")
PLAIN = Route(kind=Kind.CALL, path="/v1/chat/completions")
NAMED = Route(kind=Kind.CALL, path="/v1/chat/completions", task="t", episode="u", agent="a")


def test_without_any_sign_a_call_is_an_episode_of_its_own() -> None:
    found = identify({}, PLAIN, CALL)
    assert (found.episode, found.method, found.agent) == (str(CALL), "own", "default")
    assert found.task is None


def test_headers_win_over_the_url() -> None:
    found = identify({"x-pawl-episode": "h"}, NAMED, CALL)
    assert (found.episode, found.method) == ("h", "header")
    assert (found.agent, found.task) == ("a", "t")


def test_the_url_names_an_episode() -> None:
    assert identify({}, NAMED, CALL).method == "url"


@pytest.mark.parametrize(
    ("value", "wrong"), [("", "empty"), ("x" * 257, "longer"), ("a\x00b", "unprintable")]
)
def test_an_unusable_name_is_a_warning_not_an_error(value: str, wrong: str) -> None:
    found = identify({"x-pawl-episode": value}, PLAIN, CALL)
    assert found.method == "own"
    assert wrong in found.warnings[0]
    assert "x-pawl-episode" in found.warnings[0]
