"""`--tenant` narrows what commands list and act on to what is one tenant's."""

import json
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from store import claims
from store.errors import UnknownKey, UnknownPolicy, UnknownUpdate
from store.keys import create_key
from store.tenants import DEFAULT, scoped
from store.version_states import ensure_base
from tests.integration.conftest import Pawl
from tests.support.ledger.episodes import ingest
from tests.support.ledger.lineage import promote
from tests.support.records import call, reward

TENANTS = ("a", "b", DEFAULT)
POLICY = '[[policy]]\nname = "of-{0}"\nbase = "qwen"\ntenant = "{0}"\n'


@pytest.fixture
async def pawl(
    engine: AsyncEngine, pawl: Pawl, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Pawl:
    """Each tenant has a policy with a version 1, a key, and an evaluated episode `e`."""
    monkeypatch.setenv("PAWL_ADAPTER_DIR", str(tmp_path))
    async with engine.begin() as connection:
        for tenant in TENANTS:
            policy, key = f"of-{tenant}", scoped(tenant, "e")
            await ensure_base(connection, policy, tenant=tenant)
            update = await claims.begin_update(connection, policy, 0, {})
            folder = str(tmp_path / "gone" / tenant)
            await claims.record_update(
                connection, update, (), {}, policy=policy, version=1, adapter_path=folder
            )
            await promote(connection, policy, 1, reason="a test", actor="trainer")
            await create_key(connection, f"key-{tenant}", ("infer",), tenant=tenant)
            await ingest(connection, [call(key, policy=policy, split="eval")])
            await ingest(connection, [reward(1.0, episode=key)])
    (tmp_path / "p.toml").write_text("".join(map(POLICY.format, TENANTS)))
    return pawl


async def lines(pawl: Pawl, *arguments: str) -> list[dict[str, Any]]:
    done = await pawl(*arguments)
    assert done.exit_code in (0, 1), done.output
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("command", "field", "begins"),
    [
        (("policies", "list", "--json"), "name", "of-"),
        (("policies", "check", "--json"), "version", "of-"),
        (("keys", "list", "--json"), "name", "key-"),
    ],
)
async def test_option_tenant_limits_lists_to_that_tenant(
    pawl: Pawl, command: tuple[str, ...], field: str, begins: str
) -> None:
    whole = [line[field].partition("@")[0] for line in await lines(pawl, *command)]
    assert sorted(whole) == sorted(f"{begins}{tenant}" for tenant in TENANTS)
    for tenant in TENANTS:
        [line] = await lines(pawl, *command, "--tenant", tenant)
        assert line[field].partition("@")[0] == f"{begins}{tenant}"
    assert await lines(pawl, *command, "--tenant", "nobody") == []


async def test_other_tenants_policies_keys_and_updates_are_not_found(pawl: Pawl) -> None:
    for tenant in TENANTS:
        shown = await lines(pawl, "policies", "show", f"of-{tenant}", "--tenant", tenant, "--json")
        assert [line["version"] for line in shown] == [f"of-{tenant}@0", f"of-{tenant}@1"]
    for command, kind in (
        (("policies", "show", "of-b"), UnknownPolicy),
        (("policies", "export", "of-b", "out"), UnknownPolicy),
        (("keys", "revoke", "key-b"), UnknownKey),
        (("policies", "retrain", "of-b", "--from", "0"), UnknownPolicy),
        (("credit", "--update", "1", "--policy", "of-b"), UnknownUpdate),
    ):
        refused = (await pawl(*command, "--tenant", "a")).exception
        assert isinstance(refused, kind)
        assert "of-default" not in str(refused)
    assert {line["revoked_at"] for line in await lines(pawl, "keys", "list", "--json")} == {None}
    assert (await pawl("keys", "revoke", "key-b", "--tenant", "b")).exit_code == 0


@pytest.mark.parametrize("file", ["p.toml", None])
async def test_another_tenants_policy_is_not_imported(
    pawl: Pawl, file: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if file is not None:
        monkeypatch.setenv("PAWL_POLICIES", file)
    done = await pawl("policies", "import", "of-b", "sft", "--tenant", "a")
    assert done.exit_code == 2
    assert "no policy 'of-b' of tenant 'a'" in done.stderr
    assert "of-default" not in done.output


async def test_invalid_tenant_name_is_refused(pawl: Pawl) -> None:
    for command in (
        ("keys", "list"),
        ("export",),
        ("spool",),
        ("episodes", "delete", "e"),
    ):
        done = await pawl(*command, "--tenant", "a b")
        assert done.exit_code == 2
        assert "--tenant: 'a b' cannot be a tenant's name: write 1 to 64" in done.output
