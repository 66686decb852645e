"""What a request's headers say of who calls, and what is left of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.http.server import is_loopback
from proxy.keys.gate import NOTHING, Shown, shown_in, without_credentials
from proxy.upstreams.server import CREDENTIALS
from store.keys import ID_BYTES, MARK, hash_of, new_secret

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
def test_a_key_is_found_where_clients_send_it(headers: list[tuple[bytes, bytes]]) -> None:
    other = (b"Content-Type", b"application/json")
    shown = shown_in([other, *headers])
    assert (shown.credential, shown.relayed) == (KEY, False)
    assert without_credentials([other, *headers], shown) == [other]


def test_what_has_no_credentials_shows_nothing() -> None:
    assert shown_in([(b"Host", b"a"), (b"x-my-key", KEY)]) is NOTHING


@pytest.mark.parametrize("name", [b"Forwarded", b"X-Forwarded-For", b"x-real-ip", b"Via"])
def test_what_came_through_a_proxy_is_known_by_its_headers(name: bytes) -> None:
    assert shown_in([(name, b"for=127.0.0.1")]) == Shown(relayed=True)


@given(st.lists(st.tuples(st.sampled_from(sorted(CREDENTIALS)), st.binary(max_size=80))))
def test_no_credential_is_left_whatever_it_is(headers: list[tuple[bytes, bytes]]) -> None:
    upper = [(name.title(), value) for name, value in headers]
    both = [*headers, (b"Host", b"h"), *upper]
    assert without_credentials(both, shown_in(both)) == [(b"Host", b"h")]
    assert (shown_in(upper).credential is None) == (not headers)


def test_a_key_is_found_by_the_id_in_it_and_no_two_are_alike() -> None:
    made = [new_secret() for _ in range(50)]
    begin, end = len(MARK), len(MARK) + 2 * ID_BYTES
    assert all(key[begin:end] == key_id for key_id, key in made)
    assert {len(key) for _, key in made} == {len(KEY)}
    assert len({hash_of(key.encode()) for _, key in made}) == len(made)


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
