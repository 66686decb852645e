"""Web pages of other sites, asking every port of a Pawl that nobody made a key for."""

import json

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from proxy.settings import ProxySettings
from store.browsers import why_foreign
from tests.integration.conftest import Proxy, StartProxy
from tests.support.proxy.keys import bearer, made, taken

TEXT = {"Content-Type": "text/plain"}
REWARD = json.dumps({"value": -1000, "episode": "e"})
CALL = json.dumps({"model": "m", "messages": [{"role": "user", "content": "q"}]})
# What a browser says of a page of another site, or of a name that was pointed at this machine.
FOREIGN = [
    ("Origin", {"Origin": "https://evil.example"}),
    ("Origin", {"Origin": "null"}),
    ("Origin", {"Origin": "http://localhost:3000", "Sec-Fetch-Site": "same-site"}),
    ("Sec-Fetch-Site", {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "empty"}),
    ("Host", {"Host": "evil.example"}),
    ("Host", {"Host": "evil.example:8100", "Origin": "http://evil.example:8100"}),
]


@pytest.mark.parametrize(("header", "page"), FOREIGN)
async def test_web_page_of_another_site_can_neither_post_nor_read(
    proxy: Proxy, header: str, page: dict[str, str]
) -> None:
    before = (await proxy.counters())["pawl_records_total"]
    asked = [
        await proxy.ask("POST", "/feedback", TEXT | page, data=REWARD),
        await proxy.ask("POST", "/v1/chat/completions", TEXT | page, data=CALL),
        await proxy.ask("GET", "/v1/files", page),
        await proxy.admin_page("/metrics", page),
    ]
    for reply in asked:
        assert reply.status == 403
        assert reply.json["error"]["code"] == "foreign_page"
        assert header in reply.json["error"]["message"]
        assert "PAWL_ALLOWED_HOSTS" in reply.json["error"]["message"]
    assert (await proxy.counters())["pawl_records_total"] == before


@pytest.mark.parametrize(
    "headers",
    [
        {},
        # Node's fetch says this much.
        {"Sec-Fetch-Mode": "cors", "Accept-Language": "*"},
        {"Sec-Fetch-Site": "same-origin", "Origin": "http://localhost:8100", "Host": "localhost"},
        *({"Host": own} for own in ("localhost:8100", "proxy:8100", "127.0.0.1", "[::1]:8100")),
        *({"Host": own} for own in ("host.docker.internal:8100", "p.ns.svc.cluster.local.")),
        # As `pawl up` names a proxy that listens on all addresses.
        {"Host": "0.0.0.0:8100"},
    ],
)
async def test_local_program_or_page_is_answered_without_a_key(
    proxy: Proxy, headers: dict[str, str]
) -> None:
    assert (await proxy.chat(headers=headers)).status == 200


async def test_requests_with_a_configured_host_name_or_page_origin_are_answered(
    start_proxy: StartProxy,
) -> None:
    named = ("pawl.example", "localhost:3000")
    async with start_proxy(allowed_hosts=named, access="anyone") as proxy:
        for headers, status in (
            ({"Host": "pawl.example:8100"}, 200),
            ({"Host": "192.168.1.7:8100"}, 200),
            ({"Origin": "http://localhost:3000", "Sec-Fetch-Site": "same-site"}, 200),
            ({"Host": "x.pawl.example"}, 403),
            ({"Origin": "http://localhost:3001", "Sec-Fetch-Site": "same-site"}, 403),
        ):
            assert (await proxy.chat(headers=headers)).status == status


def test_allowed_hosts_are_compared_in_lower_case() -> None:
    hosts = ProxySettings.model_validate(
        {"DATABASE_URL": "postgresql://h/d", "allowed_hosts": "Pawl.example, localhost:3000"}
    ).allowed_hosts
    assert why_foreign("GET", [(b"Host", b"PAWL.example:8100")], hosts) is None


async def test_proxy_with_keys_checks_the_key_and_not_the_page_origin(
    proxy: Proxy, engine: AsyncEngine
) -> None:
    key = await made(engine, "agent", "infer", "feedback")
    await taken(proxy, key)
    for _, page in FOREIGN:
        assert (await proxy.chat(headers=page | bearer(key))).status == 200
        assert (await proxy.chat(headers=page)).status == 401
