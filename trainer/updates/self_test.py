"""Test, without an episode, whether model servers load the trainer's adapters and apply them.

A new adapter with an effect is written and loaded into each model server. The server's
log-probabilities are compared with the trainer's, and the adapter is unloaded. So a rank, a layer,
a base model or a server option that does not fit stops the trainer before its first claim, or
pauses it later.
"""

import shutil
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Final

import msgspec
import structlog

from store.values.sampling import Distribution
from trainer.batches import Row, bare_row
from trainer.errors import (
    LearnerError,
    NoEffect,
    NotFetched,
    PublishError,
    ShortOfMemory,
    TeacherError,
    UpstreamAway,
)
from trainer.learners.protocol import LearnerProtocol
from trainer.publishing.adapters import MANIFEST, version_file_sha256, write_hashes
from trainer.publishing.model_server import ModelServer, Replicas
from trainer.publishing.probe import Compared, Effects, why_misfit
from trainer.recipes.recipe import Recipe
from trainer.updates.teacher import Teacher
from trainer.updates.training import in_thread

log = structlog.get_logger()

# Compares a loaded adapter on some rows; returns why the server serves it wrongly, or None.
WhyMisserved = Callable[[ModelServer, Sequence[Row]], Awaitable[str | None]]
# The test adapter is served as POLICY@self-test, from the folder self-test.
SELF_TEST: Final = "self-test"
# Temperature at which the server samples; far from 1, so that log-probabilities with and without
# temperature differ.
TEMPERATURE: Final = 2.0
# Tokens that the server samples in a test.
SAMPLED_TOKENS: Final = 12


class ServerSelfTest:
    """Test the learner and the model servers of one policy.

    A server that is away is skipped; if no server answers, methods raise `UpstreamAway`.
    """

    def __init__(
        self,
        learner: LearnerProtocol,
        folder: Path,
        servers: Replicas,
        policy: str,
        recipe: Recipe,
        teacher: Teacher | None = None,
    ) -> None:
        """Store the parts to test; `folder` is the parent of the policy's version folders."""
        self._teacher = teacher
        self._learner = learner
        self._folder = folder.resolve() / SELF_TEST
        self._servers = servers
        self._name = f"{policy}@{SELF_TEST}"
        self._recipe = recipe

    async def why_update_fails(self) -> str | None:
        """Rehearse a step and test the servers; return why an update would fail, or None."""
        try:
            await in_thread(self._learner, self._learner.rehearse)
        except LearnerError as error:
            return str(error)
        return await self.why_servers_fail()

    async def why_servers_fail(self) -> str | None:
        """Return why a server would serve a new version wrongly, with the remedy, or None.

        The learner must be restored before it trains.
        """
        try:
            return await self._find_problem()
        except LearnerError as error:
            return str(error)

    async def check(self) -> None:
        """Raise an error if a server would serve a new version wrongly, or no update is possible.

        Raises:
            PublishError: a version would be served wrongly until somebody changes that.
            ShortOfMemory: the trainer has too little memory for the test at the moment.
            TeacherError: the recipe's teacher cannot be used at the moment.
        """
        try:
            why = await self._find_problem()
        except (ShortOfMemory, TeacherError):
            raise
        except LearnerError as error:
            why = str(error)
        if why is not None:
            raise PublishError(why)

    async def _find_problem(self) -> str | None:
        # First, because without a teacher no update is possible, whatever the other tests show.
        if self._teacher is not None:
            await self._teacher.logprobs(self._learner.probe_rows())
        listed = await self._servers.ask(ModelServer.models)
        contexts = [
            model["max_model_len"]
            for models in listed.values()
            for model in models.values()
            if isinstance(model.get("max_model_len"), int)
        ]
        if contexts:
            # If another server's context makes a difference, its log-probabilities will show it.
            await in_thread(self._learner, partial(self._learner.set_served_context, max(contexts)))
        servers = tuple(listed)
        try:
            why = await self._test_servers(servers, self._why_misfit)
            if why is not None and await self._leave_out_ignored(servers):
                why = await self._test_servers(servers, self._why_misfit)
            return why
        finally:
            try:
                await self._servers.files.withdraw(self._folder)
            except NotFetched as error:
                # The next test overwrites it.
                log.warning("self_test_not_withdrawn", reason=str(error))
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _leave_out_ignored(self, servers: Sequence[ModelServer]) -> bool:
        """Leave out the kinds of layers that a server refuses or ignores, unless all kinds are.

        Return whether any kinds were left out.
        """
        kinds = await in_thread(self._learner, self._learner.layer_kinds)
        ignored = {}
        for kind in kinds:
            try:
                why = await self._test_servers(servers, self._why_ignored, kind)
                if why is not None:
                    # Test again: a failure by chance must not exclude these layers.
                    why = await self._test_servers(servers, self._why_ignored, kind)
            except NoEffect as error:
                why = str(error)
            if why is not None:
                ignored[kind] = why
        if not ignored or len(ignored) == len(kinds):
            return False
        log.warning("layers_left_out", layers=ignored, until="the trainer starts again")
        await in_thread(self._learner, partial(self._learner.leave_out_kinds, set(ignored)))
        return True

    def _write_adapter(self, kind: str | None) -> Sequence[Row]:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True, exist_ok=True)
        rows = self._learner.write_test_adapter(self._folder, kind)
        write_hashes(self._folder)
        return rows

    async def _test_servers(
        self, servers: Sequence[ModelServer], why_misserved: WhyMisserved, kind: str | None = None
    ) -> str | None:
        """Test an adapter of all layers, or of one kind; return the first problem, or None.

        `why_misserved` compares the adapter on one server. The servers are tested one after the
        other, because the learner cannot compute for two at once.
        """
        rows = await in_thread(self._learner, partial(self._write_adapter, kind))
        away: list[UpstreamAway] = []
        for server in servers:
            try:
                why = await self._test_server(server, rows, why_misserved)
            except UpstreamAway as error:
                away.append(error)
            else:
                if why is not None:
                    return why
        if len(away) == len(servers):
            raise away[-1]
        return None

    async def _test_server(
        self, server: ModelServer, rows: Sequence[Row], why_misserved: WhyMisserved
    ) -> str | None:
        try:
            await server.unload(self._name)
            manifest_sha256 = version_file_sha256(self._folder / MANIFEST)
            await server.load(self._name, self._folder, manifest_sha256)
            return await why_misserved(server, rows)
        except PublishError as error:
            return str(error)
        finally:
            try:
                await server.unload(self._name)
            except (PublishError, UpstreamAway) as error:
                # Not a problem: a restarted server has lost the adapter anyway, and if a server
                # refuses, the adapter stays under a name that nobody requests.
                log.warning("self_test_not_unloaded", replica=server.url, reason=str(error))

    async def _why_ignored(self, server: ModelServer, rows: Sequence[Row]) -> str | None:
        effects = await self._effects(server, rows)
        # If the base models differ, the effects say nothing about layers.
        is_same_base = effects.base_difference <= self._recipe.publish.tolerance
        return "the model server ignores them" if is_same_base and effects.is_ignored else None

    async def _why_misfit(self, server: ModelServer, rows: Sequence[Row]) -> str | None:
        """Return how a server's values differ from the trainer's, also those of sampled tokens."""
        effects = await self._effects(server, rows)
        sampled = await server.sample(self._name, tuple(rows[0].ids), TEMPERATURE, SAMPLED_TOKENS)
        plain = bare_row(0, rows[0].ids, [token for token, _ in sampled])
        heated = msgspec.structs.replace(plain, distribution=Distribution(temperature=TEMPERATURE))
        compared = Compared(
            **msgspec.structs.asdict(effects),
            served_sampled=tuple(logprob for _, logprob in sampled),
            own_sampled=await self._trainer_logprobs(self._folder, [heated]),
            own_raw=await self._trainer_logprobs(self._folder, [plain]),
        )
        return why_misfit(compared, self._recipe.publish.tolerance)

    async def _effects(self, server: ModelServer, rows: Sequence[Row]) -> Effects:
        """Return the log-probabilities of server and trainer, with and without the adapter."""
        base = await server.base_of(self._name)
        return Effects(
            served_base=await _server_logprobs(server, base, rows),
            own_base=await self._trainer_logprobs(None, rows),
            served_adapter=await _server_logprobs(server, self._name, rows),
            own_adapter=await self._trainer_logprobs(self._folder, rows),
        )

    async def _trainer_logprobs(
        self, adapter: Path | None, rows: Sequence[Row]
    ) -> tuple[float, ...]:
        score = partial(self._learner.version_logprobs, adapter, rows)
        return tuple(chain(*await in_thread(self._learner, score)))


async def _server_logprobs(
    server: ModelServer, name: str, rows: Sequence[Row]
) -> tuple[float, ...]:
    by_row = [
        await server.last_logprobs(name, tuple(row.ids), len(row.sampled_ids)) for row in rows
    ]
    return tuple(chain(*by_row))
