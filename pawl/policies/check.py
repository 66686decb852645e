"""Check that the versions in the database and the files in the folder of adapters fit together."""

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table
from sqlalchemy.ext.asyncio import AsyncEngine

from pawl.commands.common import cell
from store.records import Record
from store.version_queries import versions_with_files
from store.versions import PolicyState, PolicyVersion
from trainer.errors import FileMissing, FilesUnread
from trainer.publishing.adapters import MANIFEST, reading, why_altered


class Fault(Record, frozen=True, kw_only=True):
    """Describe a version whose files should be there, and what is wrong with them."""

    version: str
    state: PolicyState
    folder: str
    problem: str


async def faults(engine: AsyncEngine, tenant: str | None = None) -> list[Fault]:
    """Return the versions of every policy, or a tenant's, that lack files or have altered ones.

    Files that cannot be read are told of, too.

    Versions whose files were deleted, as nothing could ask for them any more, lack nothing.
    """
    async with engine.connect() as connection:
        versions = await versions_with_files(connection)
    problems = [(one, _problem(one)) for one in versions if _is_looked_at(one, tenant)]
    return [
        Fault(
            version=version.served_name,
            state=version.state,
            folder=version.adapter_path or "",
            problem=problem,
        )
        for version, problem in problems
        if problem is not None
    ]


def _is_looked_at(version: PolicyVersion, tenant: str | None) -> bool:
    return version.adapter_path is not None and tenant in (None, version.tenant)


def _problem(version: PolicyVersion) -> str | None:
    manifest = Path(version.adapter_path or "") / MANIFEST
    try:
        with reading(manifest):
            manifest.stat()
        return why_altered(version)
    except FileMissing:
        return "its files are not there; restore the folder of adapters from the same backup"
    except FilesUnread as error:
        return str(error)


def table(lines: Sequence[Fault]) -> Table:
    """Return the lines as a table for a terminal."""
    grid = Table(box=None, pad_edge=False)
    for name in ("version", "state", "problem"):
        grid.add_column(name, no_wrap=name != "problem")
    for line in lines:
        grid.add_row(*map(cell, (line.version, line.state, f"{line.folder}: {line.problem}")))
    return grid
