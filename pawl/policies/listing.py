"""List the policies: what each answers, what it is trained from, and how far it is."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from rich.table import Table
from rich.text import Text
from sqlalchemy.ext.asyncio import AsyncEngine

from pawl.commands.common import cell
from store.policy_table import PolicyTable
from store.ready import waiting_episodes
from store.records import Record
from store.tenants import DEFAULT
from store.version_queries import list_versions
from store.versions import PolicyVersion

# `unlisted`: it has versions, and the file of policies does not name it.
Kind = Literal["trained", "fixed", "unlisted"]
NUMBERS = ("versions", "waiting")


class PolicyLine(Record, frozen=True, kw_only=True):
    """Describe one policy, with the fields in the order in which they are written.

    It answers calls for one of `models`, and those for `base` by one of `agents`. `serving` is the
    version that has the traffic, `versions` are those with an adapter, and `waiting` are the
    episodes with a reward that it may claim. `explore` is there only if it explores, and `tenant`
    only if it is not the default one.
    """

    name: str
    kind: Kind
    base: str
    agents: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    recipe: str | None = None
    serving: str | None = None
    versions: int = 0
    waiting: int = 0
    explore: str | UnsetType = UNSET
    tenant: str | UnsetType = UNSET


async def policies_of(
    engine: AsyncEngine, table: PolicyTable | None, recipe: str, tenant: str | None = None
) -> list[PolicyLine]:
    """Return all policies: those of the file, in its order, and then those in the store alone.

    `recipe` is that of policies for which the file names none; with `tenant`, only policies of this
    tenant are returned.
    """
    async with engine.connect() as connection:
        versions = await list_versions(connection)
        waiting = await waiting_episodes(connection)
    stored: dict[str, list[PolicyVersion]] = {}
    for version in versions:
        stored.setdefault(version.name, []).append(version)
    lines = _said(table, recipe)
    in_file = {line.name for line in lines}
    lines += [_unsaid(own, table, recipe) for name, own in stored.items() if name not in in_file]
    chosen = [line for line in lines if tenant in (None, line.tenant or DEFAULT)]
    return [_with_versions(line, stored.get(line.name, ()), waiting) for line in chosen]


def _said(table: PolicyTable | None, recipe: str) -> list[PolicyLine]:
    """Return what the file says of its policies."""
    return [
        PolicyLine(
            name=spec.name,
            kind="trained" if spec.trained else "fixed",
            base=spec.base,
            agents=spec.agents,
            models=(spec.name, *(model for model in spec.models if model != spec.name)),
            recipe=(spec.recipe or recipe) if spec.trained else None,
            # Until a trainer has begun it, too.
            serving=f"{spec.name}@0" if spec.trained else None,
            explore=UNSET if spec.explore is None else str(spec.explore),
            tenant=UNSET if spec.tenant == DEFAULT else spec.tenant,
        )
        for spec in (() if table is None else table.specs)
    ]


def _unsaid(
    versions: Sequence[PolicyVersion], table: PolicyTable | None, recipe: str
) -> PolicyLine:
    """Return what the store says of a policy; without a file, each model name is one."""
    name, base = versions[0].name, versions[0].served_name
    tenant = UNSET if versions[0].tenant == DEFAULT else versions[0].tenant
    if table is not None:
        return PolicyLine(name=name, kind="unlisted", base=base, tenant=tenant)
    return PolicyLine(
        name=name, kind="trained", base=base, models=(name,), recipe=recipe, tenant=tenant
    )


def _with_versions(
    line: PolicyLine, own: Sequence[PolicyVersion], waiting: Mapping[str, int]
) -> PolicyLine:
    serving = next((f"{v.name}@{v.version}" for v in own if v.state == "serving"), line.serving)
    return msgspec.structs.replace(
        line,
        serving=None if line.kind == "fixed" else serving,
        versions=sum(version.version > 0 for version in own),
        waiting=waiting.get(line.name, 0),
    )


def table(lines: Sequence[PolicyLine]) -> Table:
    """Return the lines as a table for a terminal; `explore` and `tenant` only if any has it."""
    grid = Table(box=None, pad_edge=False)
    rows = [msgspec.structs.asdict(line) for line in lines]
    names = list(PolicyLine.__struct_fields__)
    for name in ("explore", "tenant"):
        if all(row[name] is UNSET for row in rows):
            names.remove(name)
    for name in names:
        grid.add_column(name, justify="right" if name in NUMBERS else "left", overflow="fold")
    for row in rows:
        grid.add_row(*[_shown(row[name]) for name in names])
    return grid


def _shown(value: Any) -> Text:
    if value is UNSET:
        return cell(None)
    return cell(", ".join(value) if isinstance(value, tuple) else value)
