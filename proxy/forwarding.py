"""Forward requests that are not recorded: untouched, streamed both ways, of any size.

With several upstreams, the body is read first to find the model's upstream, and the upstreams'
lists of models are joined. With several tenants, the body is read to check that it names no other
tenant's version and no object that the provider keeps for all tenants, and a list of models shows
the tenant's versions alone. Names that policies of the policies file answer to are added to the
list, and clients of Anthropic's API get it in that API's form.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, Literal

import msgspec
import structlog

from proxy.error_replies import UPSTREAM_AT_FAULT, send_error
from proxy.errors import Forbidden, NotAllowed, ProxyError, ReplyTorn, UpstreamBroke
from proxy.formats.base import ModelRequest, read_request
from proxy.formats.raw_json import ODD_SHAPE
from proxy.http.client import Torn
from proxy.http.exchange import Exchange
from proxy.http.wire import JSON, Headers, first_value, headers_for_client, headers_for_upstream
from proxy.intake import Intake
from proxy.metrics import FORWARDED, WARNINGS, status_label
from proxy.policies.owners import Owners
from proxy.policies.versions import Versions
from proxy.routing import Route
from proxy.tenants import check_forwarded, check_headers, check_query
from proxy.upstreams.server import (
    ANTHROPIC_VERSION,
    LIST_BYTES,
    Reply,
    Upstream,
    check_redirect,
    is_event_stream,
)
from proxy.upstreams.upstreams import Upstreams
from store.tenants import DEFAULT

log = structlog.get_logger()

MODELS_PATH: Final = "/v1/models"
# Names the tenant of the client's key.
TENANT_HEADER: Final = b"x-pawl-tenant"
POLICY_HEADER: Final = b"x-pawl-policy"
WARNING_HEADER: Final = b"x-pawl-warning"
FIRST_ERROR_STATUS: Final = 400
# A HEAD request is answered like GET; the exchange leaves the body out.
READING_METHODS: Final = ("GET", "HEAD")


async def forward(
    exchange: Exchange,
    route: Route,
    upstreams: Upstreams,
    intake: Intake,
    versions: Versions,
    *,
    may_delete_models: bool,
) -> None:
    """Pass an unrecorded request on to its upstream, and the reply back to the client.

    A `ProxyError` is sent to the client here and not raised.
    """
    owners = versions.owners
    added: Headers = []
    edit: Edit | None = None
    try:
        _check_allowed(exchange, route, upstreams, may_delete_models)
        if exchange.method in READING_METHODS and route.path == MODELS_PATH:
            added = _serving_header(versions, exchange.tenant)
            edit = _list_edit(exchange, versions)
        names_model = not (route.reaches_stored or route.manages_account)
        must_check = names_model and exchange.tenant != owners.sole
        if upstreams.only is not None and not must_check:
            reply = await _send_streamed(
                exchange, route, upstreams.only, is_edited=edit is not None
            )
        elif exchange.method in READING_METHODS and route.path == MODELS_PATH:
            await _answer_model_list(exchange, upstreams, owners, added, edit)
            FORWARDED.labels(MODELS_PATH, "200").inc()
            return
        else:
            hiding_owners = owners if must_check else None
            reply, warning = await _send_by_model(exchange, route, upstreams, intake, hiding_owners)
            if warning is not None:
                WARNINGS.inc()
                added.append((WARNING_HEADER, warning.encode()))
    except ProxyError as error:
        if isinstance(error, UpstreamBroke):
            # If the client did not send the rest of its body, the upstream is not to blame.
            exchange.body.raise_failure()
        FORWARDED.labels(route.label, status_label(error.status)).inc()
        send_error(exchange, error)
        return
    FORWARDED.labels(route.label, status_label(reply.status)).inc()
    try:
        check_redirect(reply, exchange.api_key)
        await _pass_back(exchange, reply, added, edit)
    except ProxyError as error:
        send_error(exchange, error)
    finally:
        reply.close()


def _check_allowed(
    exchange: Exchange, route: Route, upstreams: Upstreams, may_delete_models: bool
) -> None:
    """Check that a request does not reach objects of other clients or tenants.

    Raises:
        Forbidden: it would delete a model, or reaches objects that are kept for all tenants.
        NotAllowed: it manages the account at the provider, and would be sent with our key.
    """
    if not may_delete_models and exchange.method == "DELETE" and _is_single_model(route):
        raise Forbidden(
            f"DELETE {route.path} would remove a model for everybody who uses it, so this "
            "proxy does not forward it. Set PAWL_ALLOW_MODEL_DELETE=true to allow it",
            code="model_delete_not_allowed",
        )
    if route.manages_account and upstreams.sends_own_key:
        raise NotAllowed(
            f"{exchange.method} {route.path} manages the account at the provider, and this "
            "proxy would send it with its own API key. Send it to the provider directly",
            code="unknown_url",
        )
    if route.reaches_stored and exchange.tenant != DEFAULT:
        raise Forbidden(
            f"{route.label} is kept by the provider under one account for all tenants, so keys of "
            f"tenant {exchange.tenant} do not reach it: send the content in the request itself, or "
            "ask the operator of this proxy",
            code="kept_for_all_tenants",
        )


async def _send_streamed(
    exchange: Exchange, route: Route, upstream: Upstream, *, is_edited: bool
) -> Reply:
    """Send a request as it comes; request a reply that is to be edited without content coding."""
    if is_edited:
        headers = headers_for_upstream(exchange.headers, exchange.tenant, plain=True)
        return await upstream.fetch(_target(exchange, route), headers)
    length, chunked = exchange.length, exchange.chunked
    body = exchange.body if chunked or length is not None else None
    if body is not None:
        exchange.send_continue()
    headers = headers_for_upstream(exchange.headers, exchange.tenant, plain=False)
    return await upstream.ask(
        exchange.method, _target(exchange, route), headers, body, None if chunked else length
    )


async def _send_by_model(
    exchange: Exchange,
    route: Route,
    upstreams: Upstreams,
    intake: Intake,
    owners: Owners | None,
) -> tuple[Reply, str | None]:
    """Send a request to the upstream of the model that it names; return the reply and a warning.

    With `owners`, the request must not name other tenants' versions, and the warning, if not None,
    names the fields that were left out.
    """
    headers = headers_for_upstream(exchange.headers, exchange.tenant, plain=False)
    target = _target(exchange, route)
    if owners is not None:
        check_headers(owners, exchange.tenant, exchange.headers)
        check_query(owners, exchange.tenant, target)
    named = route.path.removeprefix(MODELS_PATH + "/") if _is_single_model(route) else None
    if exchange.method in READING_METHODS:
        if owners is not None:
            owners.check(exchange.tenant, named)
        return await upstreams.for_model(named or route.path).fetch(target, headers), None
    warning = None
    with intake.budget.claim() as claim:
        # The body names the model, and so the upstream.
        body, long = await intake.read(exchange, claim)
        if named is None:
            check = partial(_check_body, body, owners, exchange, route.path)
            request, warning = await intake.run_in_thread(check) if long else check()
            named, body = request.model, request.body
        reply = await upstreams.for_model(named).ask(exchange.method, target, headers, body)
        return reply, warning


def _check_body(
    body: bytes, owners: Owners | None, exchange: Exchange, path: str
) -> tuple[ModelRequest, str | None]:
    """Parse a body; with `owners`, check it and return the result of `check_forwarded`.

    Raises:
        NotServed, BadRequest: as `check_forwarded` does.
    """
    request = read_request(body)
    if owners is None:
        return request, None
    return check_forwarded(owners, exchange.tenant, path, exchange.headers, request)


def _serving_header(versions: Versions, tenant: str) -> Headers:
    """Return a header that lists the serving versions of a tenant's policies, or no header."""
    served = [
        f"{policy}@{number}"
        for policy, number in sorted(versions.serving.items())
        if versions.owners.owns(tenant, policy)
    ]
    return [(POLICY_HEADER, ", ".join(served).encode())] if served else []


# Changes a reply's body.
Edit = Callable[[bytes], bytes]
UNKNOWN_TIME: Final = "1970-01-01T00:00:00Z"


class _ModelList(msgspec.Struct):
    object: Literal["list"]
    data: list[dict[str, Any]]


def _list_edit(exchange: Exchange, versions: Versions) -> Edit | None:
    """Return the function that edits a client's list of models, or None to leave it as it is."""
    bases = versions.base_models(exchange.tenant)
    is_anthropics = first_value(exchange.headers, ANTHROPIC_VERSION[0]) is not None
    return partial(_edit_model_list, bases, is_anthropics) if bases or is_anthropics else None


def _edit_model_list(bases: Mapping[str, str], is_anthropics: bool, body: bytes) -> bytes:
    """Add the names in `bases` to OpenAI's list of models; return it in Anthropic's form if wanted.

    `bases` maps a name to the model whose entry it gets. Anthropic's fields are added to OpenAI's.
    A body that is not such a list is returned as it came.
    """
    try:
        listed = msgspec.json.decode(body, type=_ModelList)
        models = {model["id"]: model for model in listed.data}
    except ODD_SHAPE:
        return body
    for name, base in bases.items():
        if base in models:
            models.setdefault(name, models[base] | {"id": name})
    if not is_anthropics:
        return msgspec.json.encode({"object": "list", "data": list(models.values())})
    own = {"type": "model", "created_at": UNKNOWN_TIME}
    data = [own | {"display_name": name} | model for name, model in models.items()]
    ends = {"first_id": next(iter(models), None), "last_id": next(reversed(models), None)}
    return msgspec.json.encode({"data": data, "has_more": False} | ends)


async def _answer_model_list(
    exchange: Exchange, upstreams: Upstreams, owners: Owners, added: Headers, edit: Edit | None
) -> None:
    headers = headers_for_upstream(exchange.headers, exchange.tenant, plain=True)
    body, missing = await upstreams.models(headers, partial(owners.hides, exchange.tenant))
    reply_headers: Headers = [JSON, *added]
    if exchange.tenant != DEFAULT:
        reply_headers.append((TENANT_HEADER, exchange.tenant.encode()))
    if missing:
        text = f"no list of models from upstream {', '.join(missing)}"
        reply_headers.append((WARNING_HEADER, text.encode()))
    exchange.reply(200, b"", reply_headers, body if edit is None else edit(body))


def _is_single_model(route: Route) -> bool:
    return route.path.startswith(MODELS_PATH + "/")


def _target(exchange: Exchange, route: Route) -> str:
    query = exchange.target.partition("?")[2]
    return f"{route.path}?{query}" if query else route.path


async def _pass_back(
    exchange: Exchange, reply: Reply, added: Headers, edit: Edit | None = None
) -> None:
    """Send a reply to the client as it comes, with `added` headers; with `edit`, read it whole.

    Unless the reply is a stream, its head is held back until the body's first piece has come: a
    client cannot use the head alone, and a reply that breaks off earlier can be replaced by an
    error.

    Raises:
        ReplyTorn: it broke off before any of it was sent to the client.
    """
    try:
        if edit is not None and reply.status < FIRST_ERROR_STATUS:
            body = await reply.read(LIST_BYTES)
            if body is not None:
                headers = [*headers_for_client(reply.headers), *added]
                exchange.reply(reply.status, reply.reason, headers, edit(body))
                return
        if is_event_stream(reply):
            _begin_reply(exchange, reply, added)
        async for piece in reply.pieces():
            if not exchange.started:
                _begin_reply(exchange, reply, added)
            exchange.write(piece)
            await exchange.wait_until_drained()
    except Torn as error:
        if not exchange.started:
            raise ReplyTorn(
                f"The model server's reply broke off after its head: {error}. "
                "It is unknown whether the model server processed the request",
                code="upstream_broke",
            ) from error
        log.warning("forwarded_reply_torn", reason=str(error))
        exchange.tear()
        return
    if not exchange.started:
        _begin_reply(exchange, reply, added)
    exchange.end()


def _begin_reply(exchange: Exchange, reply: Reply, added: Headers) -> None:
    length = reply.header(b"content-length")
    headers = [*headers_for_client(reply.headers), *added]
    if reply.status >= FIRST_ERROR_STATUS:
        headers.append(UPSTREAM_AT_FAULT)
    if length is None:
        exchange.begin(reply.status, reply.reason, headers)
    else:
        exchange.begin_sized(reply.status, reply.reason, headers, length)
