"""Whose a policy is: what a tenant may ask for, and what is hidden from it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.errors import NotServed
from proxy.policies.owners import Owners
from proxy.policies.versions import Serving, Versions
from store.policy_table import PolicyTable, parse_policies
from store.tenants import DEFAULT
from store.versions import PolicyState, PolicyVersion
from tests.support.proxy.versions import version

TABLE = parse_policies(
    "".join(
        f'[[policy]]\nname = "{name}"\nbase = "{base}"\ntenant = "{tenant}"\n'
        for name, base, tenant in (("pa", "m", "a"), ("pb", "m", "b"), ("p", "dated@2024", DEFAULT))
    ),
    "p.toml",
)
TENANTS = ("a", "b", DEFAULT, "nobody")


WHOSE = {"pa": "a", "pb": "b", "p": DEFAULT, "gone": DEFAULT}


def of(name: str, number: int, tenant: str | None = None) -> PolicyVersion:
    state: PolicyState = "serving" if number else "published"
    return version(number, state, name, "m", tenant=tenant or WHOSE[name])


VERSIONS = [of(name, number) for name in WHOSE for number in (0, 1)]


@pytest.mark.parametrize("tenant", TENANTS)
def test_a_tenant_sees_its_own_versions_and_base_models(tenant: str) -> None:
    owners = Owners(TABLE)
    own = {"a": "pa", "b": "pb", DEFAULT: "p"}.get(tenant)
    for policy in ("pa", "pb", "p", "gone", "never"):
        for name in (f"{policy}@0", f"{policy}@1", f"{policy}@99", f" {policy}@1", f"{policy}@1\n"):
            assert owners.hides(tenant, name) == (policy != own), name
    for name in (None, "m", "pa", "dated@2024", "gpt-4o", "@", "x@y"):
        assert not owners.hides(tenant, name)
    for odd in ("p@a@1", "pa@pb@1", "dated@2024@1", " x @1", "x@٣"):
        assert owners.hides(tenant, odd), odd
    with pytest.raises(NotServed, match="no version 'never@1'"):
        owners.check(tenant, "never@1")
    owners.check(tenant, "m")


def test_a_long_name_takes_no_longer_than_it_is_long() -> None:
    for name in (" " * 2_000_000 + "x", "@" * 2_000_000, "x@" + "1" * 2_000_000 + "x"):
        assert not Owners(TABLE).hides("a", name)


def test_a_policy_without_a_file_may_have_an_at_in_its_name() -> None:
    owners = Owners(None)
    owners.learn([version(1, "serving", "me@home")])
    assert owners.hides("a", "me@home@1")
    assert not owners.hides(DEFAULT, "me@home@1")


def test_with_one_tenant_nothing_is_hidden_from_it_and_all_from_others() -> None:
    for owners in (Owners(None), Owners(parse_policies('[[policy]]\nname = "p"\nbase = "m"', "p"))):
        assert owners.sole == DEFAULT
        assert not owners.hides(DEFAULT, "x@1")
        assert owners.hides("a", "p@1")
        assert not owners.hides("a", "m")


@given(
    tenant=st.sampled_from(TENANTS),
    model=st.sampled_from(
        ["m", *WHOSE, *(f"{name}@{number}" for name in WHOSE for number in (0, 1))]
    ),
    agent=st.sampled_from(["default", "writer"]),
    table=st.sampled_from([TABLE, None]),
)
def test_no_call_is_served_by_another_tenants_policy(
    tenant: str, model: str, agent: str, table: PolicyTable | None
) -> None:
    versions = Versions(VERSIONS, table)
    policy, _, number = model.partition("@")
    if versions.owners.hides(tenant, model):
        assert WHOSE[policy] != tenant
        return
    serving = versions.resolve(model, "e", agent, tenant)
    if serving.policy is not None:
        assert WHOSE[serving.policy] == tenant
    else:
        # Passed on as it is: if it is a version's name, the version is the tenant's own.
        assert serving == Serving(None, None, model)
        assert not number or WHOSE[policy] == tenant


@pytest.mark.parametrize("tenant", TENANTS)
def test_a_policy_that_is_given_to_another_tenant_is_nobodys(tenant: str) -> None:
    given = [of("pa", number, "b") for number in (0, 1)]
    versions = Versions([*given, of("pb", 0)], TABLE)
    assert versions.owners.hides(tenant, "pa@1")
    assert versions.resolve("pa", "e", "default", tenant) == Serving(None, None, "pa")
    assert versions.trained_policy("pa", "default", tenant) is None


def test_without_a_file_a_policy_is_still_the_tenants_that_it_began_with() -> None:
    versions = Versions(VERSIONS)
    assert versions.resolve("pa", "e", "default", "a").policy == "pa"
    assert versions.resolve("pa", "e", "default", DEFAULT) == Serving(None, None, "pa")
    assert versions.owners.hides(DEFAULT, "pa@1")
    assert not versions.owners.hides("a", "pa@1")
    assert versions.resolve("p", "e").policy == "p"
