"""Who is let in: credentials in headers, every state of the keys and of their file, every scope."""

import os
import stat
from itertools import product
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.errors import Forbidden, KeysUnknown, NoKey, OutOfScope, ProxyError
from proxy.http.server import is_loopback
from proxy.http.wire import CREDENTIALS
from proxy.keys import (
    NO_KEYS,
    NOTHING,
    Gate,
    KeyFile,
    Shown,
    shown_in,
    without_credentials,
)
from proxy.settings import Access
from store.keys import MARK, SCOPES, Grant, KeyRing, Scope, hash_of, new_secret


def made(*scopes: Scope) -> tuple[Grant, Shown]:
    """A key for these scopes, and what a request with it shows."""
    key_id, key = new_secret()
    grant = Grant(id=key_id, hash=hash_of(key.encode()), scopes=scopes)
    return grant, Shown(key.encode())


def ring(*grants: Grant) -> KeyRing:
    return KeyRing(made=True, grants=grants)


def gate_with(known: KeyRing | None, access: Access = "loopback") -> Gate:
    gate = Gate(access)
    gate.take(known)
    return gate


def refused(gate: Gate, shown: Shown, scope: Scope = "infer", *, local: bool = True) -> object:
    """The class of the refusal, or None."""
    try:
        gate.check(shown, scope, local=local)
    except ProxyError as error:
        return type(error)
    return None


ANYBODY = Shown()
RELAYED = Shown(relayed=True)


@pytest.mark.parametrize(("scope", "others"), list(product(SCOPES, (False, True))))
def test_key_opens_exactly_its_scopes(scope: Scope, others: bool) -> None:
    scopes = tuple(one for one in SCOPES if (one == scope) != others)
    grant, shown = made(*scopes)
    gate = gate_with(ring(grant))
    for asked in SCOPES:
        assert refused(gate, shown, asked) is (None if asked in scopes else OutOfScope)


def test_wrong_revoked_and_missing_keys_are_refused_from_anywhere() -> None:
    grant, shown = made("infer")
    revoked, shown_revoked = made("infer")
    gate = gate_with(ring(grant, revoked))
    assert refused(gate, shown_revoked) is None
    gate.take(ring(grant))
    assert refused(gate, shown) is None
    key = shown.credential or b""
    wrong = [b"sk-x", b"", key[:-1], key + b"x", key[:22] + b"A" * 43, b"pawl_" + b"0" * 60]
    # The ids that stand for nobody's, by which an unknown one takes as long as a known one.
    wrong += [MARK + one * 16 + key[21:] for one in (b"\0", b"\1")]
    for credential in (shown_revoked.credential, None, *wrong):
        assert refused(gate, Shown(credential)) is NoKey


def test_revoking_the_last_key_lets_nobody_in() -> None:
    for access in get_args(Access):
        assert refused(gate_with(ring(), access), ANYBODY) is NoKey


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("shown", [ANYBODY, RELAYED])
def test_loopback_alone_may_call_while_no_key_was_made(shown: Shown, local: bool) -> None:
    let_in = local and not shown.relayed
    gate = gate_with(NO_KEYS)
    assert refused(gate, shown, local=local) is (None if let_in else Forbidden)
    assert refused(gate_with(NO_KEYS, "anyone"), shown, local=local) is None
    assert refused(gate_with(NO_KEYS, "keys"), shown, local=local) is NoKey


def test_refusal_of_a_relayed_request_names_what_opens_the_port() -> None:
    with pytest.raises(Forbidden, match=r"pawl keys create NAME.*PAWL_ACCESS=anyone") as told:
        gate_with(NO_KEYS).check(RELAYED, "infer", local=True)
    assert "reverse proxy" in str(told.value)


@pytest.mark.parametrize("access", get_args(Access))
def test_unknown_keys_let_nobody_in(access: Access) -> None:
    _, shown = made("infer")
    assert refused(Gate(access), shown) is KeysUnknown
    gate = gate_with(None, access)
    assert refused(gate, shown) is KeysUnknown
    assert refused(gate, ANYBODY) is KeysUnknown


def test_known_keys_stay_valid_when_they_cannot_be_read_any_more() -> None:
    grant, shown = made("infer")
    gate = gate_with(ring(grant))
    gate.take(None)
    assert refused(gate, shown) is None
    assert refused(gate, ANYBODY) is NoKey
    # But a proxy that knew of none does not know now.
    gate = gate_with(NO_KEYS)
    gate.take(None)
    assert refused(gate, ANYBODY) is KeysUnknown


@pytest.mark.parametrize("access", get_args(Access))
def test_removed_file_of_keys_opens_no_port(access: Access) -> None:
    grant, shown = made("infer")
    gate = gate_with(ring(grant), access)
    gate.take(NO_KEYS)
    assert refused(gate, shown) is None
    assert refused(gate, ANYBODY) is NoKey


# The file


def test_file_of_keys_is_private_and_holds_hashes_alone(
    tmp_path: Path,
) -> None:
    grant, shown = made("infer", "read")
    file = KeyFile(tmp_path)
    assert file.read() == NO_KEYS
    file.write(NO_KEYS)
    assert list(tmp_path.iterdir()) == []
    file.write(ring(grant))
    assert KeyFile(tmp_path).read() == ring(grant)
    [written] = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert stat.S_IMODE(written.stat().st_mode) == 0o600
    assert stat.S_IMODE(written.parent.stat().st_mode) == 0o700
    secret = (shown.credential or b"")[22:]
    assert secret not in written.read_bytes()
    # A database that knows of no key, where there were some, says so.
    file.write(NO_KEYS)
    assert KeyFile(tmp_path).read() == NO_KEYS


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"made": 1}', b"\xff", b"[" * 100_000])
def test_unreadable_file_of_keys_is_no_empty_one(tmp_path: Path, content: bytes) -> None:
    file = KeyFile(tmp_path)
    file.write(ring(made("infer")[0]))
    [path] = [one for one in tmp_path.rglob("*") if one.is_file()]
    path.write_bytes(content)
    assert KeyFile(tmp_path).read() is None
    path.unlink()
    assert KeyFile(tmp_path).read() is None


def test_file_of_keys_that_is_written_or_lost_has_changed(tmp_path: Path) -> None:
    file = KeyFile(tmp_path)
    assert file.changed()
    assert not file.changed()
    writer = KeyFile(tmp_path)
    for step in (
        lambda: writer.write(ring()),
        lambda: writer.write(ring(made("read")[0])),
        lambda: os.unlink(tmp_path / "access" / "keys.json"),
    ):
        step()
        assert file.changed()
        assert not file.changed()


# Credentials in headers

KEY = new_secret()[1].encode()


@pytest.mark.parametrize(
    "headers",
    [
        [(b"Authorization", b"Bearer " + KEY)],
        [(b"authorization", b"bearer   " + KEY)],
        [(b"X-Api-Key", KEY)],
        [(b"api-key", KEY + b" ")],
        # A gateway's own beside ours, in any order.
        [(b"Authorization", b"Bearer other"), (b"x-api-key", KEY)],
        [(b"x-api-key", b"other"), (b"Authorization", b"Bearer " + KEY)],
    ],
)
def test_key_is_found_in_each_header_that_clients_use(headers: list[tuple[bytes, bytes]]) -> None:
    other = (b"Content-Type", b"application/json")
    shown = shown_in([other, *headers])
    assert (shown.credential, shown.relayed) == (KEY, False)
    assert without_credentials([other, *headers], shown) == [other]


def test_headers_without_credentials_show_nothing() -> None:
    assert shown_in([(b"Host", b"a"), (b"x-my-key", KEY)]) is NOTHING


@pytest.mark.parametrize("name", [b"Forwarded", b"X-Forwarded-For", b"x-real-ip", b"Via"])
def test_relayed_request_is_known_by_its_headers(name: bytes) -> None:
    assert shown_in([(name, b"for=127.0.0.1")]) == Shown(relayed=True)


@given(st.lists(st.tuples(st.sampled_from(sorted(CREDENTIALS)), st.binary(max_size=80))))
def test_every_credential_is_removed_from_the_headers(headers: list[tuple[bytes, bytes]]) -> None:
    upper = [(name.title(), value) for name, value in headers]
    both = [*headers, (b"Host", b"h"), *upper]
    assert without_credentials(both, shown_in(both)) == [(b"Host", b"h")]
    assert (shown_in(upper).credential is None) == (not headers)


@pytest.mark.parametrize(
    ("peer", "local"),
    [
        (("127.0.0.1", 4000), True),
        (("127.9.9.9", 4000), True),
        (("::1", 4000, 0, 0), True),
        (("::ffff:127.0.0.1", 4000, 0, 0), True),
        (("::ffff:10.0.0.1", 4000, 0, 0), False),
        (("172.17.0.1", 4000), False),
        (("fe80::1%eth0", 4000, 0, 2), False),
        (("0.0.0.0", 4000), False),
        (("localhost", 4000), False),
        ("", False),
        (None, False),
        ((), False),
    ],
)
def test_loopback_is_an_address_of_this_machine(peer: object, local: bool) -> None:
    assert is_loopback(peer) is local
