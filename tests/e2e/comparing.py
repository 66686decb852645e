"""Ask a question through the proxy and at vLLM itself, and compare the replies' bytes."""

import asyncio
import re
from typing import Any, Final

import aiohttp

from pawl.stack.stack import Stack
from tests.e2e.asking import direct
from tests.e2e.conftest import POLICY
from tests.support.recordings import TRIES, normalised

Scenarios = dict[str, dict[str, dict[str, Any]]]
# A status, and the bytes that can be compared.
Reply = tuple[int, bytes]
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


def cases_of(scenarios: Scenarios) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the path and fields of each scenario's cases, whole and streamed, by their names."""
    return {
        f"{path}-{name}-{kind}": (path, body | {"stream": stream})
        for path, named in scenarios.items()
        for name, body in named.items()
        for stream, kind in ((False, "whole"), (True, "streamed"))
    }


async def both_replies(
    stack: Stack, path: str, asked: dict[str, Any], asked_directly: dict[str, Any] | None = None
) -> tuple[Reply, Reply]:
    """Ask the proxy for the policy, and vLLM for the version that answered."""
    defaults = {"model": POLICY} | DEFAULTS[path]
    status, seen, version = await answer(f"{stack.base_url}/{path}", defaults | asked)
    wanted_status, wanted, _ = await answer(
        f"{direct(stack)}/{path}", defaults | (asked_directly or asked) | {"model": version}
    )
    named = b'"model":"%b"'
    wanted = wanted.replace(named % version.encode(), named % POLICY.encode())
    return (status, seen), (wanted_status, wanted)


async def first_replies(stack: Stack, scenarios: Scenarios) -> dict[str, tuple[Reply, Reply]]:
    """Return both replies of each case, which are asked for at once: vLLM computes in batches."""
    cases = cases_of(scenarios)
    replies = await asyncio.gather(*(both_replies(stack, *case) for case in cases.values()))
    return dict(zip(cases, replies, strict=True))


async def assert_same_bytes(
    stack: Stack,
    path: str,
    asked: dict[str, Any],
    asked_directly: dict[str, Any] | None = None,
    first: tuple[Reply, Reply] | None = None,
) -> None:
    """Both replies are the same, the `first` ones or those of a question that is asked again."""
    seen, wanted = first or await both_replies(stack, path, asked, asked_directly)
    for _ in range(TRIES):
        # What the server has cached of a prompt, and computes beside it, changes log-probabilities
        # in the sixth digit.
        if seen == wanted:
            break
        seen, wanted = await both_replies(stack, path, asked, asked_directly)
    assert seen == wanted


async def answer(url: str, body: dict[str, Any]) -> tuple[int, bytes, str]:
    """A reply's status, its bytes without ids and times, and the version that it names."""
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
        seen = TIME.sub(rb'"\1":0', normalised(await response.read()))
        version = response.headers.get("x-pawl-policy", "").removesuffix("@0")
    if body.get("n", 1) > 1 or isinstance(body.get("prompt"), list):
        # How the choices' chunks are interleaved differs from run to run.
        seen = b"\n".join(sorted(seen.split(b"\n")))
    return response.status, seen, version
