"""Define `pawl policies …`: list policies, show versions, import and export adapters."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pawl.commands.common import AsJson, OfTenant, fail, require_torch
from pawl.commands.moving import freeze, promote, retrain, rollback
from pawl.processes import large_imports
from pawl.settings import StackSettings, read_settings

if TYPE_CHECKING:
    from store.versions import PolicyVersion
    from trainer.settings import TrainerSettings

app = typer.Typer(
    no_args_is_help=True,
    help="Show policies and versions; export, import, promote, roll back or retrain them.",
)

PolicyName = Annotated[str, typer.Argument(help="Name of the policy.", show_default=False)]
for verb in (promote, rollback, retrain, freeze):
    app.command()(verb)


@app.command("list")
def list_policies(tenant: OfTenant = None, as_json: AsJson = False) -> None:
    """List the policies: what each answers, its recipe, and the version that serves.

    They are those of PAWL_POLICIES, and those that have versions in the database (DATABASE_URL,
    or the embedded one in PAWL_DATA_DIR); nothing is changed in it. A policy is `trained`,
    `fixed`, or `unlisted`: it has versions, and the file does not name it. `waiting` are the
    episodes with a reward that the policy may claim; `explore` says in which share of its episodes
    calls are explored, and how.

    Status 2: PAWL_POLICIES cannot be used.
    """
    from pawl.commands.common import write_lines
    from pawl.policies.listing import policies_of, table
    from store.policy_table import open_policies
    from trainer.settings import TrainerSettings

    settings = read_settings(TrainerSettings)
    policies = open_policies(settings.policies)

    async def look() -> None:
        from pawl.database import open_engine

        async with open_engine(settings) as engine:
            lines = await policies_of(engine, policies, settings.recipe, tenant)
        write_lines(lines, table, as_json=as_json)

    asyncio.run(look())


@app.command()
def show(
    name: PolicyName,
    events: Annotated[
        bool, typer.Option("--events", help="Show how the versions got their states, and why.")
    ] = False,
    tenant: OfTenant = None,
    as_json: AsJson = False,
) -> None:
    """Show a policy's versions: their states, and the rewards of their evaluation.

    Needs the database (DATABASE_URL, or the embedded one in PAWL_DATA_DIR); nothing is changed
    in it. `mean` is the mean reward of the version's episodes of the `eval` split; `low` and
    `high` are its 95 % interval: Wilson's where all rewards are 0 or 1, else Student's. If
    PAWL_POLICIES says that the policy explores, so does the line of the version that serves. That
    of a version which is tried says what a gate would decide about it by now. If live rewards
    cannot roll back the version that serves, its line says why, and what to set.

    With --events it shows the newest changes of their states instead: each with its reason, who
    made it, and, as JSON, the evidence that it rests on.

    Status 2: there is no such policy, or PAWL_POLICIES cannot be used.
    """
    from pawl.commands.common import write_lines
    from pawl.policies.events import events_of, events_table
    from pawl.policies.show import table, versions_of
    from store.policy_table import open_policies
    from trainer.settings import TrainerSettings

    settings = read_settings(TrainerSettings)
    policies = open_policies(settings.policies)

    async def look() -> None:
        from pawl.database import open_engine

        async with open_engine(settings) as engine:
            if events:
                changes = await events_of(engine, name, tenant)
                write_lines(changes, events_table, as_json=as_json)
            else:
                lines = await versions_of(engine, name, policies, tenant)
                write_lines(lines, table, as_json=as_json)

    asyncio.run(look())


@app.command()
def check(tenant: OfTenant = None, as_json: AsJson = False) -> None:
    """Check that each version has the files that it should have, unchanged: after a restore.

    Needs the database (DATABASE_URL, or the embedded one in PAWL_DATA_DIR) and the files in
    PAWL_ADAPTER_DIR; neither is changed. A line is written for each version whose files are
    missing or are not those that were written. Versions whose files were deleted, because nothing
    could ask for them any more, lack nothing.

    Status 1: some versions lack files.
    """
    from pawl.commands.common import write_lines
    from pawl.policies.check import faults, table

    async def look() -> bool:
        from pawl.database import open_engine

        async with open_engine(read_settings(StackSettings)) as engine:
            lines = await faults(engine, tenant)
        if lines:
            write_lines(lines, table, as_json=as_json)
        return bool(lines)

    if asyncio.run(look()):
        raise SystemExit(1)


@app.command("export")
def export_version(
    name: PolicyName,
    directory: Annotated[
        Path, typer.Argument(help="Folder to write; new or empty.", show_default=False)
    ],
    version: Annotated[
        int | None,
        typer.Option(min=0, help="Number of the version; default: the one that serves."),
    ] = None,
    tenant: OfTenant = None,
) -> None:
    """Copy a version's adapter into a folder that PEFT and vLLM load.

    Needs the database (DATABASE_URL, or the embedded one in PAWL_DATA_DIR) and the files in
    PAWL_ADAPTER_DIR; neither is changed. The folder has `base.json`, too, by which an import
    elsewhere knows the base model.

    Status 2: there is no such policy or version, its files are damaged, or the folder cannot be
    written.
    """
    from pawl.policies.lookup import chosen_version, policy_versions
    from trainer.errors import TrainerError
    from trainer.publishing.adapters import export_adapter

    async def look() -> "PolicyVersion":
        from pawl.database import open_engine

        async with open_engine(read_settings(StackSettings)) as engine, engine.connect() as one:
            return chosen_version(await policy_versions(one, name, tenant), version)

    chosen = asyncio.run(look())
    try:
        export_adapter(Path(chosen.adapter_path or ""), directory)
    except TrainerError as error:
        fail(str(error))
    print(f"{chosen.served_name} is in {directory}")


@app.command("import")
def import_version(
    name: PolicyName,
    directory: Annotated[
        Path, typer.Argument(help="Folder that PEFT saved the adapter in.", show_default=False)
    ],
    tenant: OfTenant = None,
) -> None:
    """Make a LoRA adapter from elsewhere the next version of a policy, and serve it.

    Run it where the policy's trainer runs, with the trainer's settings, while that is stopped.
    The adapter must be plain LoRA of the policy's base model, of layers that the recipe trains
    and not above its rank. It is probed as a trained version is before it serves; training goes
    on from it, with a new optimiser state. If the model server is away, the trainer publishes
    the version when it starts. A version of a policy with publish_with waits for the others.

    Status 2: the adapter cannot be a version, or was rejected, or a trainer works on the policy;
    nothing changes for any request then.
    """
    from store.policy_table import open_policies
    from trainer.errors import TrainerError
    from trainer.policies import importing_policy
    from trainer.publishing.foreign import read_config
    from trainer.settings import TrainerSettings

    settings = read_settings(TrainerSettings)
    try:
        # Importing torch takes seconds: report a mistyped name or folder before that.
        importing_policy(settings, open_policies(settings.policies), name, tenant)
        read_config(directory)
        with large_imports():
            require_torch()
            import trainer.importing  # noqa: F401

        version = asyncio.run(_import(settings, name, directory))
    except TrainerError as error:
        fail(str(error))
    if version.state == "serving":
        print(f"{version.served_name} serves")
    elif version.state == "ready":
        print(f"{version.served_name} goes live with the next versions of the policies it is with")
    elif version.state == "candidate":
        print(f"{version.served_name} waits to be tried on a share of the new episodes")
    else:
        print(f"{version.served_name} is {version.state}: its trainer publishes it when it starts")


async def _import(settings: "TrainerSettings", name: str, directory: Path) -> "PolicyVersion":
    from pawl.database import open_engine
    from trainer.importing import import_adapter

    async with open_engine(settings) as engine:
        return await import_adapter(settings, engine, name, directory)
