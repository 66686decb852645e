"""Who is let in: every state of the keys, every scope, and what each refusal says."""

import os
import stat
from itertools import product
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from proxy.errors import Forbidden, KeysUnknown, NoKey, OutOfScope, ProxyError
from proxy.keys.gate import NO_KEYS, Gate, KeyFile, Shown
from proxy.settings import Access
from store.errors import BadKey
from store.keys import (
    MARK,
    SCOPES,
    Grant,
    KeyRing,
    Scope,
    check_name,
    check_tenant,
    hash_of,
    new_secret,
    read_scopes,
)


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
def test_a_key_opens_exactly_what_it_is_for(scope: Scope, others: bool) -> None:
    scopes = tuple(one for one in SCOPES if (one == scope) != others)
    grant, shown = made(*scopes)
    gate = gate_with(ring(grant))
    for asked in SCOPES:
        assert refused(gate, shown, asked) is (None if asked in scopes else OutOfScope)


def test_a_wrong_a_revoked_and_no_key_are_refused_from_anywhere() -> None:
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


def test_the_last_key_revoked_locks_the_door() -> None:
    for access in get_args(Access):
        assert refused(gate_with(ring(), access), ANYBODY) is NoKey


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("shown", [ANYBODY, RELAYED])
def test_without_any_key_made_only_loopback_may_call(shown: Shown, local: bool) -> None:
    let_in = local and not shown.relayed
    gate = gate_with(NO_KEYS)
    assert refused(gate, shown, local=local) is (None if let_in else Forbidden)
    assert refused(gate_with(NO_KEYS, "anyone"), shown, local=local) is None
    assert refused(gate_with(NO_KEYS, "keys"), shown, local=local) is NoKey


def test_what_opens_a_port_is_named_where_it_is_closed() -> None:
    with pytest.raises(Forbidden, match=r"pawl keys create NAME.*PAWL_ACCESS=anyone") as told:
        gate_with(NO_KEYS).check(RELAYED, "infer", local=True)
    assert "reverse proxy" in str(told.value)


@pytest.mark.parametrize("access", get_args(Access))
def test_keys_that_are_not_known_let_nobody_in(access: Access) -> None:
    _, shown = made("infer")
    assert refused(Gate(access), shown) is KeysUnknown
    gate = gate_with(None, access)
    assert refused(gate, shown) is KeysUnknown
    assert refused(gate, ANYBODY) is KeysUnknown


def test_keys_that_cannot_be_read_any_more_go_on_to_count() -> None:
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
def test_a_removed_file_of_keys_opens_no_port_that_asked_for_one(access: Access) -> None:
    grant, shown = made("infer")
    gate = gate_with(ring(grant), access)
    gate.take(NO_KEYS)
    assert refused(gate, shown) is None
    assert refused(gate, ANYBODY) is NoKey


# The file


def test_the_file_is_private_holds_hashes_only_and_gives_back_what_was_written(
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
def test_a_file_that_cannot_be_read_opens_nothing(tmp_path: Path, content: bytes) -> None:
    file = KeyFile(tmp_path)
    file.write(ring(made("infer")[0]))
    [path] = [one for one in tmp_path.rglob("*") if one.is_file()]
    path.write_bytes(content)
    assert KeyFile(tmp_path).read() is None
    path.unlink()
    assert KeyFile(tmp_path).read() is None


def test_a_file_that_is_written_lost_or_written_again_has_changed(tmp_path: Path) -> None:
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


# Names and scopes


def test_scopes_are_read_in_their_order_each_once() -> None:
    assert read_scopes("read, infer,read") == ("infer", "read")
    for text in ("", " , ", "infer,all", "INFER"):
        with pytest.raises(BadKey, match="infer, feedback, read, train, admin"):
            read_scopes(text)


def test_a_name_is_plain_and_does_not_look_like_an_id() -> None:
    assert check_name("ci-agent.2") == "ci-agent.2"
    for name in ("", "a b", "-a", "a" * 65, "0123456789abcdef", "é", "a\n"):
        with pytest.raises(BadKey, match="cannot be the name of a key"):
            check_name(name)


def test_a_tenant_has_a_name_and_no_key_for_what_all_share() -> None:
    for tenant in ("a", "team-1", "x" * 64, "default"):
        assert check_tenant(tenant, ("infer", "read")) == tenant
    for tenant in ("", "a b", "a/b", "-a", "x" * 65, "a\x1fb", "a\n", "ä"):
        with pytest.raises(BadKey, match="cannot be the name of a tenant"):
            check_tenant(tenant, ("infer",))
    assert check_tenant("default", SCOPES) == "default"
    with pytest.raises(BadKey, match="cannot be for admin"):
        check_tenant("a", SCOPES)


def test_keys_of_a_file_from_before_tenants_are_the_default_ones() -> None:
    grant, _ = made("infer")
    known = msgspec.json.decode(msgspec.json.encode(ring(grant)))
    del known["grants"][0]["tenant"]
    assert msgspec.convert(known, KeyRing, strict=False).grants[0].tenant == "default"
