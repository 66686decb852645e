"""Measure what checking an API key costs a request, and whether the time tells keys apart.

`python -m benchmarks.key_checks`: microseconds of processor time a check, in turns, the median of
many rounds and their quartiles. Each round has another key of its kind, since two keys of one kind
differ as well, by where a table has them. Bars: a check takes at most 6 µs, 3 % of a call's
processor time; the medians of wrong and revoked keys differ by no more than rounds of one kind do,
and so do those of right, wrong and revoked keys until it is known which of them a key is.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from statistics import median, quantiles
from time import process_time_ns
from typing import Final

from benchmarks.http_requests import Nowhere
from proxy.door.routes import find_route
from proxy.errors import NoKey
from proxy.http.connection import Connection
from proxy.http.exchange import Exchange
from proxy.http.server import Server
from proxy.http.wire import Headers
from proxy.keys.gate import NO_KEYS, Gate
from store.keys import Grant, KeyRing, hash_of, new_secret

ROUNDS: Final = 400
CHECKS: Final = 500
KEYS: Final = 1000
# Of each kind so many are shown, in turn.
SHOWN: Final = 50
MOST_US: Final = 6.0
# What openai-python sends.
HEADERS: Final[Headers] = [
    (b"Host", b"127.0.0.1:8100"),
    (b"Accept-Encoding", b"gzip, deflate"),
    (b"Connection", b"keep-alive"),
    (b"Accept", b"application/json"),
    (b"Content-Type", b"application/json"),
    (b"User-Agent", b"OpenAI/Python 2.8.1"),
    *((b"X-Stainless-Header-%d" % number, b"a value") for number in range(8)),
    (b"Content-Length", b"512"),
]


async def _nothing(_: Exchange) -> None:
    """Answer nothing: no request is sent."""


def _request(key: str | None) -> Callable[[], Exchange]:
    connection = Connection(Server(_nothing))
    connection.connection_made(Nowhere({"peername": ("127.0.0.1", 40000)}))
    shown = [] if key is None else [(b"Authorization", b"Bearer " + key.encode())]
    headers = [*HEADERS, *shown]

    def make() -> Exchange:
        return Exchange(
            connection,
            "POST",
            "/v1/chat/completions",
            headers,
            keep_alive=True,
            chunks=True,
            expects=False,
        )

    return make


def _round(gate: Gate | None, make: Callable[[], Exchange]) -> float:
    """Return the microseconds of one check, without those of making the request."""
    exchanges = [make() for _ in range(CHECKS)]
    began = process_time_ns()
    for exchange in exchanges:
        route = find_route(exchange.method, exchange.target)
        if gate is not None:
            try:
                gate.admit(exchange, route.scope)
            except NoKey:
                continue
    return (process_time_ns() - began) / CHECKS / 1000


def _comparison(gate: Gate, key: bytes) -> float:
    """Return the microseconds in which it is found out whose a key is."""
    began = process_time_ns()
    for _ in range(CHECKS):
        gate.grant_of(key)
    return (process_time_ns() - began) / CHECKS / 1000


def _compared_alike(gate: Gate, keys: Mapping[str, Sequence[str]]) -> bool:
    """Say how long keys of each kind take to be compared, and return whether that is alike."""
    found: dict[str, list[float]] = {kind: [] for kind in keys}
    for number in range(ROUNDS):
        for kind, shown in keys.items():
            found[kind].append(_comparison(gate, shown[number % SHOWN].encode()))
    spreads = []
    for kind, times in found.items():
        low, middle, high = quantiles(times, n=4)
        spreads.append(high - low)
        print(f"{kind:14} {middle:6.3f} µs to be compared ({low:.3f} to {high:.3f})")
    medians = [median(times) for times in found.values()]
    alike = max(medians) - min(medians) <= max(spreads)
    print(f"right, wrong and revoked keys are compared alike: {'met' if alike else 'NOT MET'}")
    return alike


async def measure() -> bool:
    """Measure, say it, and return whether the bars are met."""
    secrets = [new_secret() for _ in range(KEYS)]
    grants = [Grant(id=one, hash=hash_of(key.encode()), scopes=("infer",)) for one, key in secrets]
    keyed, unkeyed = Gate("loopback"), Gate("loopback")
    # The first are revoked.
    keyed.take(KeyRing(made=True, grants=tuple(grants[SHOWN:])))
    unkeyed.take(NO_KEYS)
    right, revoked = ([key for _, key in some] for some in (secrets[-SHOWN:], secrets[:SHOWN]))
    shown = {
        "right": right,
        "wrong secret": [a[:22] + b[22:] for a, b in zip(right, revoked, strict=True)],
        "wrong id": [new_secret()[1] for _ in range(SHOWN)],
        "revoked": revoked,
    }
    kinds: dict[str, tuple[Gate | None, list[Callable[[], Exchange]]]] = {
        "no check": (None, [_request(key) for key in right]),
        "no key made": (unkeyed, [_request(None)] * SHOWN),
    }
    kinds |= {kind: (keyed, [_request(key) for key in keys]) for kind, keys in shown.items()}
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(ROUNDS):
        for kind, (gate, makers) in kinds.items():
            found[kind].append(_round(gate, makers[number % SHOWN]))
    base = median(found.pop("no check"))
    for kind, times in found.items():
        low, middle, high = (one - base for one in quantiles(times, n=4))
        print(f"{kind:14} {middle:6.2f} µs   (half of the rounds: {low:.2f} to {high:.2f})")
    refused = [median(found[kind]) for kind in ("wrong secret", "wrong id", "revoked")]
    low, _, high = quantiles(found["wrong id"], n=4)
    alike = max(refused) - min(refused) <= high - low
    cheap = all(median(found[kind]) - base <= MOST_US for kind in ("no key made", "right"))
    print(f"a check takes at most {MOST_US} µs: {'met' if cheap else 'NOT MET'}")
    print(f"wrong and revoked keys take the same time: {'met' if alike else 'NOT MET'}")
    return _compared_alike(keyed, shown) and cheap and alike


if __name__ == "__main__":
    raise SystemExit(not asyncio.run(measure()))
