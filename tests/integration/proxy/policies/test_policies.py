"""A file of policies: three agents of one episode, each with its own policy."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from store import claims
from store.claim_query import ClaimRule
from store.version_states import ensure_base
from tests.integration.conftest import Proxy, StartProxy
from tests.support.ledger.lineage import promote, trained
from tests.support.servers.fake_upstream import FakeUpstream
from tests.support.waiting import eventually

FILE = """
[[policy]]
name = "writes"
base = "m"
agents = ["writer"]

[[policy]]
name = "checks"
base = "m"
agents = ["checker"]
models = ["my-checker"]

[[policy]]
name = "rest"
base = "m"
models = ["m"]
trained = false
"""
UPSTREAMS = """
[[upstream]]
name = "ours"
urls = ["{url}"]
models = ["m"]
default_sampling = {{ temperature = 0.6, top_k = 20 }}

[[upstream]]
name = "elsewhere"
urls = ["http://elsewhere.invalid/v1"]
default = true
"""


@pytest.fixture
async def several(
    engine: AsyncEngine, upstream: FakeUpstream, start_proxy: StartProxy, tmp_path: Path
) -> AsyncIterator[Proxy]:
    """A proxy that reads such a file; `m`, which it waits for, is an older policy."""
    async with engine.begin() as connection:
        for policy in ("writes", "checks"):
            assert await ensure_base(connection, policy, "m") == "m"
    path, upstreams = tmp_path / "policies.toml", tmp_path / "upstreams.toml"
    path.write_text(FILE)
    upstreams.write_text(UPSTREAMS.format(url=upstream.url))
    async with start_proxy(policies=path, upstreams=upstreams) as proxy:
        yield proxy


async def ask(proxy: Proxy, agent: str, **body: Any) -> str:
    headers = {"x-pawl-episode": "e", "x-pawl-agent": agent}
    reply = await proxy.chat(headers=headers, **body)
    assert reply.status == 200
    return reply.headers["x-pawl-policy"]


async def test_each_agent_gets_its_policy_and_the_fixed_policy_has_no_version(
    several: Proxy, upstream: FakeUpstream
) -> None:
    assert await ask(several, "rewriter") == "rest"
    assert await ask(several, "checker") == "checks@0"
    assert await ask(several, "writer") == "writes@0"
    assert await ask(several, "anyone", model="my-checker") == "checks@0"
    assert {asked["model"] for asked in upstream.requests} == {"m"}
    [episode] = await several.episodes(4)
    assert [(c.policy, c.policy_version, c.trainable, c.reason) for c in episode.calls] == [
        ("rest", None, False, "fixed_policy"),
        ("checks", 0, True, None),
        ("writes", 0, True, None),
        ("checks", 0, True, None),
    ]
    assert (await several.feedback({"episode": "e", "value": 1.0}))[0] == 200

    rule = {"group_size": 1, "groups": 1, "max_age_s": 1e-6}

    async def claimed() -> bool:
        async with several.engine.begin() as connection:
            found = [
                await claims.claim(connection, ClaimRule(policy=name, **rule), 0, {})
                for name in ("writes", "checks", "rest", "m")
            ]
            done = [one is not None for one in found] == [True, True, False, False]
            if not done:
                await connection.rollback()
        return done

    await eventually(claimed)


async def test_list_of_models_has_each_name_that_a_policy_answers(several: Proxy) -> None:
    listed = {one["id"]: one for one in (await several.ask("GET", "/v1/models")).json["data"]}
    assert list(listed) == ["m", "writes", "checks", "my-checker", "rest"]
    assert listed["my-checker"] == listed["m"] | {"id": "my-checker"}


async def test_policys_calls_record_the_sampling_defaults_of_its_bases_upstream(
    several: Proxy,
) -> None:
    assert await ask(several, "writer") == "writes@0"
    [episode] = await several.episodes(1)
    [sampling] = [call.sampling for call in episode.calls]
    assert (sampling["temperature"], sampling["top_k"]) == (0.6, 20)


async def test_promoting_a_policys_version_leaves_other_policies_unchanged(
    several: Proxy, upstream: FakeUpstream
) -> None:
    assert await ask(several, "checker") == "checks@0"
    async with several.engine.begin() as connection:
        await trained(connection, 0, name="checks")
        await promote(connection, "checks", 1, reason="for the test", actor="operator")

    async def swapped() -> bool:
        reply = await several.chat(headers={"x-pawl-agent": "checker"})
        return reply.headers["x-pawl-policy"] == "checks@1"

    await eventually(swapped)
    assert upstream.requests[-1]["model"] == "checks@1"
    assert upstream.requests[-1]["return_token_ids"] is True
    # The episode keeps the version that it began with, and the other policies theirs.
    assert await ask(several, "checker") == "checks@0"
    assert await ask(several, "writer") == "writes@0"
    assert await ask(several, "rewriter") == "rest"
