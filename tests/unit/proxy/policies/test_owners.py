"""Whose a policy is, also while its file changes or is damaged: what a tenant may ask for."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from proxy.errors import NotServed
from proxy.ingester import admin as owning
from proxy.ingester.admin import OwnersFile
from proxy.policies.owners import Owners
from proxy.policies.versions import ServedVersion, Versions
from store.errors import BadPolicies
from store.policy_table import PolicyTable, open_policies, parse_policies
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
    state: PolicyState = "serving" if number else "retired"
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


def test_long_model_name_is_checked_in_linear_time() -> None:
    for name in (" " * 2_000_000 + "x", "@" * 2_000_000, "x@" + "1" * 2_000_000 + "x"):
        assert not Owners(TABLE).hides("a", name)


def test_policy_name_may_contain_an_at_sign_without_a_policies_file() -> None:
    owners = Owners(None)
    owners.learn_policies([version(1, "serving", "me@home")])
    assert owners.hides("a", "me@home@1")
    assert not owners.hides(DEFAULT, "me@home@1")


def test_sole_tenant_sees_all_model_names_and_other_tenants_no_versions() -> None:
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
        assert serving == ServedVersion(None, None, model)
        assert not number or WHOSE[policy] == tenant


@pytest.mark.parametrize("tenant", TENANTS)
def test_policy_that_changed_its_tenant_is_served_to_no_tenant(tenant: str) -> None:
    given = [of("pa", number, "b") for number in (0, 1)]
    versions = Versions([*given, of("pb", 0)], TABLE)
    assert versions.owners.hides(tenant, "pa@1")
    assert versions.resolve("pa", "e", "default", tenant) == ServedVersion(None, None, "pa")
    assert versions.trained_policy("pa", "default", tenant) is None


def test_policy_keeps_its_first_tenant_without_a_policies_file() -> None:
    versions = Versions(VERSIONS)
    assert versions.resolve("pa", "e", "default", "a").policy == "pa"
    assert versions.resolve("pa", "e", "default", DEFAULT) == ServedVersion(None, None, "pa")
    assert versions.owners.hides(DEFAULT, "pa@1")
    assert not versions.owners.hides("a", "pa@1")
    assert versions.resolve("p", "e").policy == "p"


DAMAGES: dict[str, Callable[[Path], object]] = {
    "not TOML": lambda path: path.write_text("[[policy"),
    "no policy": lambda path: path.write_text(""),
    "an unknown key": lambda path: path.write_text('[[policy]]\nname = "p"\nowner = "b"\n'),
    "not UTF-8": lambda path: path.write_bytes(b'[[policy]]\nname = "\xff"\n'),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "missing": lambda path: path.unlink(),
}


def text_of(**tenants: str) -> str:
    """A file of policies, by the tenant of each."""
    return "".join(
        f'[[policy]]\nname = "{name}"\nbase = "m"\ntenant = "{tenant}"\n'
        for name, tenant in tenants.items()
    )


def replace(path: Path, text: str) -> None:
    """Replace the file as those do who write it beside its place."""
    partial = path.with_suffix(".part")
    partial.write_text(text)
    partial.replace(path)


def whose(owners: Owners, policy: str = "p") -> str:
    [tenant] = [tenant for tenant in ("a", "b", DEFAULT) if owners.owns(tenant, policy)]
    return tenant


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "policies.toml"
    made.write_text(text_of(p="a"))
    return made


def test_policys_tenant_is_read_from_the_store_without_a_policies_file() -> None:
    began = version(0, "serving", "p", "m", tenant="b")
    file = OwnersFile(None)
    assert whose(file.current_owners([])) == DEFAULT
    assert whose(file.current_owners([began])) == "b"
    assert whose(file.current_owners([])) == DEFAULT


@pytest.mark.parametrize("how", [replace, Path.write_text])
def test_changed_policies_file_is_read_again(
    path: Path, how: Callable[[Path, str], object]
) -> None:
    file = OwnersFile(path)
    assert whose(file.current_owners([])) == "a"
    how(path, text_of(p="b", q="a"))
    owners = file.current_owners([])
    assert (whose(owners), whose(owners, "q")) == ("b", "a")


def test_policies_file_written_in_place_within_a_clock_tick_is_read_again(
    path: Path,
) -> None:
    file = OwnersFile(path)
    assert whose(file.current_owners([]), "q") == DEFAULT
    before = path.stat()
    with path.open("a") as more:
        more.write(text_of(q="b"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert whose(file.current_owners([]), "q") == "b"


@pytest.mark.parametrize("damage", DAMAGES)
def test_unusable_policies_file_keeps_the_last_tenants_and_is_logged_once(
    path: Path, damage: str
) -> None:
    file = OwnersFile(path)
    assert whose(file.current_owners([])) == "a"
    DAMAGES[damage](path)
    with capture_logs() as logs:
        assert [whose(file.current_owners([])) for _ in range(3)] == ["a"] * 3
    [told] = logs
    assert (told["event"], told["log_level"]) == ("owners_unreadable", "error")
    assert str(path) in told["reason"]
    if path.is_dir():
        path.rmdir()
    replace(path, text_of(p="b"))
    assert whose(file.current_owners([])) == "b"


def test_policies_file_that_is_missing_at_first_is_read_once_it_exists(tmp_path: Path) -> None:
    path = tmp_path / "policies.toml"
    file = OwnersFile(path)
    with capture_logs() as logs:
        assert whose(file.current_owners([])) == DEFAULT
    assert [line["event"] for line in logs] == ["owners_unreadable"]
    replace(path, text_of(p="a"))
    assert whose(file.current_owners([])) == "a"


def test_policies_file_is_read_again_after_a_disk_error(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(_: Path | None) -> None:
        raise BadPolicies(f"{path} cannot be read: Input/output error")

    file = OwnersFile(path)
    with monkeypatch.context() as patched:
        patched.setattr(owning, "open_policies", failing)
        assert whose(file.current_owners([])) == DEFAULT
    assert whose(file.current_owners([])) == "a"


def test_policies_file_replaced_while_it_is_read_is_read_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(given: Path | None) -> object:
        """Read the file as it was when the look began; then it is replaced."""
        found = open_policies(given)
        replace(path, text_of(p="b"))
        return found

    file = OwnersFile(path)
    with monkeypatch.context() as patched:
        patched.setattr(owning, "open_policies", late)
        assert whose(file.current_owners([])) == "a"
    assert whose(file.current_owners([])) == "b"
