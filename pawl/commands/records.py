"""Define `pawl spool` and `pawl migrate`, for records on disk and the database's schema."""

import asyncio
import json
import sys
from typing import Annotated

import typer

from pawl.commands.common import OfTenant
from pawl.settings import StackSettings, read_settings


def spool(
    replay: Annotated[
        bool, typer.Option("--replay", help="Try to store the dead letters again first.")
    ] = False,
    tenant: OfTenant = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Show the records that wait on disk, and the dead letters that could not be stored.

    With --tenant only dead letters of the tenant are shown and tried again; a segment holds records
    of all tenants. Reads PAWL_SPOOL_DIR; --replay also needs the database. Status 0 also if
    --replay could not store some letters: they stay on disk, and each is listed with the reason.
    """
    from pawl import spool as letters
    from pawl.stack.database import open_engine
    from proxy.redaction import open_redactor
    from proxy.settings import ProxySettings

    serving = read_settings(ProxySettings)
    folder = serving.spool_dir
    settings = read_settings(StackSettings)

    async def try_again() -> tuple[int, list[str]]:
        most_reply, redactor = serving.max_reply_mb * 2**20, open_redactor(serving)
        async with open_engine(settings) as engine:
            readers = serving.tool_results
            return await letters.replay(folder, engine, readers, most_reply, redactor, tenant)

    if replay:
        stored, refused = asyncio.run(try_again())
        print(f"{stored} dead letters stored, {len(refused)} refused again", file=sys.stderr)
        for why in refused:
            print(f"  {why}", file=sys.stderr)
    view = letters.look(folder, tenant)
    if as_json:
        print(json.dumps(letters.as_json(view)))
    else:
        print("\n".join(letters.as_lines(view)))


def migrate(
    revision: Annotated[
        str, typer.Argument(help="Revision of the schema to go to; `head` is the newest.")
    ] = "head",
    down: Annotated[
        bool, typer.Option("--down", help="Go down to an older revision; may lose data.")
    ] = False,
) -> None:
    """Upgrade the database's schema to a revision, or downgrade it with --down.

    Needs the database (DATABASE_URL, or the embedded one in PAWL_DATA_DIR). Proxy, trainer and
    `pawl export` upgrade the schema themselves when they start.
    """
    from store.schema.migrate import downgrade, upgrade

    settings = read_settings(StackSettings)

    async def run() -> None:
        from pawl.stack.database import open_database

        async with open_database(settings) as url:
            await (downgrade(url, revision) if down else upgrade(url, revision))

    asyncio.run(run())
