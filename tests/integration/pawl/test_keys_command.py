"""`pawl keys`: the secret is shown once, and kept nowhere."""

import json

from rich.console import Console
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from pawl.commands.keys import keys_table
from store.errors import BadKey, UnknownKey
from store.grants import hash_of_key
from store.keys import key_ring, list_keys
from store.schema.tables import metadata
from tests.integration.conftest import Pawl


async def test_new_key_is_printed_once_and_only_its_hash_is_stored(
    pawl: Pawl, engine: AsyncEngine
) -> None:
    made = await pawl("keys", "create", "agent")
    assert made.exit_code == 0
    key = made.stdout.strip()
    assert made.stdout == f"{key}\n"
    assert key not in made.stderr
    assert "not shown again" in made.stderr
    async with engine.connect() as connection:
        [grant] = (await key_ring(connection)).grants
        assert grant.hash == hash_of_key(key.encode())
        assert grant.scopes == ("infer", "feedback")
        for name in metadata.tables:
            rows = await connection.execute(text(f"SELECT t::text FROM {name} t"))
            assert not any(key[22:] in row for row in rows.scalars())
    for shown in (await pawl("keys", "list"), await pawl("keys", "list", "--json")):
        assert key[22:] not in shown.output


async def test_json_output_of_keys_commands_has_each_api_keys_fields(pawl: Pawl) -> None:
    options = ("--scope", "read,infer", "--per-minute", "60", "--at-once", "8", "--json")
    made = json.loads((await pawl("keys", "create", "ci", *options)).stdout)
    assert list(made) == [
        *("id", "name", "tenant", "scopes", "per_minute", "at_once", "tokens_per_minute"),
        *("created_at", "revoked_at", "key"),
    ]
    assert (made["per_minute"], made["at_once"]) == (60, 8)
    assert (made["name"], made["scopes"], made["revoked_at"]) == ("ci", ["infer", "read"], None)
    revoked = json.loads((await pawl("keys", "revoke", "ci", "--json")).stdout)
    assert revoked["id"] == made["id"]
    assert revoked["revoked_at"] is not None
    lines = (await pawl("keys", "list", "--json")).stdout.splitlines()
    assert [json.loads(line) for line in lines] == [revoked]


async def test_api_key_name_is_free_again_once_the_key_is_revoked(
    pawl: Pawl, engine: AsyncEngine
) -> None:
    first = (await pawl("keys", "create", "agent")).stdout.strip()
    taken = await pawl("keys", "create", "agent")
    assert isinstance(taken.exception, BadKey)
    assert "revoke it first, or choose another name" in str(taken.exception)
    # By the id, which the key shows.
    assert (await pawl("keys", "revoke", first[5:21])).exit_code == 0
    second = (await pawl("keys", "create", "agent")).stdout.strip()
    assert second != first
    async with engine.connect() as connection:
        ring = await key_ring(connection)
        assert [one.hash for one in ring.grants] == [hash_of_key(second.encode())]
        for key in (first, second, "no key"):
            alone = await key_ring(connection, hash_of_key(key.encode()))
            is_valid = hash_of_key(key.encode()) in [one.hash for one in alone.grants]
            assert (alone.made, is_valid) == (True, key == second)
        console = Console(width=180)
        with console.capture() as shown:
            console.print(keys_table(await list_keys(connection)))
    head, *lines = shown.get().splitlines()
    assert head.split() == [
        *("id", "name", "tenant", "scopes", "per_minute", "at_once", "tokens_per_minute"),
        *("created_at", "revoked_at"),
    ]
    assert [line.split()[1:4] for line in lines] == [["agent", "default", "infer,feedback"]] * 2
    assert [line.count("UTC") for line in lines] == [2, 1]


async def test_invalid_key_name_or_scope_and_revoking_an_unknown_key_are_refused(
    pawl: Pawl, engine: AsyncEngine
) -> None:
    for arguments, kind in (
        (("create", "a b"), BadKey),
        (("create", "a", "--scope", "everything"), BadKey),
        (("revoke", "nobody"), UnknownKey),
    ):
        assert isinstance((await pawl("keys", *arguments)).exception, kind)
    async with engine.connect() as connection:
        assert not (await key_ring(connection)).made
