"""`pawl policies check`, `export` and `import`: the files of versions."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from sqlalchemy.ext.asyncio import AsyncEngine

from pawl.commands.common import (
    AsJson,
    OfTenant,
    PolicyName,
    fail,
    in_transaction,
    make_table,
    require_torch,
    run_with_engine,
    write_lines,
)
from pawl.operator_moves import chosen_version, policy_versions
from pawl.processes import large_imports
from pawl.settings import read_settings
from store.policy_table import open_policies
from store.records import Record
from store.version_queries import versions_with_files
from store.versions import PolicyState, PolicyVersion
from trainer.errors import FileMissing, FilesUnread, TrainerError
from trainer.policies import importing_policy
from trainer.publishing.adapters import (
    MANIFEST,
    copy_adapter,
    export_adapter,
    translate_errors,
    why_altered,
)
from trainer.publishing.foreign import read_config
from trainer.settings import TrainerSettings


def check(tenant: OfTenant = None, as_json: AsJson = False) -> None:
    """Check that each version has the files that it should have, unchanged: after a restore.

    Needs the database (DATABASE_URL, or the embedded one in PAWL_DATA_DIR) and the files in
    PAWL_ADAPTER_DIR; neither is changed. A line is written for each version whose files are
    missing or are not those that were written. Versions whose files Pawl deleted, because no
    request could use them any more, are not listed.

    Status 1: some versions lack files.
    """
    lines = run_with_engine(lambda engine: find_faults(engine, tenant))
    if lines:
        write_lines(lines, faults_table, as_json=as_json)
        raise SystemExit(1)


def export_version(
    name: PolicyName,
    directory: Annotated[
        Path, typer.Argument(help="Folder to write; new or empty.", show_default=False)
    ],
    version: Annotated[
        int | None,
        typer.Option(min=0, help="Number of the version; default: the one that serves."),
    ] = None,
    merged: Annotated[
        bool,
        typer.Option(
            "--merged", help="Write whole weights instead: the base model with the adapter in it."
        ),
    ] = False,
    tenant: OfTenant = None,
) -> None:
    """Copy a version's adapter into a folder that PEFT and vLLM load.

    Needs the database (DATABASE_URL, or the embedded one in PAWL_DATA_DIR) and the files in
    PAWL_ADAPTER_DIR; neither is changed. The folder has `base.json`, too, by which an import
    elsewhere knows the base model.

    With --merged the folder is a model that is served without LoRA: weights and tokenizer. The base
    model is PAWL_MODEL, or the one that the version's trainer loaded; memory must hold one copy.

    Status 2: there is no such policy or version, its files are damaged, the base model is another
    or cannot be loaded, or the folder cannot be written.
    """
    settings = read_settings(TrainerSettings)
    versions = in_transaction(lambda connection: policy_versions(connection, name, tenant))
    chosen = chosen_version(versions, version)
    write = partial(_write_merged, settings.model) if merged else copy_adapter
    try:
        export_adapter(Path(chosen.adapter_path or ""), directory, write)
    except TrainerError as error:
        fail(str(error))
    print(f"{chosen.served_name} is in {directory}")


def _write_merged(model: str | None, version: Path, folder: Path) -> None:
    """Write the weights of `model` with the version merged in; None: the version's base model."""
    model = model or str(read_config(version)["base_model_name_or_path"])
    with large_imports():
        require_torch()
        from trainer.learners.model import save_merged
    save_merged(model, version, folder)


def import_version(
    name: PolicyName,
    directory: Annotated[
        Path, typer.Argument(help="Folder that PEFT saved the adapter in.", show_default=False)
    ],
    tenant: OfTenant = None,
) -> None:
    """Make a LoRA adapter from elsewhere the next version of a policy, and serve it.

    Run it where the policy's trainer runs, with the trainer's settings, while the trainer is
    stopped. The adapter must be plain LoRA of the policy's base model, of layers that the recipe
    trains and not above its rank. It is probed as a trained version is before it serves; training
    goes on from it, with a new optimiser state. If model server or controller is away, it is
    published once both are back. If the policy has publish_with in PAWL_POLICIES, the version waits
    for new versions of the other policies.

    Status 2: the adapter cannot be a version, or was rejected, or a trainer works on the policy;
    nothing changes for any request then.
    """
    settings = read_settings(TrainerSettings)
    try:
        # Importing torch takes seconds: report a mistyped name or folder before that.
        importing_policy(settings, open_policies(settings.policies), name, tenant)
        read_config(directory)
        with large_imports():
            require_torch()
            from trainer.importing import import_adapter

        version = run_with_engine(lambda engine: import_adapter(settings, engine, name, directory))
    except TrainerError as error:
        fail(str(error))
    if version.state == "serving":
        print(f"{version.served_name} serves")
    elif version.state == "loaded":
        print(f"{version.served_name} is loaded, and waits to get the traffic")
    else:
        waits = "a controller publishes it once a model server answers"
        print(f"{version.served_name} is {version.state}: {waits}")


class Fault(Record, frozen=True, kw_only=True):
    """A version whose files are missing, altered or unreadable."""

    version: str
    state: PolicyState
    folder: str
    problem: str


async def find_faults(engine: AsyncEngine, tenant: str | None = None) -> list[Fault]:
    """Return versions with missing, altered or unread files; with `tenant`, only that tenant's.

    Versions whose files Pawl deleted, as no request could use them any more, are no faults.
    """
    async with engine.connect() as connection:
        versions = await versions_with_files(connection)
    return [
        Fault(
            version=version.served_name,
            state=version.state,
            folder=version.adapter_path or "",
            problem=problem,
        )
        for version in versions
        if version.adapter_path is not None and tenant in (None, version.tenant)
        if (problem := _file_problem(version)) is not None
    ]


def _file_problem(version: PolicyVersion) -> str | None:
    manifest = Path(version.adapter_path or "") / MANIFEST
    try:
        with translate_errors(manifest):
            manifest.stat()
        return why_altered(version)
    except FileMissing:
        return "its files are not there; restore the folder of adapters from the same backup"
    except FilesUnread as error:
        return str(error)


def faults_table(lines: Sequence[Fault]) -> Table:
    rows = [(line.version, line.state, f"{line.folder}: {line.problem}") for line in lines]
    return make_table(("version", "state", "problem"), rows, whole=("version", "state"))
