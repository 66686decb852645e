"""API keys: who is let in, by credentials, keys, their file and scopes; and the limits of a key."""

import json
import os
import stat
import zlib
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from proxy.error_replies import MINUTE_S, MOST_LINES, RefusalLog
from proxy.errors import BadRequest, Forbidden, KeysUnknown, NoKey, ProxyError, TooMany
from proxy.http.server import is_loopback
from proxy.http.wire import CREDENTIALS, Headers
from proxy.keys import (
    NO_CREDENTIALS,
    NO_KEYS,
    UNSEEN,
    WINDOW_S,
    KeyChecker,
    KeyFile,
    ShownCredentials,
    Usage,
    credentials_in,
    share_of_limit,
    tokens_of,
    without_credentials,
)
from proxy.settings import Access
from store.grants import KEY_PREFIX, Grant, KeyRing, Scope, hash_of_key
from store.keys import new_secret


def made(*scopes: Scope) -> tuple[Grant, ShownCredentials]:
    """A key for these scopes, and what a request with it shows."""
    key_id, key = new_secret()
    grant = Grant(id=key_id, hash=hash_of_key(key.encode()), scopes=scopes)
    return grant, ShownCredentials(key.encode())


def ring(*grants: Grant) -> KeyRing:
    return KeyRing(made=True, grants=grants)


def gate_with(known: KeyRing | None, access: Access = "loopback") -> KeyChecker:
    gate = KeyChecker(access)
    gate.replace_keys(known)
    return gate


def refused(
    gate: KeyChecker, shown: ShownCredentials, scope: Scope = "infer", *, local: bool = True
) -> object:
    """The class of the refusal, or None."""
    try:
        gate.check(shown, scope, ASKED, local=local)
    except ProxyError as error:
        return type(error)
    return None


ASKED: tuple[str, Headers] = ("GET", [])
ANYBODY = ShownCredentials()
RELAYED = ShownCredentials(relayed=True)


def test_wrong_revoked_and_missing_keys_are_refused_from_anywhere() -> None:
    grant, shown = made("infer")
    revoked, shown_revoked = made("infer")
    gate = gate_with(ring(grant, revoked))
    assert refused(gate, shown_revoked) is None
    gate.replace_keys(ring(grant))
    assert refused(gate, shown) is None
    key = shown.credential or b""
    wrong = [b"sk-x", b"", key[:-1], key + b"x", key[:22] + b"A" * 43, b"pawl_" + b"0" * 60]
    # The ids that stand for nobody's, by which an unknown one takes as long as a known one.
    wrong += [KEY_PREFIX + one * 16 + key[21:] for one in (b"\0", b"\1")]
    for credential in (shown_revoked.credential, None, *wrong):
        assert refused(gate, ShownCredentials(credential)) is NoKey


def test_no_request_is_let_in_after_the_last_key_is_revoked() -> None:
    for access in get_args(Access):
        assert refused(gate_with(ring(), access), ANYBODY) is NoKey


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("shown", [ANYBODY, RELAYED])
def test_loopback_alone_may_call_while_no_key_was_made(
    shown: ShownCredentials, local: bool
) -> None:
    let_in = local and not shown.relayed
    gate = gate_with(NO_KEYS)
    assert refused(gate, shown, local=local) is (None if let_in else Forbidden)
    assert refused(gate_with(NO_KEYS, "anyone"), shown, local=local) is None
    assert refused(gate_with(NO_KEYS, "keys"), shown, local=local) is NoKey


def test_refusal_of_a_relayed_request_names_the_remedy() -> None:
    with pytest.raises(Forbidden, match=r"pawl keys create NAME.*PAWL_ACCESS=anyone") as told:
        gate_with(NO_KEYS).check(RELAYED, "infer", ASKED, local=True)
    assert "reverse proxy" in str(told.value)


@pytest.mark.parametrize("access", get_args(Access))
def test_no_request_is_let_in_while_the_keys_are_unknown(access: Access) -> None:
    _, shown = made("infer")
    assert refused(KeyChecker(access), shown) is KeysUnknown
    gate = gate_with(None, access)
    assert refused(gate, shown) is KeysUnknown
    assert refused(gate, ANYBODY) is KeysUnknown


def test_known_keys_stay_valid_when_they_cannot_be_read_any_more() -> None:
    grant, shown = made("infer")
    gate = gate_with(ring(grant))
    gate.replace_keys(None)
    assert refused(gate, shown) is None
    assert refused(gate, ANYBODY) is NoKey
    # But a proxy that knew of none does not know now.
    gate = gate_with(NO_KEYS)
    gate.replace_keys(None)
    assert refused(gate, ANYBODY) is KeysUnknown


@pytest.mark.parametrize(
    ("access", "refusal"), [("loopback", None), ("anyone", KeysUnknown), ("keys", KeysUnknown)]
)
def test_proxy_that_has_not_seen_the_keys_is_open_to_its_own_machine_at_most(
    access: Access, refusal: object
) -> None:
    gate = gate_with(UNSEEN, access)
    assert refused(gate, ANYBODY) is refusal
    assert refused(gate, RELAYED) is (refusal or Forbidden)


@pytest.mark.parametrize("access", get_args(Access))
def test_removed_key_file_does_not_admit_calls_without_a_key(access: Access) -> None:
    grant, shown = made("infer")
    gate = gate_with(ring(grant), access)
    for removed in (NO_KEYS, UNSEEN):
        gate.replace_keys(removed)
        assert refused(gate, shown) is None
        assert refused(gate, ANYBODY) is NoKey


# The file


def test_file_of_keys_is_private_and_holds_hashes_alone(
    tmp_path: Path,
) -> None:
    grant, shown = made("infer", "read")
    file = KeyFile(tmp_path)
    assert file.read() == UNSEEN
    file.write(NO_KEYS)
    assert file.read() == NO_KEYS
    file.write(ring(grant))
    assert KeyFile(tmp_path).read() == ring(grant)
    [written] = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert stat.S_IMODE(written.stat().st_mode) == 0o600
    assert stat.S_IMODE(written.parent.stat().st_mode) == 0o700
    secret = (shown.credential or b"")[22:]
    assert secret not in written.read_bytes()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"made": 1}', b"\xff", b"[" * 100_000])
def test_unreadable_file_of_keys_is_not_taken_as_empty(tmp_path: Path, content: bytes) -> None:
    file = KeyFile(tmp_path)
    file.write(ring(made("infer")[0]))
    [path] = [one for one in tmp_path.rglob("*") if one.is_file()]
    path.write_bytes(content)
    assert KeyFile(tmp_path).read() is None
    path.unlink()
    assert KeyFile(tmp_path).read() is None


def test_written_or_removed_key_file_is_noticed_as_changed_once(tmp_path: Path) -> None:
    file = KeyFile(tmp_path)
    assert file.has_changed()
    assert not file.has_changed()
    writer = KeyFile(tmp_path)
    for step in (
        lambda: writer.write(ring()),
        lambda: writer.write(ring(made("read")[0])),
        lambda: os.unlink(tmp_path / "access" / "keys.json"),
    ):
        step()
        assert file.has_changed()
        assert not file.has_changed()


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
    shown = credentials_in([other, *headers])
    assert (shown.credential, shown.relayed) == (KEY, False)
    assert without_credentials([other, *headers], shown) == [other]


def test_headers_without_credentials_show_no_key() -> None:
    assert credentials_in([(b"Host", b"a"), (b"x-my-key", KEY)]) is NO_CREDENTIALS


@pytest.mark.parametrize("name", [b"Forwarded", b"X-Forwarded-For", b"x-real-ip", b"Via"])
def test_relayed_request_is_known_by_its_headers(name: bytes) -> None:
    assert credentials_in([(name, b"for=127.0.0.1")]) == ShownCredentials(relayed=True)


@given(st.lists(st.tuples(st.sampled_from(sorted(CREDENTIALS)), st.binary(max_size=80))))
def test_every_credential_is_removed_from_the_headers(headers: list[tuple[bytes, bytes]]) -> None:
    upper = [(name.title(), value) for name, value in headers]
    both = [*headers, (b"Host", b"h"), *upper]
    assert without_credentials(both, credentials_in(both)) == [(b"Host", b"h")]
    assert (credentials_in(upper).credential is None) == (not headers)


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


def usage(workers: int = 1, **limits: int) -> Usage:
    held = Usage()
    held.set_limits(Grant(id="a", hash=b"", scopes=(), **limits), workers)
    return held


@given(
    st.integers(1, 5),
    st.lists(st.floats(0, 30), min_size=1, max_size=60),
)
def test_no_minute_has_more_requests_than_the_keys_limit_and_the_stated_wait_suffices(
    limit: int, pauses: list[float]
) -> None:
    """A minute is any `WINDOW_S` seconds, not one of the clock."""
    held, now = usage(per_minute=limit), 1000.0
    begun: list[float] = []
    for pause in pauses:
        now += pause
        wait_s = held.begin(now)
        if wait_s is None:
            begun.append(now)
            held.end()
            continue
        assert 1 <= wait_s <= WINDOW_S + 1
        now += wait_s
        assert held.begin(now) is None
        begun.append(now)
        held.end()
    for at in begun:
        assert sum(at - WINDOW_S < other <= at for other in begun) <= limit


@given(st.integers(1, 5), st.lists(st.tuples(st.floats(0, 30), st.integers(1, 6)), max_size=40))
def test_no_minute_has_more_statements_than_the_keys_limit_and_the_stated_wait_suffices(
    limit: int, lists: list[tuple[float, int]]
) -> None:
    """A minute is any `WINDOW_S` seconds, not one of the clock."""
    held, now = usage(per_minute=limit), 1000.0
    stated: list[float] = []
    for pause, number in lists:
        now += pause
        if held.begin(now) is not None:
            continue
        held.end()
        try:
            held.count_statements(now, number)
        except BadRequest:
            assert number > limit
            continue
        except TooMany as error:
            now += error.retry_after_s or 0
            assert held.begin(now) is None
            held.end()
            held.count_statements(now, number)
        stated += [now] * number
    for at in stated:
        assert sum(at - WINDOW_S < other <= at for other in stated) <= limit


def test_feedback_list_above_a_workers_share_is_accepted_in_an_empty_minute() -> None:
    held = usage(workers=8, per_minute=10)
    assert held.begin(0.0) is None
    held.count_statements(0.0, 10)
    assert held.begin(WINDOW_S / 2) is not None
    assert held.begin(WINDOW_S + 1) is None
    assert held.begin(WINDOW_S + 2) is None
    with pytest.raises(TooMany):
        held.count_statements(WINDOW_S + 2, 10)
    with pytest.raises(BadRequest):
        held.count_statements(WINDOW_S + 2, 11)


@given(st.integers(1, 4), st.lists(st.booleans(), max_size=60))
def test_no_more_requests_of_a_key_run_at_once_than_its_limit(
    limit: int, steps: list[bool]
) -> None:
    held, running = usage(at_once=limit), 0
    for begins in steps:
        if begins:
            let_in = held.begin(0.0) is None
            assert let_in == (running < limit)
            running += let_in
        elif running:
            held.end()
            running -= 1


def test_key_without_limits_is_never_refused() -> None:
    held = usage()
    assert [held.begin(0.0) for _ in range(1000)] == [None] * 1000


@pytest.mark.parametrize(
    ("limit", "workers", "share"), [(None, 4, None), (1, 4, 1), (8, 4, 2), (9, 4, 3), (5, 1, 5)]
)
def test_worker_has_its_share_of_a_keys_limit_rounded_up(
    limit: int | None, workers: int, share: int | None
) -> None:
    assert share_of_limit(limit, workers) == share


def test_changed_rate_limit_of_a_key_counts_at_once() -> None:
    held = usage(per_minute=3)
    assert [held.begin(now) for now in (0.0, 1.0, 2.0)] == [None] * 3
    held.set_limits(Grant(id="a", hash=b"", scopes=(), per_minute=1), 1)
    assert held.begin(3.0) == 59
    held.set_limits(Grant(id="a", hash=b"", scopes=()), 1)
    assert held.begin(3.0) is None


@given(st.integers(1, 50), st.lists(st.tuples(st.floats(0, 30), st.integers(0, 40)), max_size=60))
def test_no_call_begins_while_a_minute_has_used_up_the_tokens(
    limit: int, calls: list[tuple[float, int]]
) -> None:
    """A minute is the last `WINDOW_S` seconds; a call that waits as it is told begins."""
    held, now = usage(tokens_per_minute=limit), 1000.0
    taken: list[tuple[float, int]] = []

    def in_the_minute() -> int:
        return sum(tokens for at, tokens in taken if now - WINDOW_S < at)

    for pause, tokens in calls:
        now += pause
        wait_s = held.begin(now)
        assert (wait_s is None) == (in_the_minute() < limit)
        if wait_s is not None:
            assert 1 <= wait_s <= WINDOW_S + 1
            # Feedback is let in meanwhile.
            assert held.begin(now, takes_tokens=False) is None
            held.end()
            now += wait_s
            assert held.begin(now) is None
        held.charge_tokens(now, tokens)
        taken.append((now, tokens))
        held.end()


def test_used_tokens_of_a_key_are_counted_only_if_limited_and_against_a_workers_share() -> None:
    held = usage(workers=4, tokens_per_minute=10)
    held.charge_tokens(0.0, 3)
    assert held.begin(0.0) == 60
    free = usage(per_minute=5)
    assert (free.counts_tokens, held.counts_tokens) == (False, True)
    free.charge_tokens(0.0, 1000)
    free.set_limits(Grant(id="a", hash=b"", scopes=(), tokens_per_minute=10), 1)
    assert free.begin(0.0) is None


# Tokens

REQUEST = b'{"model":"m"}'
CHAT = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}
DETAILED = CHAT | {"prompt_tokens_details": {"cached_tokens": 100}}
ANTHROPIC = {"input_tokens": 7, "output_tokens": 5, "cache_read_input_tokens": 3}


def events(*values: Any) -> bytes:
    return b"".join(b"data: " + json.dumps(value).encode() + b"\n\n" for value in values)


@pytest.mark.parametrize(
    ("reply", "tokens"),
    [
        (json.dumps({"choices": [], "usage": CHAT}).encode(), 12),
        (json.dumps({"usage": DETAILED}, indent=1).encode(), 12),
        (json.dumps({"content": [], "usage": ANTHROPIC}).encode(), 15),
        # A stream that tells at its beginning and at its end, and one that tells all the time.
        (
            events(
                {"message": {"usage": {"input_tokens": 7, "output_tokens": 1}}},
                {"usage": {"output_tokens": 5}},
            ),
            12,
        ),
        (events({"usage": None}, {"usage": CHAT | {"completion_tokens": 1}}, {"usage": CHAT}), 12),
        # Without usage, the ids; those of the prompt once.
        (
            events(
                {"prompt_token_ids": [1, 2, 3], "choices": [{"token_ids": None}]},
                {"choices": [{"token_ids": [4]}]},
                {"choices": [{"token_ids": [5, 6]}]},
            ),
            6,
        ),
        # With neither, four bytes of the request a token, and each event of the reply.
        (events({"choices": []}, {"choices": []}), 4 + 2),
        (b"x" * 40, 4 + 10),
        # What a model says is not taken for what the server tells.
        (
            json.dumps(
                {"text": json.dumps({"usage": {"total_tokens": 1}}), "usage": CHAT}
            ).encode(),
            12,
        ),
        (b'{"usage": {"total_tokens": "many"}}', 4 + 9),
        (b'{"usage": {', 4 + 3),
        # There was no reply.
        (b"", 0),
    ],
)
def test_tokens_are_counted_by_usage_or_ids_or_estimated(reply: bytes, tokens: int) -> None:
    assert tokens_of(REQUEST, reply) == tokens


def test_deflated_reply_is_inflated_for_its_usage() -> None:
    reply = json.dumps({"usage": CHAT}).encode()
    assert tokens_of(REQUEST, zlib.compress(reply), deflated=True) == 12


def test_tokens_of_a_very_long_reply_are_estimated_from_its_length() -> None:
    reply = zlib.compress(b" " * (33 * 2**20))
    assert tokens_of(b"", reply, deflated=True) == 8 * 2**20


def test_error_costs_only_the_tokens_of_its_usage() -> None:
    refusal = b'{"error":{"message":"busy"}}'
    assert tokens_of(REQUEST, refusal) > 0
    assert tokens_of(REQUEST, refusal, refused=True) == 0
    assert tokens_of(REQUEST, b'{"error":{},"usage":{"total_tokens":3}}', refused=True) == 3


def test_tokens_are_counted_by_a_usage_that_also_has_costs_and_times() -> None:
    usage = b'{"usage":{"prompt_tokens":5,"completion_tokens":2,"queue_time":0.037,"cost":1e-5}}'
    assert tokens_of(REQUEST, usage) == 7


def test_log_lines_about_refused_requests_are_limited_in_number() -> None:
    now = 100.0
    refusals = RefusalLog(lambda: now)
    with capture_logs() as lines:
        for _ in range(1000):
            refusals.log_refusal(401, "invalid_api_key", "/v1/chat/completions", None, "192.0.2.1")
            refusals.log_refusal(404, None, "/v1/models", None, "192.0.2.1")
        now += MINUTE_S
        refusals.log_refusal(403, "missing_scope", "/feedback", "agent", None)
    assert len(lines) == MOST_LINES + 1
    assert lines[0] == {
        "event": "refused",
        "log_level": "warning",
        "status": 401,
        "reason": "invalid_api_key",
        "path": "/v1/chat/completions",
        "key": None,
        "client": "192.0.2.1",
    }
    assert (lines[-1]["key"], lines[-1]["left_out"]) == ("agent", 1000 - MOST_LINES)
