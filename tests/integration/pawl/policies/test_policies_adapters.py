"""`pawl policies import` and `export`: an adapter comes in as version 1, and goes out again."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from click.testing import Result
from sqlalchemy.ext.asyncio import AsyncEngine

from store.errors import UnknownPolicy
from store.version_queries import list_versions, mark_files_deleted
from store.version_states import ensure_base, mark_unloaded
from tests.integration.conftest import Pawl
from tests.support.controller.publishing import publishing_beside
from tests.support.ledger.lineage import set_state
from tests.support.servers.computing_server import computing_server
from tests.support.training import write_adapter

FILE = '[[policy]]\nname = "writer"\nbase = "qwen"\n'
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
async def run(
    pawl: Pawl,
    engine: AsyncEngine,
    tiny_model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Pawl]:
    """`pawl policies` with the settings of a trainer of `writer`, in a folder with an adapter."""
    (tmp_path / "p.toml").write_text(FILE)
    write_adapter(tiny_model, tmp_path / "sft")
    async with computing_server("qwen", tiny_model) as url:
        monkeypatch.setenv("PAWL_UPSTREAM_URL", url)
        monkeypatch.setenv("PAWL_POLICIES", "p.toml")
        monkeypatch.setenv("PAWL_ADAPTER_DIR", "adapters")

        async def invoke(*arguments: str) -> Result:
            return await pawl("policies", *arguments)

        async with publishing_beside(engine, [url]):
            yield invoke


async def test_import_waits_for_a_decision_in_canary_mode(
    run: Pawl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tried.toml").write_text('[publish]\nmode = "canary"\n')
    monkeypatch.setenv("PAWL_RECIPE", str(tmp_path / "tried.toml"))
    imported = await run("import", "writer", "sft")
    assert imported.exit_code == 0
    assert imported.stdout.endswith("writer@1 is loaded, and waits to get the traffic\n")


async def test_import_is_version_1_and_export_has_the_same_weights(
    run: Pawl, tmp_path: Path
) -> None:
    imported = await run("import", "writer", "sft")
    assert imported.exit_code == 0
    assert imported.stdout.endswith("writer@1 serves\n")
    exported = await run("export", "writer", "out")
    assert (exported.exit_code, exported.stdout) == (0, "writer@1 is in out\n")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        *("adapter_config.json", WEIGHTS, "base.json")
    ]
    version = tmp_path / "adapters/writer/1" / WEIGHTS
    assert (tmp_path / "out" / WEIGHTS).read_bytes() == version.read_bytes()
    again = await run("export", "writer", "out", "--version", "1")
    assert again.exit_code == 2
    assert "pawl: out exists already and is not empty: name a new folder" in again.stderr
    merged = await run("export", "writer", "whole", "--merged")
    assert (merged.exit_code, merged.stdout) == (0, "writer@1 is in whole\n")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in (tmp_path / "whole").iterdir()
    }


async def test_adapter_is_imported_for_the_named_tenant(
    run: Pawl, engine: AsyncEngine, tmp_path: Path
) -> None:
    (tmp_path / "p.toml").write_text(FILE + 'tenant = "team-a"\n')
    imported = await run("import", "writer", "sft", "--tenant", "team-a")
    assert imported.exit_code == 0
    async with engine.connect() as connection:
        versions = await list_versions(connection)
    assert {(one.served_name, one.tenant) for one in versions} == {
        ("qwen", "team-a"),
        ("writer@1", "team-a"),
    }


async def test_export_of_a_missing_policy_or_version_is_refused_with_the_known_names(
    run: Pawl, engine: AsyncEngine
) -> None:
    async with engine.begin() as connection:
        await ensure_base(connection, "writer", "qwen")
    unknown = await run("export", "reader", "out")
    assert isinstance(unknown.exception, UnknownPolicy)
    assert str(unknown.exception) == "there is no policy 'reader' (known: writer)"
    base = await run("export", "writer", "out")
    assert "writer@0 is the base model, which has no adapter" in str(base.exception)
    assert "(there are: none yet)" in str(base.exception)
    await run("import", "writer", "sft")
    other = await run("export", "writer", "out", "--version", "7")
    assert str(other.exception) == "policy 'writer' has no version 7 (with an adapter: 1)"


async def test_version_with_deleted_files_is_not_exported(run: Pawl, engine: AsyncEngine) -> None:
    await run("import", "writer", "sft")
    async with engine.begin() as connection:
        await set_state(connection, "writer", 1, "rolled_back")
        await mark_unloaded(connection, "writer", [1], "idle", "trainer")
        await mark_files_deleted(connection, "writer", [1])
    gone = await run("export", "writer", "out", "--version", "1")
    assert str(gone.exception) == (
        "the files of writer@1 were deleted, as the version was rolled_back and was not needed"
        " any more (versions with files: none)"
    )
    shown = await run("show", "writer")
    lines = [json.loads(line) for line in shown.stdout.splitlines()]
    assert [line["files_deleted"] for line in lines] == [False, True]


async def test_refused_import_says_why_and_exits_with_status_2(run: Pawl) -> None:
    unknown = await run("import", "reader", "sft")
    assert unknown.exit_code == 2
    assert "pawl: p.toml has no policy 'reader' with trained = true" in unknown.stderr
    missing = await run("import", "writer", "nothing")
    assert missing.exit_code == 2
    assert "pawl: nothing is no PEFT adapter: it has no adapter_config.json" in missing.stderr
