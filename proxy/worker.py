"""Serve the data port: calls and feedback. It needs only the disk and the upstream."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

import structlog

from proxy.calls.call import CallParts, answer_call
from proxy.error_replies import send_error, send_internal_error, unreadable_request_body
from proxy.errors import NoWebsocket, ProxyError, TooSlow
from proxy.feedback import FeedbackEndpoint, IdempotencyStore, KeyFiles, RecentTargets
from proxy.forwarding import forward
from proxy.http.exchange import BodyTooSlow, ClientGone, Exchange
from proxy.http.server import ClientDeadlines, Handler, Server
from proxy.http.wire import JSON, Headers, first_value
from proxy.identity.call_memory import CallMemory
from proxy.intake import Intake
from proxy.keys import KeyChecker, KeyFile
from proxy.lookup import Lookup
from proxy.metrics import (
    IN_FLIGHT,
    IN_FLIGHT_BYTES,
    REFUSED,
    SPOOL_COMMIT,
)
from proxy.policies.shared_pins import SharedPins
from proxy.policies.version_file import VersionFile
from proxy.policies.versions import MAX_PINS, Versions
from proxy.redaction import open_redactor
from proxy.routing import FEEDBACK, find_route, is_served
from proxy.settings import ProxySettings
from proxy.spool.recorder import Recorder
from proxy.upstreams.upstreams import open_upstreams
from store.grants import KeyRing
from store.policy_table import open_policies
from store.questions import pinned_episodes
from store.versions import PolicyVersion

log = structlog.get_logger()

HEALTH: Final = "/healthz"
QUEUE_S: Final = 0.05
PINS_LOOKUP_S: Final = 5.0
COUNT_EVERY_S: Final = 0.5
BACKLOG: Final = 4096


def data_handler(
    parts: CallParts,
    feedback: FeedbackEndpoint,
    key_checker: KeyChecker,
    *,
    may_delete_models: bool,
    stopping: Callable[[], bool] = lambda: False,
) -> Handler:
    """Return the data port's handler.

    Every request passes the allow-list (`proxy.routing`), which is the only router, and the
    `key_checker`, which checks and removes its key. Only `/healthz` passes neither: load balancers
    have no key and may not reach the admin port.
    """

    async def handle(exchange: Exchange) -> None:
        if exchange.target == HEALTH and exchange.method == "GET":
            if stopping():
                exchange.reply(503, b"", [JSON], b'{"status": "stopping"}')
            elif not key_checker.knows_keys:
                exchange.reply(503, b"", [JSON], b'{"status": "keys unknown"}')
            else:
                exchange.reply(200, b"", [JSON], b'{"status": "ok"}')
            return
        usage = None
        try:
            path = exchange.target.partition("?")[0]
            if exchange.method == "GET":
                _refuse_websocket(exchange.headers, path)
            route = find_route(exchange.method, path)
            usage = key_checker.admit(exchange, route.scope)
            if route.wire_format is not None:
                await answer_call(parts, exchange, route, usage)
            elif route.path == FEEDBACK:
                await feedback.handle(exchange, usage)
            else:
                await forward(
                    exchange,
                    route,
                    parts.upstreams,
                    parts.intake,
                    parts.versions,
                    may_delete_models=may_delete_models,
                )
        except ClientGone:
            # If the request had become a `Call`, its record has been made.
            log.debug("client_gone", method=exchange.method)
        except Exception as error:
            _answer_failure(exchange, error)
        finally:
            if usage is not None:
                usage.end()

    return handle


def _refuse_websocket(headers: Headers, path: str) -> None:
    """Refuse a websocket handshake on a served path; clients then use plain requests.

    `Sec-WebSocket-Key` alone is a handshake, too: a reverse proxy in between may remove `Upgrade`.

    Raises:
        NoWebsocket: the request opens a websocket, and the path is served.
    """
    offer, key = (first_value(headers, name) for name in (b"upgrade", b"sec-websocket-key"))
    if ((offer or b"").lower() == b"websocket" or key is not None) and is_served(path):
        raise NoWebsocket(
            f"Pawl serves {path} over HTTP, streamed too, and opens no websocket: send a request",
            code="no_websocket",
        )


def _answer_failure(exchange: Exchange, error: Exception) -> None:
    """Answer with a `ProxyError` or for a slow body; log any other error, and answer 500."""
    if isinstance(error, BodyTooSlow):
        error = TooSlow(f"{error}; PAWL_BODY_S sets how long each step may take")
    if isinstance(error, ProxyError):
        send_error(exchange, error)
    else:
        log.error("request_failed", method=exchange.method, call=exchange.call, exc_info=error)
        send_internal_error(exchange)


def _report_slow_client(step: str, allowed_s: float, exchange: Exchange | None) -> None:
    """Count and log a client whose connection was closed because it was too slow."""
    REFUSED.labels(f"slow_{step}").inc()
    log.warning(
        "client_too_slow",
        what=step,
        allowed_s=allowed_s,
        method=None if exchange is None else exchange.method,
        call=None if exchange is None else exchange.call,
    )


@asynccontextmanager
async def run_worker(
    settings: ProxySettings,
    listener: socket.socket,
    pins: SharedPins | None = None,
    stopping: Callable[[], bool] = lambda: False,
) -> AsyncIterator[Server]:
    """Run a worker that takes connections from `listener`; it is up when the context is entered.

    `pins` holds the version of each episode for all workers of a proxy; None for a sole worker.
    `stopping` returns whether `/healthz` is to send clients elsewhere. When the context is left, no
    new connection is accepted, and calls that still run have `calls_end_s` to finish, unless
    `finish_within` was called on the server before.
    """

    def take(known: list[PolicyVersion]) -> None:
        versions.replace(known)
        parts.upstreams.learn(known)

    def take_keys(ring: KeyRing | None) -> None:
        key_checker.replace_keys(ring)
        if ring is not None and ring.made:
            versions.owners.learn_tenants(ring.tenants)

    policies, key_file = VersionFile(settings.spool_dir), KeyFile(settings.spool_dir)
    versions = Versions(
        table=open_policies(settings.policies),
        shared=pins,
        catch_up=lambda: policies.take_if_changed(take),
    )
    parts = CallParts(
        upstreams=open_upstreams(settings),
        versions=versions,
        recorder=Recorder(
            settings.spool_dir,
            redactor=open_redactor(settings),
        ),
        lookup=Lookup(settings),
        intake=Intake(
            budget=settings.in_flight_mb * 2**20,
            max_body=settings.max_body_mb * 2**20,
            max_feedback=settings.max_feedback_kb * 2**10,
        ),
        memory=CallMemory(),
        targets=RecentTargets(),
        max_reply=settings.max_reply_mb * 2**20,
        eval_tasks=settings.eval_tasks,
    )
    keys = IdempotencyStore(KeyFiles(settings.spool_dir), parts.lookup)
    feedback = FeedbackEndpoint(parts.recorder, parts.targets, parts.lookup, parts.intake, keys)
    key_checker = KeyChecker(settings.access, settings.workers, settings.allowed_hosts)
    server = Server(
        data_handler(
            parts,
            feedback,
            key_checker,
            may_delete_models=settings.allow_model_delete,
            stopping=stopping,
        ),
        patience=ClientDeadlines(settings.head_s, settings.body_s, settings.write_s),
        explain=unreadable_request_body,
        on_late=_report_slow_client,
    )
    take_keys(key_file.read())
    policies.take_if_changed(take)
    work = {
        "policies": policies.watch(take),
        "keys": key_file.watch(take_keys),
        "pins": _load_pins(parts.lookup, versions),
        "sweep": parts.upstreams.sweep(),
        "in-flight": _count_in_flight(server, parts),
    }
    beside = [asyncio.create_task(task, name=f"pawl-{name}") for name, task in work.items()]
    await server.listen(listener, BACKLOG)
    log.info("worker_up", listen=settings.listen)
    try:
        yield server
    finally:
        await _let_finish(server, settings.calls_end_s)
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        await parts.upstreams.close()
        await parts.recorder.close()
        parts.lookup.close()
        parts.intake.close()
        log.info("worker_down")


async def _let_finish(server: Server, within_s: float) -> None:
    """Accept no more connections, and give running calls `within_s` seconds to finish."""
    # Accept connections that are queued already: closing the socket would reset them.
    await asyncio.sleep(QUEUE_S)
    server.stop_accepting()
    if not server.is_ending:
        server.finish_within(within_s)
    await server.wait_until_finished()
    await server.close()


async def _load_pins(lookup: Lookup, versions: Versions) -> None:
    """Pin the last day's episodes to their versions again, after a restart of the proxy."""
    while True:
        pins = await lookup.ask(lambda c: pinned_episodes(c, MAX_PINS), within_s=PINS_LOOKUP_S)
        if pins is not None:
            for policy, episode, version in pins:
                versions.pin(policy, episode, version)
            return
        await asyncio.sleep(1.0)


async def _count_in_flight(server: Server, parts: CallParts) -> None:
    while True:
        SPOOL_COMMIT.set(parts.recorder.commit_under_way_s())
        IN_FLIGHT.set(sum(connection.busy for connection in server.connections))
        IN_FLIGHT_BYTES.set(parts.intake.budget.used)
        await asyncio.sleep(COUNT_EVERY_S)
