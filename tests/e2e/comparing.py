"""Ask a question through the proxy and at vLLM itself, and compare the replies' bytes."""

import re
from typing import Any, Final

import aiohttp
import pytest

from pawl.stack.stack import Stack
from tests.e2e.asking import direct
from tests.e2e.conftest import POLICY
from tests.support.recordings import TRIES, normalised

Scenarios = dict[str, dict[str, dict[str, Any]]]
# Of plain text the first few tokens show what the others do.
SHORT: Final = 8
SEEDED: dict[str, Any] = {"seed": 7, "temperature": 1.0, "max_tokens": SHORT}
# vLLM takes no seed for messages and responses: what does not depend on one is compared.
DEFAULTS: dict[str, dict[str, Any]] = {
    "chat/completions": SEEDED,
    "completions": SEEDED,
    "messages": {"temperature": 0.0, "max_tokens": SHORT},
    "responses": {"temperature": 0.0, "max_output_tokens": SHORT},
}
# Ids and times differ between any two calls; everything else must not.
TIME = re.compile(rb'"(created|completed_at)":\s*[\d.]+')


def each(scenarios: Scenarios) -> pytest.MarkDecorator:
    """Parametrize a test by path, fields of the body, and whether the reply is streamed."""
    cases = [
        pytest.param(path, body | {"stream": stream}, id=f"{path}-{name}-{kind}")
        for path, named in scenarios.items()
        for name, body in named.items()
        for stream, kind in ((False, "whole"), (True, "streamed"))
    ]
    return pytest.mark.parametrize(("path", "body"), cases)


async def assert_same_bytes(
    stack: Stack, path: str, asked: dict[str, Any], asked_directly: dict[str, Any] | None = None
) -> None:
    """Ask the proxy for the policy, and vLLM for the version that answered."""
    defaults = {"model": POLICY} | DEFAULTS[path]
    for _ in range(TRIES):
        status, seen, version = await answer(f"{stack.base_url}/{path}", defaults | asked)
        wanted_status, wanted, _ = await answer(
            f"{direct(stack)}/{path}", defaults | (asked_directly or asked) | {"model": version}
        )
        named = b'"model":"%b"'
        wanted = wanted.replace(named % version.encode(), named % POLICY.encode())
        # What the server has cached of a prompt changes log-probabilities in the sixth digit.
        if (status, seen) == (wanted_status, wanted):
            break
    assert (status, seen) == (wanted_status, wanted)


async def answer(url: str, body: dict[str, Any]) -> tuple[int, bytes, str]:
    """A reply's status, its bytes without ids and times, and the version that it names."""
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
        seen = TIME.sub(rb'"\1":0', normalised(await response.read()))
        version = response.headers.get("x-pawl-policy", "").removesuffix("@0")
    if body.get("n", 1) > 1 or isinstance(body.get("prompt"), list):
        # How the choices' chunks are interleaved differs from run to run.
        seen = b"\n".join(sorted(seen.split(b"\n")))
    return response.status, seen, version
