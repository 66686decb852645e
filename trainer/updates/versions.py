"""Look up the versions of the policy in training: in the store, and in the adapter folder."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Final

import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from store import claims, version_queries, version_states
from store.link.claimable import set_reward_rule
from store.tenants import DEFAULT
from store.version_queries import deleted_versions
from store.version_states import rejudge_versions
from store.versions import PolicyVersion
from trainer.errors import TrainerError
from trainer.publishing import adapters
from trainer.recipes.recipe import Recipe

log = structlog.get_logger()

# Seconds after which a version that the controller has not published is reported.
PUBLISHED_WITHIN_S: Final = 60.0


def warn_of_wait(version: PolicyVersion) -> None:
    """Log that a version still waits for the controller, with the remedy."""
    log.warning(
        "version_waits_for_controller",
        version=version.served_name,
        remedy="it serves, and the next update is made, once the controller has loaded it: start"
        " `pawl controller`, or read in its log why the version waits",
    )


async def begin_policy(
    engine: AsyncEngine, policy: str, base: str | None, file: Path | None, tenant: str = DEFAULT
) -> None:
    """Add the base model as the policy's version 0, unless it has begun already.

    `base` (None: unknown) and `tenant` are the base model's name and the policy's tenant, as stated
    in `file`, the file of policies, if there is one.

    Raises:
        TrainerError: the policy began with another base model, or is another tenant's.
    """
    async with engine.begin() as connection:
        others = sorted(await version_queries.tenants_of_policy(connection, policy) - {tenant})
        if others:
            raise TrainerError(
                f"{file or 'PAWL_POLICIES is not set'}: policy {policy!r}: tenant: it is"
                f" {tenant!r}, but the policy's records and versions are of tenant {others[0]!r},"
                " and stay so: write that tenant, or give the policy another name"
            )
        recorded_base = await version_states.ensure_base(connection, policy, base, tenant)
    if base is not None and recorded_base != base:
        raise TrainerError(
            f"{file}: policy {policy!r}: base: it is {base!r}, but the policy's"
            f" versions are adapters of {recorded_base!r}: write that base, or give the policy"
            " another name"
        )


def publishing_rule(recipe: Recipe, policy: str, together: Sequence[str]) -> dict[str, Any]:
    """Return the rule that says how a version is published and judged, JSON-ready.

    `together` are the policies that go live together, this one included (empty: it goes alone).
    """
    return {**recipe.judged_by, "publish_with": list(together) or [policy]}


async def apply_rules(
    engine: AsyncEngine, policy: str, recipe: Recipe, together: Sequence[str] = ()
) -> None:
    """Apply a recipe that may have changed to what a policy has already.

    Past and future feedback is scored by the recipe's sum of metrics. If the sum has changed,
    running comparisons of versions start again with the new sum. Versions that are still to be
    published follow the recipe, too, and those that wait go live with the policies `together`.
    """
    rule = recipe.reward_rule
    units = {key: recipe.judged_by[key] for key in ("reward", "reward_range", "margin")}
    async with engine.begin() as connection:
        await version_states.renew_rules(
            connection, policy, publishing_rule(recipe, policy, together)
        )
    async with engine.begin() as connection:
        changed = await set_reward_rule(connection, policy, rule)
        if changed:
            await rejudge_versions(connection, policy, units, actor="trainer")
    if changed:
        metrics = [term.metric for term in rule.terms]
        log.warning("reward_rule_changed", policy=policy, metrics=metrics)


class PolicyVersions:
    """Look up and number the versions of one policy."""

    def __init__(self, engine: AsyncEngine, adapter_dir: Path, policy: str) -> None:
        self._engine = engine
        self._adapter_dir = adapter_dir
        self._policy = policy

    async def serving(self) -> PolicyVersion:
        """Return the version that has the traffic."""
        return next(v for v in await self._live() if v.state == "serving")

    async def head(self) -> PolicyVersion:
        """Return the version that the next update starts from: the newest that may still serve.

        Rejected, retired, rolled-back and ended versions are passed over; version 0 never is.
        """
        async with self._engine.connect() as connection:
            return await version_queries.version_to_train_from(connection, self._policy)

    async def written(self) -> list[PolicyVersion]:
        """Return the versions in the state `written`, which no server has loaded, oldest first."""
        return [v for v in await self._live() if v.state == "written"]

    async def newest_reason(self, number: int) -> str:
        """Return the reason of the version's newest event."""
        async with self._engine.connect() as connection:
            events = await version_queries.list_events(connection, self._policy, number, most=1)
        return events[0].reason

    async def waits_to_go_live(self) -> bool:
        """Return whether a loaded version waits to go live with other policies' versions."""
        return any(v.state == "loaded" for v in await self._live())

    async def is_held(self) -> bool:
        """Return whether training is suspended because rewards fell."""
        async with self._engine.connect() as connection:
            return await version_queries.why_held(connection, self._policy) is not None

    async def numbered(self, number: int) -> PolicyVersion:
        """Return the recorded version with this number."""
        async with self._engine.connect() as connection:
            version = await version_queries.numbered_version(connection, self._policy, number)
        assert version is not None
        return version

    async def next_number(self) -> int:
        """Return the next unused version number."""
        async with self._engine.connect() as connection:
            free = await claims.next_version(connection, self._policy)
        # A trainer that lost its claim may have written a version folder that nobody recorded.
        written = adapters.version_folders(self._adapter_dir, self._policy)
        return max([free, *(number + 1 for number, _ in written)])

    async def deleted(self, asked: Collection[int]) -> set[int]:
        """Return the versions among `asked` whose files were deleted."""
        async with self._engine.connect() as connection:
            return await deleted_versions(connection, self._policy, asked)

    def folder(self, version: int) -> Path | None:
        """Return the folder of a version's files, or None for version 0, the base model."""
        if not version:
            return None
        return adapters.version_folder(self._adapter_dir, self._policy, version)

    async def _live(self) -> list[PolicyVersion]:
        # Called once a second, so it does not read all versions that ever existed.
        async with self._engine.connect() as connection:
            return await version_queries.list_live(connection, self._policy)
