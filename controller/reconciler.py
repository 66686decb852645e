"""Keep a model server's adapters equal to those that the store lists as servable.

The reconciler loads missing versions: after a server restart, and when an operator recalls one.
(`Publishing` loads a new version, to probe it.) A version is loaded with the files that its update
wrote, and checked to be served as it was trained: the server may have been restarted with another
base model or dtype, or may list an adapter without applying it. A misserved version is unloaded.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import structlog

from store.versions import PolicyVersion
from trainer.errors import (
    AdapterError,
    FilesAltered,
    FilesUnread,
    Misserved,
    NotFetched,
    PublishError,
    TrainerError,
    UpstreamAway,
    WrongBase,
)
from trainer.publishing.adapters import check_files, read_probe
from trainer.publishing.model_server import ModelServer
from trainer.publishing.probe import (
    ProbeResult,
    compare_served,
    rejection_reason,
    why_another_base,
)
from trainer.recipes.recipe import PublishOptions

log = structlog.get_logger()

# A server's models: `root` and `parent` by model name.
Listed = Mapping[str, Mapping[str, Any]]

# Factor on the tolerance of a version that was published already: one that was just within it then
# passes with other rounding, while another base model is far beyond it.
RECHECK_FACTOR: Final = 2.0
# A server with exactly the right adapters is asked again every so many looks, or after a change.
SETTLED_LOOKS: Final = 10
FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 60.0
# The outcome and log event of each failure to load; all others are `refused`.
OUTCOMES: Final[Mapping[type[TrainerError], tuple[str, str]]] = {
    FilesAltered: ("altered", "adapter_altered"),
    FilesUnread: ("unread", "adapter_unread"),
    NotFetched: ("unread", "adapter_unread"),
    Misserved: ("misserved", "adapter_misserved"),
    WrongBase: ("misserved", "adapter_misserved"),
}


# Which adapters a server should have (pure)


def base_models(listed: Listed) -> set[str]:
    """Return the names of the server's base models."""
    return {name for name, model in listed.items() if model.get("parent") is None}


def versions_for_server(versions: Collection[PolicyVersion], listed: Listed) -> list[PolicyVersion]:
    """Return the servable versions of the policies whose base model the server has.

    Most requested first: serving versions, then canaries and controls, then the newest.
    """
    bases = base_models(listed)
    here = {
        version.name for version in versions if not version.version and version.served_name in bases
    }
    servable = [one for one in versions if one.version and one.is_servable and one.name in here]
    return sorted(
        servable, key=lambda v: (v.state != "serving", v.share is None, -v.version, v.name)
    )


def has_other_files(version: PolicyVersion, listed: Listed) -> bool:
    """Return whether the server has files of another folder under the version's name."""
    model = listed.get(version.served_name)
    return model is not None and model.get("root") != version.adapter_path


def versions_to_load(versions: Iterable[PolicyVersion], listed: Listed) -> list[PolicyVersion]:
    """Return the `versions` that the server lacks, then those that it has with other files."""
    versions = list(versions)
    lacking = [version for version in versions if version.served_name not in listed]
    return lacking + [version for version in versions if has_other_files(version, listed)]


# One version on one server


async def load_version(server: ModelServer, version: PolicyVersion) -> ProbeResult | None:
    """Load a version on a server, replacing other files, and check that it is served as trained.

    Return the compared values, or None if the version has no probe rows.

    Raises:
        FilesAltered: the files are not those that were written; the version is not loaded.
        FilesUnread: the files cannot be read for now; the version is not loaded.
        NotFetched: the files cannot be fetched for now, here or by the server. If the server's
            machine has them, the version is loaded, but how it is served is not checked.
        PublishError: the server refuses the version.
        Misserved: the server applied the version differently from the trainer; it was unloaded.
        UpstreamAway: the server does not answer.
    """
    folder = Path(version.adapter_path or "")
    not_here: NotFetched | None = None
    try:
        await check_files(version, await server.files.fetch(folder, version.manifest_sha256))
    except NotFetched as error:
        if version.manifest_sha256 is None:
            raise
        # The server's `pawl adapters` checks the files by that hash.
        not_here = error
    listed = await server.models()
    if has_other_files(version, listed):
        other = listed[version.served_name].get("root")
        log.error("adapter_has_other_files", version=version.served_name, served=other)
        await server.unload(version.served_name)
    await server.load(version.served_name, folder, version.manifest_sha256)
    if not_here is not None:
        raise not_here
    return await check_served(server, version)


async def check_served(server: ModelServer, version: PolicyVersion) -> ProbeResult | None:
    """Check that a server serves a loaded version as it was trained; unload it if not.

    Return the compared values; a version without probe rows in its manifest is not checked. Any
    other is also unloaded if the server goes away before the check ends, as nobody would know later
    that it is unchecked.

    Raises:
        WrongBase: the server's base model is not the one that the version was trained on.
        Misserved: the version is not served as trained, or the server refuses the check.
        FilesUnread: the manifest cannot be read for now.
        NotFetched: the manifest cannot be fetched for now.
        UpstreamAway: the server does not answer.
    """
    path = Path(version.adapter_path or "")
    rows = await asyncio.to_thread(
        read_probe, await server.files.fetch(path, version.manifest_sha256)
    )
    if not rows:
        return None
    name = version.served_name
    tolerance = (version.gate or {}).get("tolerance", PublishOptions().tolerance)
    if version.state != "written":
        tolerance *= RECHECK_FACTOR
    try:
        base = await server.base_of(name)
        served, of_base = await asyncio.gather(
            server.probe_logprobs(name, rows), server.probe_logprobs(base, rows)
        )
        probe = compare_served(rows, served, of_base)
        if (why := why_another_base(probe, tolerance)) is not None:
            raise WrongBase(f"{server.url} cannot serve {name}: {why}")
        if (why := rejection_reason(probe, tolerance)) is not None:
            raise Misserved(f"{server.url} does not serve {name} as it was trained: {why}")
    except (PublishError, UpstreamAway) as error:
        await unload_if_possible(server, name)
        if isinstance(error, (Misserved, UpstreamAway)):
            raise
        raise Misserved(f"{server.url} does not serve {name} as it was trained: {error}") from error
    return probe


async def unload_if_possible(server: ModelServer, name: str) -> bool:
    """Unload an adapter, and return whether that succeeded; a failure is only logged."""
    try:
        await server.unload(name)
    except (PublishError, UpstreamAway) as error:
        log.error("version_not_unloaded", version=name, replica=server.url, reason=str(error))
        return False
    return True


# All versions on one server, again and again


class Reconciler:
    """Load and unload adapters until a server has exactly those that it should have.

    Attributes:
        troubles: by name, why a servable version is not loaded or not known to be served right.
        missing: how many servable versions the server lacked after the last look.
        names: the served names of the versions that the server should have.
        is_checked: whether all its versions were checked since the server was last away.
    """

    def __init__(
        self, server: ModelServer, count: Callable[[str], None] = lambda outcome: None
    ) -> None:
        """Store the server; each load calls `count` with its outcome (`loaded`, `refused`, …)."""
        self.server = server
        self.troubles: dict[str, TrainerError] = {}
        self.missing = 0
        self.names: set[str] = set()
        self._count = count
        # For each version that could not be loaded: when to try again, and the pause before that.
        self._pauses: dict[str, tuple[float, float]] = {}
        self.is_checked = False
        # The versions of the last look, if the server had exactly these, and how many further looks
        # may be skipped for that.
        self._settled: Collection[PolicyVersion] | None = None
        self._skips = 0

    def has_given_up_on(self, name: str) -> bool:
        """Return whether the tries of about a minute failed, the last with a PublishError.

        That is, the server refuses or misserves the version, or its files were altered.
        """
        _, pause_s = self._pauses.get(name, (0.0, 0.0))
        return isinstance(self.troubles.get(name), PublishError) and pause_s >= LONGEST_PAUSE_S

    def skip_look(self, versions: Collection[PolicyVersion] | None) -> bool:
        """Return whether to skip this look, and count the skip.

        After a look that found exactly these versions loaded, SETTLED_LOOKS − 1 looks are skipped.
        """
        if versions is None or self._settled != versions or not self._skips:
            return False
        self._skips -= 1
        return True

    async def look(
        self,
        versions: Collection[PolicyVersion] | None,
        *,
        may_load: Callable[[PolicyVersion], bool] = lambda version: True,
        unserved: Callable[[], Awaitable[Collection[PolicyVersion]]] | None = None,
    ) -> None:
        """Load those `versions` (None: not known yet) that the server lacks; unload unserved ones.

        `may_load` and `unserved` are called at the last moment: the versions' states may have
        changed while other adapters were loaded. `unserved` returns the versions that no server
        should have; it is called only if the server has an adapter that is not servable.

        Raises:
            UpstreamAway: the server does not answer.
        """
        self._settled = None
        try:
            listed = await self.server.models()
            servable = versions_for_server(versions or (), listed)
            self.names = {version.served_name for version in servable}
            self.troubles = {n: why for n, why in self.troubles.items() if n in self.names}
            self._pauses = {
                name: pause for name, pause in self._pauses.items() if name in self.names
            }
            waiting = versions_to_load(servable, listed)
            self.missing = len(waiting)
            for version in waiting:
                self.missing -= await self._load(version, listed, may_load)
            for version in servable:
                if version not in waiting:
                    await self._check(version)
            self.is_checked |= versions is not None
            adapters = {name for name, model in listed.items() if model.get("parent") is not None}
            strays = adapters - self.names
            for version in await unserved() if strays and unserved is not None else ():
                if version.served_name in strays:
                    await self._unload(version.served_name)
            if not (self.missing or self.troubles or strays):
                self._settled, self._skips = versions, SETTLED_LOOKS - 1
        except UpstreamAway:
            # It may come back as another server, or repaired.
            self._pauses.clear()
            self.is_checked = False
            self.troubles.clear()
            raise

    async def _load(
        self,
        version: PolicyVersion,
        listed: Listed,
        may_load: Callable[[PolicyVersion], bool],
    ) -> bool:
        """Load one version, and return whether the server has it now."""
        name = version.served_name
        if not may_load(version) or self._is_paused(name):
            return False
        try:
            await load_version(self.server, version)
        except (PublishError, FilesUnread, NotFetched) as error:
            self._note_failure(name, error)
            return False
        self._note_success(name)
        self._count("replaced" if name in listed else "loaded")
        log.info("adapter_loaded", version=name, replica=self.server.url)
        return True

    async def _check(self, version: PolicyVersion) -> None:
        """Check a version that was already loaded: at the first look, or after a failure."""
        name = version.served_name
        is_in_trouble = name in self.troubles
        if (self.is_checked and not is_in_trouble) or self._is_paused(name):
            return
        try:
            if is_in_trouble:
                path = Path(version.adapter_path or "")
                fetched = await self.server.files.fetch(path, version.manifest_sha256)
                await check_files(version, fetched)
            await check_served(self.server, version)
        except (PublishError, FilesUnread, NotFetched, AdapterError) as error:
            self._note_failure(name, error)
            return
        self._note_success(name)

    async def _unload(self, name: str) -> None:
        if await unload_if_possible(self.server, name):
            log.info("version_unloaded", version=name, replica=self.server.url)

    def _is_paused(self, name: str) -> bool:
        again_at, _ = self._pauses.get(name, (0.0, 0.0))
        return asyncio.get_running_loop().time() < again_at

    def _note_success(self, name: str) -> None:
        """Clear a version's failure; after one, end all pauses, as the server may be repaired."""
        if self.troubles.pop(name, None) is not None:
            self._pauses.clear()

    def _note_failure(self, name: str, error: TrainerError) -> None:
        """Count and log a failure; each one doubles the pause before the next try."""
        _, before_s = self._pauses.get(name, (0.0, 0.0))
        pause_s = min(LONGEST_PAUSE_S, 2 * before_s or FIRST_PAUSE_S)
        self._pauses[name] = (asyncio.get_running_loop().time() + pause_s, pause_s)
        self.troubles[name] = error
        outcome, event = OUTCOMES.get(type(error), ("refused", "adapter_not_loaded"))
        self._count(outcome)
        log.error(
            event, version=name, replica=self.server.url, reason=str(error), again_in_s=pause_s
        )
