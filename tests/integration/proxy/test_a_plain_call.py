"""A call without a key, of the default tenant, with no version tried, needs no code about these."""

from typing import Final

import pytest

from proxy.calls import call, recording
from proxy.policies.owners import Owners
from proxy.policies.versions import Arms
from tests.integration.conftest import Proxy

PLACES: Final[tuple[tuple[object, str], ...]] = (
    (call, "check_continued"),
    (recording, "own_digests"),
    *((Owners, name) for name in ("owns", "hides", "check", "check_body")),
    *((Arms, name) for name in ("of_new", "of_version", "version_of")),
)


def entered(*_: object, **__: object) -> None:
    raise AssertionError("a plain call entered what is not about it")


async def test_a_plain_call_does_not_enter_what_is_not_about_it(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place, name in PLACES:
        monkeypatch.setattr(place, name, entered)
    reply = await proxy.chat(headers={"x-pawl-episode": "e"})
    assert (reply.status, reply.headers["x-pawl-policy"]) == (200, "m@0")
    assert (await proxy.only_call()).policy_version == 0
