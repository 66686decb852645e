"""Make an adapter from elsewhere the next version of a policy.

See docs/decisions/049-files-kept-by-state.md.

An import is an update that trains nothing. It locks the policy, begins an update without episodes,
writes the files into a temporary folder and renames it, and records the version in one transaction.
Then it waits until the controller has published the version, like one that was trained. If it is
killed, the next trainer finishes or undoes it (`trainer.updates.recording`).
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Final

from sqlalchemy.ext.asyncio import AsyncEngine

from store import claims
from store.claims import IMPORTED_FROM
from store.policy_table import open_policies
from store.versions import PolicyVersion
from trainer.errors import PublishError
from trainer.learners.learner import Learner
from trainer.learners.protocol import LearnerProtocol
from trainer.policies import base_model, check_publishing, importing_policy, lock_policy
from trainer.publishing import adapters
from trainer.publishing.adapters import BASE_FILE, NewVersion, sha256_of
from trainer.publishing.foreign import (
    WEIGHTS,
    read_config,
    refusal,
    why_another_base,
    why_not_plain,
)
from trainer.publishing.model_server import Replicas
from trainer.publishing.sources import AdapterFiles, trainer_files
from trainer.recipes.recipe import Recipe, load_recipe
from trainer.settings import TrainerSettings
from trainer.updates.recording import KILLED, Recording, Recovery
from trainer.updates.training import Training
from trainer.updates.versions import (
    PUBLISHED_WITHIN_S,
    PolicyVersions,
    begin_policy,
    publishing_rule,
    warn_of_wait,
)

# Seconds between checks whether the controller has published the version.
POLL_S: Final = 0.2


async def import_adapter(
    settings: TrainerSettings, engine: AsyncEngine, name: str, directory: Path
) -> PolicyVersion:
    """Make the PEFT adapter in `directory` a policy's next version, and wait until it is published.

    Return the version. It is `serving`, or `loaded` if it waits for other policies' versions or for
    a decision, or still `written` if no controller published it within PUBLISHED_WITHIN_S seconds,
    or no model server answers: then a controller publishes it later.

    Raises:
        TrainerError: the adapter cannot be a version of the policy, or is not served correctly, or
            a trainer works on the policy; the message says what to do.
    """
    chosen = importing_policy(settings, open_policies(settings.policies), name)
    recipe = load_recipe(chosen.recipe)
    check_publishing(chosen, recipe)
    config = read_config(directory)
    _refuse_if(directory, why_not_plain(config, recipe.lora))
    replicas = Replicas(settings.server_urls, files=trainer_files(settings))
    async with engine.connect() as guard, replicas as servers:
        try:
            await lock_policy(guard, name, "import")
            model = await base_model(settings, chosen, name, servers)
            # If the adapter has a `BASE_FILE`, the learner compares the base models by hash.
            if not (directory / BASE_FILE).exists():
                _refuse_if(directory, why_another_base(config, model))
            learner = await asyncio.to_thread(
                Learner, model, recipe, settings.seed, settings.scratch
            )
            await asyncio.to_thread(learner.adopt, directory)
            await claims.check_connected(guard)
            await begin_policy(engine, name, chosen.base, settings.policies, chosen.tenant)
            imported = AdapterImport(
                settings, recipe, engine, learner, name, chosen.together, servers.files
            )
            number = await imported.write(directory)
            # Without a server it would wait in vain.
            return await imported.until_published(
                number, 0.0 if servers.are_all_away else PUBLISHED_WITHIN_S
            )
        finally:
            # Otherwise the pool would keep the connection, and with it the hold on the policy.
            await guard.invalidate()


class AdapterImport:
    """Write and record an adapter that a learner has adopted."""

    def __init__(
        self,
        settings: TrainerSettings,
        recipe: Recipe,
        engine: AsyncEngine,
        learner: LearnerProtocol,
        policy: str,
        together: Sequence[str] = (),
        files: AdapterFiles | None = None,
    ) -> None:
        """Connect the stages; `policy` is the name of the policy that gets the version.

        `together` are the policies that go live together, this one included (empty: none). `files`
        offers the version to other machines.
        """
        self._engine = engine
        self._recipe = recipe
        self._policy = policy
        self._folder = settings.adapter_dir
        self._versions = PolicyVersions(engine, self._folder, policy)
        self._training = Training(learner, self._folder, self._versions, files=files)
        rule = publishing_rule(recipe, policy, together)
        self._recording = Recording(engine, policy, rule)
        self._recovery = Recovery(self._recording, self._folder)

    async def write(self, directory: Path) -> int:
        """Write and record the adopted adapter as the next version, and return its number.

        `directory` is the adapter's original folder. An earlier import that was stopped is finished
        or undone first; if this one fails, it is finished or undone, too.

        Raises:
            AdapterError: the serving version has the same weights.
        """
        await self._recovery.finish(KILLED)
        adapters.remove_half_written(self._folder, self._policy)
        await self._refuse_serving_weights(directory)
        probe = await self._training.probe()
        number = await self._versions.next_number()
        recipe = self._recipe.model_dump(mode="json")
        async with self._engine.begin() as connection:
            # The parent is the base model, and there are no episodes.
            update_id = await claims.begin_update(connection, self._policy, 0, recipe)
        new = NewVersion(
            policy=self._policy,
            version=number,
            update_id=update_id,
            parent_version=0,
            outcomes=(),
            metrics={IMPORTED_FROM: str(directory.resolve())},
            probe=probe,
        )
        try:
            folder = await self._training.write(new)
            await self._recording.record_imported_version(new, folder)
        except (Exception, asyncio.CancelledError):
            await self._recovery.finish_if_possible("the import was stopped")
            raise
        return new.version

    async def _refuse_serving_weights(self, directory: Path) -> None:
        """Refuse the weights of the serving version: a probe could not tell the two apart."""
        serving = await self._versions.serving()
        folder = self._versions.folder(serving.version)
        manifest = None if folder is None else adapters.read_manifest(folder)
        if manifest is not None and manifest.sha256[WEIGHTS] == sha256_of(directory / WEIGHTS):
            _refuse_if(
                directory,
                f"{serving.served_name} already serves these weights: nothing to import",
            )

    async def until_published(
        self, number: int, within_s: float = PUBLISHED_WITHIN_S
    ) -> PolicyVersion:
        """Return version `number` once the controller has loaded it, or after `within_s` seconds.

        Raises:
            PublishError: the controller rejected it.
        """
        give_up_at = perf_counter() + within_s
        version = await self._versions.numbered(number)
        while version.state == "written" and perf_counter() < give_up_at:
            await asyncio.sleep(POLL_S)
            version = await self._versions.numbered(number)
        if version.state == "written":
            warn_of_wait(version)
        if version.state == "rejected":
            why = await self._versions.newest_reason(number)
            raise PublishError(
                f"{version.served_name} was rejected, and the earlier version keeps the"
                f" traffic: {why}"
            )
        return version


def _refuse_if(directory: Path, why: str | None) -> None:
    if why is not None:
        raise refusal(directory, why)
