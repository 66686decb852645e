"""Serve the console's screens to the viewers who may see them.

One middleware (`Guard`) stands before all screens: it authenticates the viewer, refuses cross-site
requests, and turns every failure into a page. The process has a database pool of its own, reads in
read-only transactions, and keeps running while the database is away.
"""

import asyncio
import contextlib
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from operator import itemgetter
from typing import Final
from urllib.parse import urlsplit

import h11
import structlog
import uvicorn
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from console import episode, episodes, overview, review, tokens, updates, versions
from console.pages import (
    CONNECTION_WAIT_S,
    NOBODY,
    Console,
    Refusal,
    Viewer,
    console_of,
    form,
    page,
)
from pawl.database import keep_postgres_running
from pawl.processes import lower_priority, stop_event
from pawl.settings import ConsoleSettings
from proxy.error_replies import REFUSALS
from proxy.errors import NoKey, ProxyError
from proxy.http.server import is_loopback
from proxy.keys import KeyChecker, ShownCredentials, credentials_in
from store.admin_port import explain_listen_failure
from store.browsers import why_foreign
from store.database import explain_error, is_bad_value, is_too_slow, prevents_all_storing
from store.grants import KEY_PREFIX, SCOPES, hash_of_key
from store.keys import key_ring
from store.settings import parse_address
from store.tenants import DEFAULT

log = structlog.get_logger()

SCREENS: Final = (overview, episodes, tokens, episode, versions, updates, review)
COOKIE: Final = "pawl_key"
COOKIE_S: Final = 30 * 24 * 3600
STATIC: Final = "/static"
# Paths that need no key.
OPEN_TO_ALL: Final = (f"{STATIC}/", "/healthz")
LOGIN: Final = "/login"
STOP_S: Final = 5
# A connection's next request must arrive whole in this time: silent connections, too, count
# towards `MOST_AT_ONCE`.
REQUEST_S: Final = 10
MOST_AT_ONCE: Final = 200
HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; form-action 'self'; frame-ancestors 'none'; "
    "base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    # Not `no-referrer`: with it browsers hide the origin of a form from its own server.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


async def run(settings: ConsoleSettings) -> None:
    """Serve the console until SIGTERM or SIGINT.

    Raises:
        NotListening: the console's port cannot be listened on.
    """
    stop = stop_event()
    async with contextlib.AsyncExitStack() as exits:
        if settings.database_url is not None:
            url = settings.database_url.get_secret_value()
        else:
            url = (await exits.enter_async_context(keep_postgres_running(settings.data_dir))).url
        # Agents wait for the proxy and its PostgreSQL; viewers can wait a little.
        lower_priority()
        where = await exits.enter_async_context(serving(settings, url))
        log.info("console_up", address=where)
        await stop.wait()
    log.info("console_down")


@asynccontextmanager
async def serving(settings: ConsoleSettings, database_url: str) -> AsyncIterator[str]:
    """Serve the console, and yield its address.

    Raises:
        NotListening: the console's port cannot be listened on.
    """
    host, port = parse_address(settings.console_listen)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    app = app_of(settings, database_url)
    with explain_listen_failure(settings.console_listen, "PAWL_CONSOLE_LISTEN"):
        listener = socket.create_server((host, port), family=family, backlog=128)
    with listener:
        config = uvicorn.Config(
            app,
            # h11 limits the size of a request's head.
            http=_Protocol,
            timeout_keep_alive=REQUEST_S,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            # Whether a request is local is decided by its connection, not by forwarded headers.
            proxy_headers=False,
            timeout_graceful_shutdown=STOP_S,
            limit_concurrency=MOST_AT_ONCE,
        )
        # The server also stops at SIGTERM and SIGINT by itself, and then raises them again.
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve(sockets=[listener]), name="console")
        try:
            bound = listener.getsockname()[1]
            yield f"http://{f'[{host}]' if ':' in host else host}:{bound}{settings.console_prefix}/"
        finally:
            server.should_exit = True
            await task
            await app.state.console.engine.dispose()
            await app.state.console.unqueued.dispose()


class _Protocol(H11Protocol):
    """Close a connection whose next request has not arrived whole within `REQUEST_S` seconds."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timeout for the first request; close a silent connection if many are."""
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )
        # Half of the connections are reserved for requests: close the longest silent one.
        silent = [
            (one.timeout_keep_alive_task.when(), one.transport)
            for one in self.connections
            if isinstance(one, _Protocol) and one.timeout_keep_alive_task
            if not one.transport.is_closing()
        ]
        if len(silent) > MOST_AT_ONCE / 2:
            min(silent, key=itemgetter(0))[1].close()

    def timeout_keep_alive_handler(self) -> None:
        """Close the connection, even in the middle of a request."""
        self.transport.close()

    def handle_events(self) -> None:
        """Handle received data, and stop the timeout once a request is complete."""
        super().handle_events()
        self._unset_keepalive_if_required()

    def _unset_keepalive_if_required(self) -> None:
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            super()._unset_keepalive_if_required()


def app_of(settings: ConsoleSettings, database_url: str) -> Starlette:
    """Return the application: the routes of all screens behind the guard."""
    routes: list[BaseRoute] = [route for screen in SCREENS for route in screen.ROUTES]
    routes += [
        Route("/healthz", _healthz, name="healthz"),
        Route(LOGIN, _login, name="login", methods=["POST"]),
        Route("/logout", _logout, name="logout", methods=["POST"]),
        Mount(STATIC, StaticFiles(packages=[("console", "static")]), name="static"),
    ]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(Guard, settings=settings)],
        exception_handlers={HTTPException: failure_page},
    )
    # The final slash of a prefix is not a page's: no redirects for it.
    app.router.redirect_slashes = False
    app.state.console = Console(app, settings, database_url)
    return app


async def _healthz(_: Request) -> Response:
    return PlainTextResponse("ok\n")


# Who may see it


class Guard:
    """Check who may see the console; answer refusals and failures with an HTML page."""

    def __init__(self, app: ASGIApp, settings: ConsoleSettings) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        # A proxy in front may have removed the prefix, or not.
        path, prefix = scope["path"], self._settings.console_prefix
        has_prefix = path == prefix or path.startswith(f"{prefix}/")
        inner = path.removeprefix(prefix) or "/" if has_prefix else path
        scope.update(path=prefix + inner, root_path=prefix)
        request = Request(scope, receive)
        started = False

        async def answer(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                # The address of a static file changes with its contents.
                is_kept = inner.startswith(f"{STATIC}/") and message["status"] in (200, 304)
                headers["Cache-Control"] = "max-age=31536000, immutable" if is_kept else "no-store"
            await send(message)

        try:
            if not inner.startswith(OPEN_TO_ALL):
                refuse_cross_site(request)
                if inner != LOGIN:
                    scope.setdefault("state", {})["viewer"] = await self._viewer(request)
            await self._app(scope, receive, answer)
        except ClientDisconnect:
            # The client is gone.
            return
        except Exception as error:
            if started:
                raise
            await failure_page(request, error)(scope, receive, answer)

    async def _viewer(self, request: Request) -> Viewer:
        """Return who sent the request.

        Raises:
            ProxyError: the request is not let in (see `KeyChecker.check`).
        """
        headers = request.headers.raw
        shown = credentials_in(headers)
        key = shown.credential
        # The `Authorization` of a browser may be the password for a proxy in front of the console.
        if key is None or not key.startswith(KEY_PREFIX):
            key = request.cookies.get(COOKIE, "").encode() or key
        relayed = shown.relayed or any(name.startswith(b"x-forwarded-") for name, _ in headers)
        local = is_loopback(request.scope.get("client")) and not relayed
        gate = KeyChecker(self._settings.access, hosts=self._settings.allowed_hosts)
        async with console_of(request).unqueued.connect() as connection:
            gate.replace_keys(await key_ring(connection, hash_of_key(key or b"")))
        asked = request.method, headers
        grant = gate.check(ShownCredentials(key, relayed), "read", asked, local=local)
        # The viewer's feedback is posted to the proxy with the viewer's own key.
        request.state.credential = key.decode() if grant is not None and key is not None else None
        if grant is None:
            # `PAWL_ACCESS=anyone` lets anyone look.
            scopes = SCOPES if local else ("read",)
            return Viewer(name=NOBODY, tenant=None, scopes=frozenset(scopes))
        sees_all = grant.tenant == DEFAULT and "admin" in grant.scopes
        tenant = None if sees_all else grant.tenant
        return Viewer(name=grant.name, tenant=tenant, scopes=frozenset(grant.scopes))


def refuse_cross_site(request: Request) -> None:
    """Refuse requests from pages of another site, even with a key, but let links be followed.

    Browsers send the cookie with the key on such requests, too.

    Raises:
        Refusal: another site's page wants to change something, or to load a part of a page.
    """
    if why_foreign(request.method, request.headers.raw, None) is not None:
        raise Refusal(
            403,
            "This was sent from another site",
            "Only the console's own pages may request changes and parts of pages. A proxy in front "
            "of the console has to pass on the `Host` header.",
        )


async def _login(request: Request) -> Response:
    """Store a key in a cookie, and redirect to the page that was asked for."""
    fields = await form(request)
    to = fields.get("next", "")
    # A path on this host only: browsers take `//` or `/\` for the start of another host.
    inside = to.startswith("/") and to[1:2] not in ("/", "\\") and to.isprintable()
    response = RedirectResponse(to if inside else console_of(request).url("overview"), 303)
    secure = "https" in (
        request.url.scheme,
        urlsplit(request.headers.get("origin", "")).scheme,
        request.headers.get("x-forwarded-proto"),
    )
    key = fields.get("key", "").strip()
    response.set_cookie(
        COOKIE,
        # Other characters are in no key, and could not be sent back in a cookie unchanged.
        key if key.isascii() and key.isprintable() and " " not in key else "",
        max_age=COOKIE_S,
        path=console_of(request).prefix or "/",
        secure=secure,
        httponly=True,
        # Sent when a link on another site opens a page; `refuse_cross_site` handles the rest.
        samesite="lax",
    )
    return response


async def _logout(request: Request) -> Response:
    response = RedirectResponse(console_of(request).url("overview"), 303)
    response.delete_cookie(COOKIE, path=console_of(request).prefix or "/")
    return response


# What went wrong


# The first match counts.
FAILURES: Final[Mapping[Callable[[BaseException], bool], Refusal]] = {
    is_too_slow: Refusal(
        503,
        "The database took too long",
        "The query was cancelled. Choose less with the filter, or a shorter time.",
    ),
    lambda error: isinstance(error, PoolTimeout): Refusal(
        503,
        "Too many viewers at once",
        f"This page waited {CONNECTION_WAIT_S:.0f} seconds for the pages of others: try again in a"
        " moment.",
    ),
    is_bad_value: Refusal(
        400,
        "This address cannot be used",
        "It has a number that is too large, or the character U+0000.",
    ),
    prevents_all_storing: Refusal(
        503,
        "The database is away, or cannot be used",
        "The console works again once the database does. Its log has PostgreSQL's message. A new "
        "database has no tables until the proxy starts, or `pawl migrate` makes them.",
    ),
}


def _log_refusal(request: Request, error: Exception) -> None:
    """Log who was refused access, or a change."""
    path, client = request.url.path, request.client and request.client.host
    if isinstance(error, ProxyError):
        REFUSALS.log_error(error, path, client)
    elif isinstance(error, Refusal):
        who = getattr(request.state, "viewer", None)
        REFUSALS.log_refusal(error.status_code, error.title, path, who and who.name, client)


def failure_page(request: Request, error: Exception) -> Response:
    """Return a page about a failure, and log the details that the viewer may not see."""
    _log_refusal(request, error)
    if isinstance(error, NoKey):
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        wrong = error.code != "missing_api_key"
        response = page(request, "login.html", error.status, wrong=wrong, next=path)
        response.headers["WWW-Authenticate"] = "Bearer"
        return response
    refusal = next((refusal for is_so, refusal in FAILURES.items() if is_so(error)), None)
    if isinstance(error, Refusal):
        refusal = error
    elif isinstance(error, HTTPException):
        refusal = Refusal(error.status_code, HTTPStatus(error.status_code).phrase)
    elif isinstance(error, ProxyError):
        refusal = Refusal(error.status, "You may not see this", error.message)
    elif refusal is not None:
        # Not shown: PostgreSQL's messages name hosts and users.
        log.warning("page_refused", reason=explain_error(error))
    else:
        name = secrets.token_hex(4)
        log.error("page_failed", id=name, path=request.url.path, exc_info=error)
        detail = f"The console's log has the reason, under id {name}."
        refusal = Refusal(500, "This page failed", detail)
    response = page(request, "refusal.html", refusal.status_code, refusal=refusal)
    response.headers.update(getattr(error, "headers", None) or {})
    return response
