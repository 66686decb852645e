"""Whose policies are, while their file is damaged, missing, replaced, or being replaced."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from proxy.ingester import admin as owning
from proxy.ingester.admin import OwnersFile
from proxy.policies.owners import Owners
from store.errors import BadPolicies
from store.policy_table import open_policies
from store.tenants import DEFAULT
from tests.support.proxy.versions import version

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


def test_owner_without_a_file_is_the_stores() -> None:
    began = version(0, "serving", "p", "m", tenant="b")
    file = OwnersFile(None)
    assert whose(file.now([])) == DEFAULT
    assert whose(file.now([began])) == "b"
    assert whose(file.now([])) == DEFAULT


@pytest.mark.parametrize("how", [replace, Path.write_text])
def test_changed_file_is_read_again(path: Path, how: Callable[[Path, str], object]) -> None:
    file = OwnersFile(path)
    assert whose(file.now([])) == "a"
    how(path, text_of(p="b", q="a"))
    owners = file.now([])
    assert (whose(owners), whose(owners, "q")) == ("b", "a")


def test_file_written_in_place_within_a_clock_tick_is_read_again(
    path: Path,
) -> None:
    file = OwnersFile(path)
    assert whose(file.now([]), "q") == DEFAULT
    before = path.stat()
    with path.open("a") as more:
        more.write(text_of(q="b"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert whose(file.now([]), "q") == "b"


@pytest.mark.parametrize("damage", DAMAGES)
def test_unusable_file_keeps_the_last_owners_and_is_logged_once(path: Path, damage: str) -> None:
    file = OwnersFile(path)
    assert whose(file.now([])) == "a"
    DAMAGES[damage](path)
    with capture_logs() as logs:
        assert [whose(file.now([])) for _ in range(3)] == ["a"] * 3
    [told] = logs
    assert (told["event"], told["log_level"]) == ("owners_unreadable", "error")
    assert str(path) in told["reason"]
    if path.is_dir():
        path.rmdir()
    replace(path, text_of(p="b"))
    assert whose(file.now([])) == "b"


def test_file_that_is_missing_at_first_is_read_once_it_is_there(tmp_path: Path) -> None:
    path = tmp_path / "policies.toml"
    file = OwnersFile(path)
    with capture_logs() as logs:
        assert whose(file.now([])) == DEFAULT
    assert [line["event"] for line in logs] == ["owners_unreadable"]
    replace(path, text_of(p="a"))
    assert whose(file.now([])) == "a"


def test_file_that_the_disk_refused_is_tried_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(_: Path | None) -> None:
        raise BadPolicies(f"{path} cannot be read: Input/output error")

    file = OwnersFile(path)
    with monkeypatch.context() as patched:
        patched.setattr(owning, "open_policies", failing)
        assert whose(file.now([])) == DEFAULT
    assert whose(file.now([])) == "a"


def test_file_replaced_while_it_is_read_is_read_again(
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
        assert whose(file.now([])) == "a"
    assert whose(file.now([])) == "b"
