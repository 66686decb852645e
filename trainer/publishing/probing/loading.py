"""Load a version that was probed before, and check that the server serves it as it was trained.

A server that was restarted may be another one: with another base model under the same name, another
dtype, or an adapter that it lists and does not apply. The files are then whole, and what it says is
not the version's.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import structlog

from store.versions import PolicyVersion
from trainer.errors import Misserved, PublishError, UpstreamAway
from trainer.publishing.adapters import probe_of
from trainer.publishing.altered import check_files
from trainer.publishing.probing.probe import ProbeRow, compare, rejection_reason
from trainer.publishing.server import ModelServer
from trainer.recipes.adapter import PublishOptions

log = structlog.get_logger()

# A version that was just within the tolerance as it was published is so with other rounding as
# well; another base model is far from it.
AGAIN: Final = 2.0


async def load_again(server: ModelServer, version: PolicyVersion) -> None:
    """Check a version's files, load it, and check what is served; what is not right is unloaded.

    Raises:
        FilesAltered: the files are not those that were written; it is not loaded.
        FilesUnread: they cannot be read for now; it is not loaded.
        PublishError: the server refuses it.
        Misserved: the server serves it otherwise than it was trained.
        UpstreamAway: the server does not answer.
    """
    await check_files(version)
    await server.load(version.served_name, Path(version.adapter_path or ""))
    await check_served(server, version)


async def check_served(server: ModelServer, version: PolicyVersion) -> None:
    """Check that a server that has a version loaded serves it as it was trained; else unload it.

    Unloaded is also what could not be compared: nobody would know that it was not.

    Raises:
        Misserved: it serves it otherwise, or refuses to say.
        FilesUnread: the manifest cannot be read for now.
        UpstreamAway: it does not answer.
    """
    rows = await asyncio.to_thread(probe_of, Path(version.adapter_path or ""))
    if not rows:
        return
    try:
        why = await _why_misserved(server, version, rows)
    except PublishError as error:
        why = str(error)
    except UpstreamAway:
        await _unload(server, version.served_name)
        raise
    if why is not None:
        await _unload(server, version.served_name)
        raise Misserved(f"{version.served_name} is not served by {server.url}: {why}")


async def _why_misserved(
    server: ModelServer, version: PolicyVersion, rows: Sequence[ProbeRow]
) -> str | None:
    base = await server.base_of(version.served_name)
    served, other = await asyncio.gather(
        served_logprobs(server, version.served_name, rows), served_logprobs(server, base, rows)
    )
    tolerance = version.probe_tolerance or PublishOptions().tolerance
    result = compare(served, [row.logprobs for row in rows], other)
    return rejection_reason(result, AGAIN * tolerance)


async def served_logprobs(
    server: ModelServer, name: str, rows: Sequence[ProbeRow]
) -> list[list[float]]:
    """Return what a server says of the rows' last tokens under a name, one row after the other.

    Raises:
        PublishError: it refuses to.
        UpstreamAway: it does not answer.
    """
    return [await server.last_logprobs(name, row.ids, len(row.logprobs)) for row in rows]


async def _unload(server: ModelServer, name: str) -> None:
    """Take a version from a server; what refuses is asked again at a later look."""
    try:
        await server.unload(name)
    except (PublishError, UpstreamAway) as error:
        log.error("version_not_unloaded", version=name, replica=server.url, reason=str(error))
