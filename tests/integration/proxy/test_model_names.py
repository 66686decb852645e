"""Names of models that clients make up: what they cost the upstream, memory and the metrics."""

import asyncio
from pathlib import Path

import pytest

from proxy.errors import NoUpstream
from proxy.settings import ProxySettings
from proxy.upstreams import server as module
from proxy.upstreams.server import Upstream
from proxy.upstreams.upstreams import Member, SamplingDefaults, Upstreams, open_upstreams
from tests.integration.conftest import Proxy
from tests.support.servers.fake_upstream import FakeUpstream
from tests.support.waiting import eventually


async def test_twenty_unknown_names_cost_one_look(upstream: FakeUpstream) -> None:
    server = Upstream([upstream.url], silence_s=5)
    assert not any([await server.gives_ids(f"unknown {number}") for number in range(20)])
    assert upstream.looks == 1
    # Those that are known were learnt by the same look.
    assert await server.gives_ids("m")
    assert upstream.looks == 1
    assert len(server._gives_ids) == 1
    await server.close()


async def test_names_that_are_asked_for_at_once_share_one_look(upstream: FakeUpstream) -> None:
    server = Upstream([upstream.url], silence_s=5)
    names = [*(f"unknown {number}" for number in range(50)), "m"]
    found = await asyncio.gather(*(server.gives_ids(name) for name in names))
    assert found == [False] * 50 + [True]
    assert upstream.looks == 1
    await server.close()


async def test_a_model_that_has_just_appeared_is_found_soon(upstream: FakeUpstream) -> None:
    assert module.LOOK_AGAIN_S <= 2
    server = Upstream([upstream.url], silence_s=5)
    assert not await server.gives_ids("new")
    upstream.models.append("new")
    await eventually(lambda: server.gives_ids("new"))
    assert upstream.looks == 2
    await server.close()


async def test_a_server_that_cannot_be_asked_is_not_asked_by_each_call(
    upstream: FakeUpstream,
) -> None:
    upstream.list_status = 500
    server = Upstream([upstream.url], silence_s=5)
    assert not any(await asyncio.gather(*(server.gives_ids("m") for _ in range(30))))
    assert upstream.looks == 1
    upstream.list_status = 200
    await eventually(lambda: server.gives_ids("m"))
    await server.close()


async def test_a_server_whose_list_is_never_the_same_fills_no_memory(
    upstream: FakeUpstream,
) -> None:
    server = Upstream([upstream.url], silence_s=5)
    for number in range(30):
        server.learn(f"{number} {name}" for name in range(1000))
    assert len(server._gives_ids) <= module.MOST_NAMES
    await server.close()


async def test_metrics_of_any_name_are_three_series(proxy: Proxy) -> None:
    await proxy.chat("/episode/e")
    for number in range(10):
        named = [{"metric": f"m{number}-{i}", "value": 1, "episode": "e"} for i in range(100)]
        await proxy.feedback(named)
    async with proxy.session.get(f"{proxy.admin}/metrics") as reply:
        text = await reply.text()
    lines = [line for line in text.splitlines() if line.startswith("pawl_feedback_total{")]
    assert {line.split('metric="')[1].split('"')[0] for line in lines} <= {
        "reward",
        "tool_status",
        "other",
    }
    assert len(text) < 60_000


async def test_each_upstream_samples_with_defaults_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "upstreams.toml"
    file.write_text(
        '[[upstream]]\nname = "a"\nurls = ["http://a/v1"]\nmodels = ["a"]\n'
        "default_sampling = { temperature = 0.6, top_p = 0.9, top_k = 20 }\n"
        '[[upstream]]\nname = "b"\nurls = ["http://b/v1"]\nmodels = ["b"]\n'
    )
    known = open_upstreams(
        ProxySettings(upstreams=file, default_temperature=0.8, default_sampling={"top_p": 0.95})
    )
    assert known.sampling_defaults("a@3") == SamplingDefaults(0.6, {"top_p": 0.9, "top_k": 20})
    assert known.sampling_defaults("b") == SamplingDefaults(0.8, {"top_p": 0.95})
    assert known.sampling_defaults("neither") == SamplingDefaults(1.0, {})
    await known.close()


def test_a_name_is_not_said_back_whole() -> None:
    known = Upstreams([Member("one", ("a",), False, Upstream(["http://a/v1"], silence_s=1))])
    with pytest.raises(NoUpstream) as refused:
        known.for_model("x" * 1_000_000)
    assert len(refused.value.message) < 500
