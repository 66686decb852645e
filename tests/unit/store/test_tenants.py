"""Tenants and their keys: no two tenants' names or fingerprints are alike, the default's stay."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.errors import BadKey
from store.grants import ID_BYTES, KEY_PREFIX, SCOPES, hash_of_key
from store.keys import check_name, check_tenant, new_secret, parse_scopes
from store.tenants import (
    DEFAULT,
    PATTERN,
    SEPARATOR,
    bare,
    keyed_digests,
    name_in_same_tenant,
    scoped,
    stored_prefix,
    task_family,
    tenant_of,
)

TENANTS = st.one_of(st.just(DEFAULT), st.from_regex(re.compile(PATTERN, re.ASCII), fullmatch=True))
# What a client may send: names that look like another tenant's among them.
NAMES = st.one_of(
    st.text(max_size=20),
    st.lists(st.sampled_from(["a", "b", DEFAULT, SEPARATOR, "run-7"]), max_size=5).map("".join),
)


@given(TENANTS, NAMES, TENANTS, NAMES)
def test_scoped_names_are_equal_only_for_equal_tenant_and_name(
    tenant: str, name: str, other: str, its: str
) -> None:
    assert (scoped(tenant, name) == scoped(other, its)) == ((tenant, name) == (other, its))


@given(TENANTS, NAMES)
def test_tenant_and_name_are_read_from_a_scoped_name(tenant: str, name: str) -> None:
    kept = scoped(tenant, name)
    assert (tenant_of(kept), bare(kept)) == (tenant, name)
    assert name_in_same_tenant(kept, "n") == scoped(tenant, "n")
    begins = stored_prefix(tenant)
    assert begins is None or kept.startswith(begins)


@given(NAMES.filter(lambda name: SEPARATOR not in name))
def test_names_of_the_default_tenant_are_kept_as_they_are(name: str) -> None:
    assert scoped(DEFAULT, name) == name
    assert (tenant_of(name), bare(name)) == (DEFAULT, name)


@given(TENANTS, NAMES, TENANTS, NAMES | st.from_regex(r"[0-9]{1,3}", fullmatch=True))
def test_tasks_of_two_tenants_never_share_a_family(
    tenant: str, name: str, other: str, its: str
) -> None:
    own, others = task_family(scoped(tenant, name)), task_family(scoped(other, its))
    assert (tenant_of(own), tenant_of(others)) == (tenant, other)
    assert tenant == other or own != others


@given(TENANTS, TENANTS, st.lists(st.binary(min_size=16, max_size=16), max_size=4, unique=True))
def test_fingerprints_of_two_tenants_never_match(
    tenant: str, other: str, digests: list[bytes]
) -> None:
    own, others = keyed_digests(tenant, digests), keyed_digests(other, digests)
    assert all(len(one) == 16 for one in own)
    assert [one[0] for one in own] == [one[0] for one in digests]
    assert (own == others) if tenant == other else not set(own) & set(others)
    assert keyed_digests(DEFAULT, digests) == tuple(digests)


def test_api_keys_contain_their_ids_and_differ() -> None:
    made = [new_secret() for _ in range(50)]
    begin, end = len(KEY_PREFIX), len(KEY_PREFIX) + 2 * ID_BYTES
    assert all(key[begin:end] == key_id for key_id, key in made)
    assert {len(key) for _, key in made} == {len(new_secret()[1])}
    assert len({hash_of_key(key.encode()) for _, key in made}) == len(made)


def test_key_scopes_are_read_once_each_in_a_fixed_order() -> None:
    assert parse_scopes("read, infer,read") == ("infer", "read")
    for text in ("", " , ", "infer,all", "INFER"):
        with pytest.raises(BadKey, match="infer, feedback, read, train, admin"):
            parse_scopes(text)


def test_name_of_a_key_is_plain_and_does_not_look_like_an_id() -> None:
    assert check_name("ci-agent.2") == "ci-agent.2"
    for name in ("", "a b", "-a", "a" * 65, "0123456789abcdef", "é", "a\n"):
        with pytest.raises(BadKey, match="cannot be the name of a key"):
            check_name(name)


def test_tenant_needs_a_plain_name_and_only_the_default_tenant_gets_an_admin_key() -> None:
    for tenant in ("a", "team-1", "x" * 64, "default"):
        assert check_tenant(tenant, ("infer", "read")) == tenant
    for tenant in ("", "a b", "a/b", "-a", "x" * 65, "a\x1fb", "a\n", "ä"):
        with pytest.raises(BadKey, match="cannot be the name of a tenant"):
            check_tenant(tenant, ("infer",))
    assert check_tenant("default", SCOPES) == "default"
    with pytest.raises(BadKey, match="cannot be for admin"):
        check_tenant("a", SCOPES)
