"""Keys: their secrets, names, scopes and tenants."""

import pytest

from store.errors import BadKey
from store.keys import (
    ID_BYTES,
    MARK,
    SCOPES,
    check_name,
    check_tenant,
    hash_of,
    new_secret,
    read_scopes,
)


def test_key_holds_its_id_and_no_two_are_alike() -> None:
    made = [new_secret() for _ in range(50)]
    begin, end = len(MARK), len(MARK) + 2 * ID_BYTES
    assert all(key[begin:end] == key_id for key_id, key in made)
    assert {len(key) for _, key in made} == {len(new_secret()[1])}
    assert len({hash_of(key.encode()) for _, key in made}) == len(made)


def test_scopes_are_read_in_their_order_each_once() -> None:
    assert read_scopes("read, infer,read") == ("infer", "read")
    for text in ("", " , ", "infer,all", "INFER"):
        with pytest.raises(BadKey, match="infer, feedback, read, train, admin"):
            read_scopes(text)


def test_name_of_a_key_is_plain_and_does_not_look_like_an_id() -> None:
    assert check_name("ci-agent.2") == "ci-agent.2"
    for name in ("", "a b", "-a", "a" * 65, "0123456789abcdef", "é", "a\n"):
        with pytest.raises(BadKey, match="cannot be the name of a key"):
            check_name(name)


def test_tenant_has_a_plain_name_and_no_key_for_admin() -> None:
    for tenant in ("a", "team-1", "x" * 64, "default"):
        assert check_tenant(tenant, ("infer", "read")) == tenant
    for tenant in ("", "a b", "a/b", "-a", "x" * 65, "a\x1fb", "a\n", "ä"):
        with pytest.raises(BadKey, match="cannot be the name of a tenant"):
            check_tenant(tenant, ("infer",))
    assert check_tenant("default", SCOPES) == "default"
    with pytest.raises(BadKey, match="cannot be for admin"):
        check_tenant("a", SCOPES)
