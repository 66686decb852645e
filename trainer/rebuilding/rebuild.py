"""Train a policy's line again without some episodes, and put it in the place of the old one.

The new line is a function of the ledger: the past updates' claims without what is left out, each
with the recipe of its time (docs/decisions/079-rebuilding.md). So a rebuild that was stopped needs
no state of its own: begun again, it finds how far it was.
"""

from collections import Counter
from collections.abc import Callable

import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from store.errors import Damaged
from store.policy_table import open_policies
from store.rebuilding import placing
from store.rebuilding.choosing import Query
from store.rebuilding.leaving import leave_out
from store.rebuilding.line import Done, Item, PastRow
from store.rebuilding.outlook import Outlook, outlook
from store.rebuilding.reading import baselines_after
from store.records import Record
from store.versions import SERVABLE, PolicyVersion
from trainer.chosen import check_gate, importing_policy
from trainer.errors import AdapterError, FilesUnread, PublishError, TrainerError, UpstreamAway
from trainer.learners.protocol import LearnerProtocol
from trainer.policy_lock import base_model, lock_policy
from trainer.publishing import adapters
from trainer.publishing.foreign import WEIGHTS
from trainer.publishing.model_server import Replicas
from trainer.publishing.publisher import Publisher
from trainer.rebuilding.again import Again, Place
from trainer.rebuilding.loading import Learners
from trainer.rebuilding.resuming import furthest, needed
from trainer.recipes.recipe import Recipe, load_recipe
from trainer.settings import TrainerSettings
from trainer.updates.recording import Recording
from trainer.updates.recovery import Recovery
from trainer.updates.versions import Versions

log = structlog.get_logger()

# Is told how many of how many updates are done, each time that one is.
Tell = Callable[[int, int], None]


class Wish(Record, frozen=True, kw_only=True):
    """Say what a rebuild leaves out.

    That is what the queries select and, with `leave_missing`, what cannot be read any more.
    """

    queries: tuple[Query, ...]
    leave_missing: bool = False


class Result(Record, frozen=True, kw_only=True):
    """Say what a rebuild came to.

    Attributes:
        version: the version that the new line has come to.
        left_out: how many episodes of the line were left out.
        waiting: how many that waited were consumed.
        updates: how many updates were done again, now or before the rebuild was stopped.
        retired: the versions that were retired for it.
        differs: past versions that nothing was left out of, and that came out with other bytes.
        same: the new version has the same weights as the one that serves, which serves on.
    """

    version: PolicyVersion
    left_out: int
    waiting: int
    updates: int
    retired: tuple[str, ...] = ()
    differs: tuple[str, ...] = ()
    same: bool = False


async def rebuild_policy(
    settings: TrainerSettings, engine: AsyncEngine, name: str, wish: Wish, tell: Tell
) -> Result:
    """Train the line of policy `name` again without what `wish` leaves out, and publish it.

    Raises:
        TrainerError: it cannot be rebuilt, or is not served correctly, or a trainer works on the
            policy; the message says what to do.
        UnknownPolicy: there is no such policy.
        UnknownNames: no episode has a name that is asked for.
    """
    chosen = importing_policy(settings, open_policies(settings.policies), name)
    recipe = load_recipe(chosen.recipe)
    check_gate(chosen, recipe)
    async with engine.connect() as guard, Replicas(settings.server_urls) as servers:
        try:
            await lock_policy(guard, name, "rebuild")
            model = await base_model(settings, chosen, name, servers)
            # Alone: a line that replaces another waits for no other policy.
            publisher = Publisher(engine, servers, name, recipe.publish, gate=recipe.judged_by)
            rebuild = Rebuild(settings, engine, publisher, Learners(settings, model), name)
            return await rebuild(wish, recipe, tell)
        finally:
            # Else the pool would keep the connection, and with it the hold on the policy.
            await guard.invalidate()


class Rebuild:
    """Do a line again, and publish what it comes to."""

    def __init__(
        self,
        settings: TrainerSettings,
        engine: AsyncEngine,
        publisher: Publisher,
        learners: Callable[[Recipe], LearnerProtocol],
        policy: str,
    ) -> None:
        """Connect the stages; `policy` is the name of the policy whose line is rebuilt."""
        self._engine = engine
        self._policy = policy
        self._folder = settings.adapter_dir
        self._publisher = publisher
        self._learners = learners
        self._versions = Versions(engine, self._folder, policy)
        recording = Recording(engine, policy)
        self._recovery = Recovery(engine, self._folder, policy, self._versions, recording)
        self._again = Again(settings, engine, learners, policy)
        self._differs: list[str] = []

    async def __call__(self, wish: Wish, recipe: Recipe, tell: Tell) -> Result:
        """Rebuild the line as `rebuild_policy` says; `recipe` is the policy's now."""
        await self._recovery.finish("the trainer was killed")
        adapters.sweep(self._folder, self._policy)
        seen = await self._look(wish)
        _refuse_missing(seen, furthest(seen.done, seen.line, self._folder, self._policy))
        waiting = await self._leave_out(seen, recipe)
        if not seen.of_line:
            head = await self._versions.numbered(seen.head.version)
            return Result(version=head, left_out=0, waiting=waiting, updates=0)
        done = await self._do(seen, wish, recipe, tell)
        again = [row.rebuilt for row in done.rows if row.rebuilt is not None]
        left_out = sum(len(one.left_out) for one in again)
        result = await self._put_in_place(done, left_out)
        return Result(
            version=result[0],
            left_out=left_out,
            waiting=waiting,
            updates=len(again),
            retired=tuple(result[1]),
            differs=tuple(self._differs),
            same=result[2],
        )

    async def _look(self, wish: Wish) -> Outlook:
        async with self._engine.connect() as connection:
            return await outlook(
                connection, self._policy, wish.queries, leave_missing=wish.leave_missing
            )

    async def _leave_out(self, seen: Outlook, recipe: Recipe) -> int:
        ids, parent = seen.chosen, seen.head.version
        async with self._engine.begin() as connection:
            values = recipe.model_dump(mode="json")
            return await leave_out(connection, self._policy, ids, parent, values)

    async def _do(self, seen: Outlook, wish: Wish, recipe: Recipe, tell: Tell) -> Done:
        """Do what is not done yet, until nothing of the line is left."""
        while True:
            try:
                return await self._go_on(seen, tell)
            except Damaged as error:
                if not (wish.leave_missing and error.episodes):
                    raise _cannot_be_read(error) from error
                async with self._engine.begin() as connection:
                    values = recipe.model_dump(mode="json")
                    await leave_out(
                        connection, self._policy, error.episodes, seen.head.version, values
                    )
                seen = await self._look(wish)

    async def _go_on(self, seen: Outlook, tell: Tell) -> Done:
        items = seen.line.items
        done = furthest(seen.done, seen.line, self._folder, self._policy)
        await self._check_root(done.version)
        tell(len(done.rows), len(items))
        for item in items[len(done.rows) :]:
            left_out = frozenset(seen.left_out.get(item.source.id, ()))
            row = await self._again.do(item, left_out, await self._place(done))
            version = done.version if row.version is None else row.version
            done = Done(rows=(*done.rows, row), version=version)
            if row.version is not None:
                self._compare(item, row, done)
                await self._publisher.clean(self._folder)
            tell(len(done.rows), len(items))
        return done

    async def _place(self, done: Done) -> Place:
        async with self._engine.connect() as connection:
            baselines = await baselines_after(connection, done.rows)
        return Place(after=done.last, parent=done.version, baselines=baselines)

    async def _check_root(self, version: int) -> None:
        """Refuse to go on from a version without files: an import is not to be had any more."""
        folder = self._versions.folder(version)
        if folder is not None and adapters.read_manifest(folder) is None:
            raise AdapterError(
                f"{folder} is not there, and the line of policy {self._policy!r} begins with the"
                " adapter that was imported as this version: restore it from a backup, or import"
                " it again, which begins a new line"
            )

    def _compare(self, item: Item, row: PastRow, done: Done) -> None:
        """Note a version that came out otherwise than it did before, though nothing is left out."""
        if any(one.rebuilt is not None and one.rebuilt.left_out for one in done.rows):
            return
        before, now = (self._hash(number) for number in (item.source.version, row.version))
        if before is not None and before != now:
            name = f"{self._policy}@{item.source.version}"
            self._differs.append(name)
            log.warning("rebuilt_otherwise", version=name, rebuilt_as=row.version)

    def _hash(self, number: int | None) -> str | None:
        """Return the hash of a version's weights, as its manifest has it, if that is there."""
        folder = None if number is None else self._versions.folder(number)
        manifest = None if folder is None else adapters.read_manifest(folder)
        return None if manifest is None else manifest.sha256[WEIGHTS]

    async def _put_in_place(
        self, done: Done, left_out: int
    ) -> tuple[PolicyVersion, list[str], bool]:
        """Publish the version that the line has come to; return it, and what was retired for it.

        The last says that the version which serves has the same weights, and so serves on.

        Raises:
            PublishError: it was rejected.
        """
        serving, head = await self._versions.serving(), done.version
        same = serving.version != head != 0 and self._hash(serving.version) == self._hash(head)
        if not same:
            version = await self._versions.numbered(head)
            if head and version.state not in SERVABLE:
                version = await self._offer(head, left_out)
            if version.state == "written":
                return version, [], False
        async with self._engine.begin() as connection:
            put = placing.end_others if same else placing.replace
            stays = serving.version if same else head
            retired = await put(connection, self._policy, stays, left_out)
        if retired:
            reason = f"their line was rebuilt as that of {self._policy}@{stays}"
            log.warning("versions_retired", versions=retired, reason=reason)
        return await self._versions.numbered(head), retired, same

    async def _offer(self, number: int, left_out: int) -> PolicyVersion:
        """Let a version be loaded and probed; return it. It stays `written` if that cannot be now.

        Raises:
            PublishError: it was rejected.
        """
        async with self._engine.begin() as connection:
            await placing.offer(connection, self._policy, number, left_out)
        version = await self._versions.numbered(number)
        try:
            why = await self._recovery.publish_one(self._publisher, version, is_due=True)
        except (UpstreamAway, FilesUnread) as error:
            log.warning("version_not_published", version=number, reason=str(error))
            return version
        if why is not None:
            raise PublishError(
                f"{self._policy}@{number}, which is rebuilt, was rejected, and the version before"
                f" it serves on: {why}; run the same command again once that is mended"
            )
        return await self._versions.numbered(number)


def _refuse_missing(seen: Outlook, done: Done) -> None:
    missing = needed(seen, done)
    if missing:
        counted = Counter(one.why for one in missing)
        reasons = ", ".join(f"{number} {why}" for why, number in sorted(counted.items()))
        raise TrainerError(
            f"{len(missing)} episodes that the line was trained on cannot be read any more"
            f" ({reasons}): `--dry-run --json` names them, and `--leave-out-missing` rebuilds it"
            " without them, too"
        )


def _cannot_be_read(error: Damaged) -> TrainerError:
    return TrainerError(
        f"{error}: an update that was trained on it cannot be done again with it; restore the"
        " database from a backup, or leave it out with `--leave-out-missing`"
    )
