"""A PostgreSQL as it is sold: over TLS, on several hosts."""

import asyncio
import os
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from pydantic import SecretStr

from store.database import is_answering, is_lasting_refusal, make_engine
from store.embedded import SOCKET, EmbeddedPostgres
from tests.integration.conftest import Pawl, StartProxy

# PostgreSQL's protocol: the length of the message, and the code of an SSLRequest.
SSL_REQUEST = bytes([0, 0, 0, 8, 4, 210, 22, 47])


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sign a certificate for `localhost` with itself; its key is beside it."""
    folder = tmp_path_factory.mktemp("tls")
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    files = ["-keyout", folder / "key.pem", "-out", folder / "certificate.pem"]
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", *subject, *files],
        check=True,
        capture_output=True,
    )
    return folder / "certificate.pem"


async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


@pytest.fixture
async def tls_port(postgres: EmbeddedPostgres, certificate: Path) -> AsyncIterator[int]:
    """Take TLS off in front of the server, whose programs are built without it; refuse others."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, certificate.with_name("key.pem"))
    socket = postgres.url.partition("?host=")[2] + f"/{SOCKET}"

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            if await reader.readexactly(len(SSL_REQUEST)) == SSL_REQUEST:
                writer.write(b"S")
                await writer.start_tls(context)
                server = await asyncio.open_unix_connection(socket)
                await asyncio.gather(relay(reader, server[1]), relay(server[0], writer))
        writer.close()

    async with await asyncio.start_server(serve, "localhost", 0) as listening:
        yield listening.sockets[0].getsockname()[1]


def tls_url(database_url: str, hosts: str, parameters: str) -> str:
    name = database_url.partition("?")[0].rpartition("/")[2]
    return f"postgresql://postgres:secret@{hosts}/{name}?{parameters}"


@pytest.mark.parametrize("mode", ["sslmode=require", "sslmode=verify-full&sslrootcert={}"])
async def test_schema_is_migrated_over_tls(
    pawl: Pawl,
    monkeypatch: pytest.MonkeyPatch,
    empty_database_url: str,
    tls_port: int,
    certificate: Path,
    mode: str,
) -> None:
    url = tls_url(empty_database_url, f"localhost:{tls_port}", mode.format(certificate))
    monkeypatch.setenv("DATABASE_URL", url)
    done = await pawl("migrate")
    assert (done.exit_code, done.output) == (0, "")


@asynccontextmanager
async def refusing(code: str, message: str) -> AsyncIterator[int]:
    """A server without TLS that answers each client with an error."""
    error = f"SFATAL\0VFATAL\0C{code}\0M{message}\0\0".encode()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            while (await reader.readexactly(len(SSL_REQUEST))) == SSL_REQUEST:
                writer.write(b"N")
            writer.write(b"E" + (len(error) + 4).to_bytes(4) + error)
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "localhost", 0) as listening:
        yield listening.sockets[0].getsockname()[1]


@pytest.mark.parametrize(
    ("hosts", "parameters", "code", "said"),
    [
        ("nobody.invalid", "", "", "correct the host in DATABASE_URL"),
        ("localhost:{tls}", "sslmode=disable", "", "needs sslmode=require in DATABASE_URL"),
        ("localhost:{plain}", "sslmode=require", "", "needs sslmode=disable in DATABASE_URL"),
        ("127.0.0.1:{tls}", "sslmode=verify-full&sslrootcert={}", "", "the host that the cert"),
        ("localhost:{plain}", "", "28000", "needs sslmode=require in DATABASE_URL; else let"),
        ("localhost:{plain}", "", "28P01", "correct user and password in DATABASE_URL"),
    ],
)
async def test_failed_migrate_prints_cause_and_remedy_in_a_single_line(
    tls_port: int, certificate: Path, hosts: str, parameters: str, code: str, said: str
) -> None:
    async with refusing(code, "no entry") as plain:
        named = hosts.format(tls=tls_port, plain=plain)
        url = f"postgresql://u:secret@{named}/d?{parameters.format(certificate)}".rstrip("?")
        done = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "pawl.cli", "migrate"),
            env={**os.environ, "DATABASE_URL": url},
            stderr=asyncio.subprocess.PIPE,
        )
        _, error = await done.communicate()
    [line] = error.decode().splitlines()
    assert done.returncode == 2
    assert line.startswith("pawl: the database cannot be used: ")
    assert said in line
    assert "secret" not in line


async def test_proxy_stores_calls_over_tls(
    start_proxy: StartProxy, database_url: str, tls_port: int
) -> None:
    url = tls_url(database_url, f"localhost:{tls_port}", "sslmode=require")
    async with start_proxy(database_url=SecretStr(url)) as proxy:
        assert (await proxy.chat()).status == 200
        await proxy.only_call()


async def test_wrong_certificate_of_the_database_counts_as_a_refusal(
    database_url: str, tls_port: int, certificate: Path
) -> None:
    # The certificate is for `localhost` only.
    hosts, root = f"127.0.0.1:{tls_port}", f"sslrootcert={certificate}"
    engine = make_engine(tls_url(database_url, hosts, f"sslmode=verify-ca&{root}"))
    assert await is_answering(engine)
    await engine.dispose()
    engine = make_engine(tls_url(database_url, hosts, f"sslmode=verify-full&{root}"))
    with pytest.raises(ssl.SSLCertVerificationError) as raised:
        await engine.connect()
    assert is_lasting_refusal(raised.value)


async def test_next_database_host_is_tried_if_a_host_is_silent(
    database_url: str, tls_port: int
) -> None:
    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(say_nothing, "localhost", 0) as silent:
        port = silent.sockets[0].getsockname()[1]
        hosts = f"localhost:{port},localhost:9,localhost:{tls_port}"
        options = "sslmode=require&target_session_attrs=read-write&connect_timeout=1"
        engine = make_engine(tls_url(database_url, hosts, options))
        assert await is_answering(engine)
        await engine.dispose()


async def test_database_without_a_primary_is_waited_for(database_url: str) -> None:
    url = f"{database_url}&target_session_attrs=read-write"
    engine = make_engine(f"{url}&options=-c%20default_transaction_read_only%3Don")
    assert not await is_answering(engine)
    await engine.dispose()
