"""A real `pawl proxy` that asks for keys, and has one of its own for a strict model server."""

import asyncio
import http.client
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import psutil
import pytest

from benchmarks.stack import free_port
from store.database import make_engine
from store.grants import SCOPES, Scope
from store.keys import create_key, new_secret, revoke_key
from store.tenants import DEFAULT
from store.version_states import ensure_base
from tests.fuzz.ports.document import is_allowed
from tests.fuzz.ports.upstream import StrictUpstream, strict_upstream
from tests.support.waiting import until_true

UPSTREAM_KEY: Final = "sk-canary-of-the-upstream"
UPSTREAMS: Final = """
[[upstream]]
name = "local"
urls = ["http://127.0.0.1:{port}/v1"]
default = true
api_key_env = "UPSTREAM_KEY"
"""
POLICIES: Final = """
[[policy]]
name = "a-writes"
tenant = "a"
base = "m"
models = ["writes"]

[[policy]]
name = "m"
base = "m"
"""
# A client that sends too little is answered 408 soon.
IMPATIENT: Final = {"PAWL_HEAD_S": "1", "PAWL_BODY_S": "1", "PAWL_MAX_BODY_MB": "1"}
# Each by what it is for; `a` is of another tenant than the others.
KEYS: Final[Mapping[str, tuple[str, tuple[Scope, ...]]]] = {
    **{scope: (DEFAULT, (scope,)) for scope in SCOPES},
    "all": (DEFAULT, SCOPES),
    "a": ("a", ("infer", "feedback", "read")),
    "revoked": (DEFAULT, SCOPES),
}
INFER: Final = frozenset({"infer", "all", "a"})
READ: Final = frozenset({"read", "all", "a"})
# Counters that only a failure of the proxy's own counts.
FAILURES: Final = (
    'pawl_refused_total{reason="Unexpected"}',
    "pawl_records_dead_lettered_total",
    "pawl_records_dropped_total",
)
BAD_WORDS: Final = re.compile(r'Traceback|"level":"(?:error|critical)"')
STOP_S: Final = 60.0


class Ports:
    """Both ports of a running proxy, and what stands behind them."""

    def __init__(self, upstream: StrictUpstream, keys: Mapping[str, str], log: Path) -> None:
        self.upstream = upstream
        self.keys = keys
        self.log = log
        self.data, self.admin = free_port(), free_port()

    def get(self, port: int, path: str, key: str) -> tuple[int, bytes]:
        """GET with a key: status and body."""
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        try:
            connection.request("GET", path, headers={"Authorization": f"Bearer {self.keys[key]}"})
            reply = connection.getresponse()
            return reply.status, reply.read()
        finally:
            connection.close()

    def knows_its_keys(self) -> bool:
        """Whether both ports let in who may, and nobody else."""
        asked = ((self.data, "/v1/models", "infer"), (self.admin, "/metrics", "read"))
        try:
            good = all(self.get(*one)[0] == 200 for one in asked)
            return good and all(self.get(*one[:2], "revoked")[0] == 401 for one in asked)
        except OSError:
            return False

    def check(self) -> None:
        """See that nothing came to the model server that may not; each is reported once."""
        wrong, self.upstream.wrong = self.upstream.wrong, []
        assert not wrong, wrong

    def check_end(self) -> None:
        """See that no process of the proxy has failed, and that its log tells no secret."""
        self.check()
        status, ready = self.get(self.admin, "/readyz", "read")
        assert status == 200, ready
        assert b'"restarts": 0' in ready
        assert not re.search(rb'"restarts": [1-9]', ready), ready
        _, metrics = self.get(self.admin, "/metrics", "read")
        counted = dict(re.findall(r"^(\S+) (\S+)$", metrics.decode(), re.M))
        assert {name: float(counted.get(name, 0)) for name in FAILURES} == dict.fromkeys(
            FAILURES, 0.0
        )
        log = self.log.read_text(errors="replace")
        bad = [line for line in log.splitlines() if BAD_WORDS.search(line)]
        assert not bad, "\n".join(bad)
        assert not any(secret in log for secret in (UPSTREAM_KEY, *self.keys.values()))


async def _made(database_url: str) -> dict[str, str]:
    """Policies, and keys by their name here."""
    engine = make_engine(database_url)
    async with engine.begin() as connection:
        await ensure_base(connection, "m")
        await ensure_base(connection, "a-writes", "m", "a")
        keys = {
            name: (await create_key(connection, name, scopes, tenant=tenant)).key
            for name, (tenant, scopes) in KEYS.items()
        }
        await revoke_key(connection, "revoked")
    await engine.dispose()
    return keys | {"wrong": new_secret()[1]}


@contextmanager
def ports_of(database_url: str, folder: Path) -> Iterator[Ports]:
    """Run a proxy until the block ends; then see that it was well all the time."""
    keys = asyncio.run(_made(database_url))
    with strict_upstream(is_allowed, UPSTREAM_KEY) as upstream:
        upstream.secrets = [key.encode() for key in keys.values()]
        ports = Ports(upstream, keys, folder / "pawl.log")
        (folder / "upstreams.toml").write_text(UPSTREAMS.format(port=upstream.port))
        (folder / "policies.toml").write_text(POLICIES)
        settings = {
            **IMPATIENT,
            "DATABASE_URL": database_url,
            "UPSTREAM_KEY": UPSTREAM_KEY,
            "PAWL_UPSTREAMS": str(folder / "upstreams.toml"),
            "PAWL_POLICIES": str(folder / "policies.toml"),
            "PAWL_LISTEN": f"127.0.0.1:{ports.data}",
            "PAWL_ADMIN_LISTEN": f"127.0.0.1:{ports.admin}",
            "PAWL_SPOOL_DIR": str(folder / "spool"),
            "PAWL_DATA_DIR": str(folder),
        }
        with ports.log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "pawl.cli", "proxy"],
                env=os.environ | settings,
                stdout=log,
                stderr=log,
            )
        try:
            until_true(ports.knows_its_keys, 120)
            yield ports
            ports.check_end()
        finally:
            _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End it and its children, in any case."""
    family = [process.pid, *(child.pid for child in psutil.Process(process.pid).children())]
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        for pid in family:
            if psutil.pid_exists(pid):
                psutil.Process(pid).kill()
        process.wait()
        raise


@pytest.fixture
def ports(database_url: str, tmp_path: Path) -> Iterator[Ports]:
    """Both ports of a proxy that all examples of a property share."""
    with ports_of(database_url, tmp_path) as running:
        yield running
