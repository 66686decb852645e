"""Every endpoint with every scope and tenant, as the OpenAPI document has it: that alone passes."""

import asyncio
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from sqlalchemy.ext.asyncio import AsyncEngine

from store.grants import SCOPES
from store.tenants import DEFAULT
from tests.conftest import ROOT
from tests.integration.conftest import Proxy, StartProxy
from tests.integration.proxy.keys.conftest import EVERYONE
from tests.support.proxy.keys import bearer, key_of, made, taken

DOCUMENT: dict[str, Any] = json.loads((ROOT / "docs/reference/openapi.json").read_text())
CALL = {"model": "m", "messages": [{"role": "user", "content": "q"}], "input": "q", "prompt": "q"}
REPEATED = re.compile(r"\[(/\{id\})\] \(0 to \d+ times\)")


class Endpoint(NamedTuple):
    """A method and path, the port, and the scope that the document asks for; None: open."""

    method: str
    path: str
    admin: bool
    scope: str | None
    # Reaches what a provider keeps for all tenants: only keys of the default one may.
    kept: bool = False


def scope_of(security: list[dict[str, list[str]]]) -> str | None:
    """The one scope that each of the schemes asks for."""
    asked = {scope for scheme in security for scopes in scheme.values() for scope in scopes}
    assert len(asked) == bool(security)
    return next(iter(asked), None)


def endpoints() -> Iterator[Endpoint]:
    for path, item in DOCUMENT["paths"].items():
        for method in item.keys() & {"get", "post"}:
            scope = scope_of(item[method]["security"])
            yield Endpoint(method.upper(), path, "servers" in item, scope)
    for route in DOCUMENT["x-pawl-forwarded"]["routes"]:
        scope = scope_of(route["security"])
        for method in route["methods"]:
            for path in route["paths"]:
                whole = REPEATED.sub(r"\1", path).replace("{id}", "x1").replace("{model}", "m")
                yield Endpoint(method, whole, False, scope, route["kept"])


ENDPOINTS = sorted(endpoints())


async def answers(
    proxy: Proxy, endpoint: Endpoint, shown: Mapping[Any, Any], model: str = "m", **about: str
) -> dict[Any, tuple[int, str]]:
    """The status, and who is at fault, by whose headers are shown."""
    path = endpoint.path.replace("/v1/models/m", f"/v1/models/{model}")
    body: Any = CALL | {"model": model}
    if endpoint.path == "/feedback":
        body = {"value": 1} | (about or {"episode": "e"})
    url = f"{proxy.admin if endpoint.admin else proxy.url}{path}"
    sent = {"json": body} if endpoint.method == "POST" else {}

    async def answer(headers: Mapping[str, str]) -> tuple[int, str]:
        async with proxy.session.request(endpoint.method, url, headers=headers, **sent) as reply:
            return reply.status, reply.headers.get("x-pawl-fault", "")

    return dict(zip(shown, await asyncio.gather(*map(answer, shown.values())), strict=True))


def test_openapi_document_has_every_endpoint_with_its_security_schemes() -> None:
    assert len(ENDPOINTS) > 60
    assert {one.scope for one in ENDPOINTS} == {None, "infer", "feedback", "read", "admin"}
    assert {one.path for one in ENDPOINTS if one.scope is None} == {"/healthz", "/readyz"}
    schemes = set(DOCUMENT["components"]["securitySchemes"])
    for item in DOCUMENT["paths"].values():
        for method in item.keys() & {"get", "post"}:
            assert {name for one in item[method]["security"] for name in one} in (set(), schemes)


async def test_each_endpoint_accepts_exactly_the_key_scopes_of_the_openapi_document(
    engine: AsyncEngine, start_proxy: StartProxy
) -> None:
    keys = {scope: await made(engine, scope, scope) for scope in SCOPES}
    wrong: list[tuple[Endpoint, str, int]] = []
    async with start_proxy(allow_model_delete=True) as proxy:
        await taken(proxy, keys["infer"])
        shown = {scope: bearer(key) for scope, key in keys.items()} | {"": {}}
        for endpoint in ENDPOINTS:
            for scope, (status, fault) in (await answers(proxy, endpoint, shown)).items():
                refused = (401 if scope == "" else 403, "client") == (status, fault)
                if refused == (endpoint.scope in (None, scope)) or (scope and status == 401):
                    wrong.append((endpoint, scope, status))
    assert wrong == []


HIDDEN = (404, "client")
FORBIDDEN = (403, "client")


def expected(endpoint: Endpoint, tenant: str, scope: str) -> tuple[int, str] | None:
    """The refusal of a request about what is tenant a's, by a key of a tenant; None: it passes."""
    if endpoint.scope is None:
        return None
    if scope != endpoint.scope or (endpoint.kept and tenant != DEFAULT):
        return FORBIDDEN
    # The account is the default tenant's, and so is what is kept there.
    names_a_version = endpoint.method == "POST" or endpoint.path.startswith("/v1/models/")
    about_a = names_a_version and scope == "infer" and not endpoint.kept
    return HIDDEN if about_a and tenant != "a" else None


async def test_each_endpoint_refuses_a_tenants_objects_to_exactly_the_forbidden_keys(
    shared: Proxy, engine: AsyncEngine
) -> None:
    cells = [
        (tenant, scope)
        for tenant in EVERYONE
        for scope in SCOPES
        if tenant == DEFAULT or scope != "admin"
    ]
    keys = {cell: await key_of(engine, *cell) for cell in cells}
    for key in keys.values():
        await taken(shared, key)
    shown = {cell: bearer(key) for cell, key in keys.items()}
    reply = await shared.chat(headers=shown["a", "infer"], model="writes")
    call = reply.headers["x-pawl-call"]
    wrong: list[tuple[Endpoint, str, str, int]] = []
    for endpoint in ENDPOINTS:
        # Deleting a model is not forwarded at all.
        if (endpoint.method, endpoint.path) == ("DELETE", "/v1/models/x1"):
            continue
        found = await answers(shared, endpoint, shown, "a-writes@1", call=call)
        for (tenant, scope), (status, fault) in found.items():
            refusal = (status, fault) if fault == "client" else None
            if refusal != expected(endpoint, tenant, scope):
                wrong.append((endpoint, tenant, scope, status))
            if endpoint.path == "/feedback" and status in (200, 202):
                assert (status == 200) == (tenant == "a")
    assert wrong == []
