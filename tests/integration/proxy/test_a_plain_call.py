"""A call without a key, of the default tenant, with no version tried, needs no code about these."""

from collections.abc import Callable

import pytest

from proxy.calls import call, recording
from proxy.policies.arms import Arms
from proxy.policies.owners import Owners
from tests.integration.conftest import Proxy


def entered(*_: object, **__: object) -> None:
    raise AssertionError("a plain call entered it")


@pytest.mark.parametrize(
    "place",
    [
        (call, "check_continued"),
        (recording, "own_digests"),
        *((Owners, name) for name in ("owns", "hides", "check", "check_body")),
        *((Arms, name) for name in ("of_new", "of_version", "version_of")),
    ],
    ids=lambda place: place[1],
)
async def test_a_plain_call_does_not_enter(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch, place: tuple[Callable[..., object], str]
) -> None:
    monkeypatch.setattr(*place, entered)
    assert (await proxy.chat(headers={"x-pawl-episode": "e"})).status == 200
    assert (await proxy.only_call()).arm == "serving"
