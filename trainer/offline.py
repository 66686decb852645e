"""Train on exported episodes: the trainer's updates without a database or a model server.

The trainer's own code plans, trains and writes updates (`trainer.updates.training`). Nothing is
claimed, recorded or served.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import NAMESPACE_URL, UUID, uuid5

import msgspec
import structlog
from pydantic import SecretStr

from store.claims import Claim
from store.records import Episode, Group
from trainer.errors import AdapterError, LearnerError, Unusable
from trainer.exported import groups_by_update
from trainer.learners.distributed import has_several_processes
from trainer.learners.kernels.process import keep_freed_memory
from trainer.learners.learner import Learner
from trainer.publishing.adapters import read_manifest, version_folder, version_folders
from trainer.recipes.recipe import Recipe
from trainer.trackers import Trackers
from trainer.updates.circuit_breaker import looks_like_a_fault
from trainer.updates.teacher import Teacher
from trainer.updates.training import Training

log = structlog.get_logger()

# Called after each update with its version's number and folder (None: no version), its metrics, and
# the number of all updates.
Show = Callable[[int, Path | None, Mapping[str, Any], int], None]


class _LocalVersions:
    """Locate the folders of the version that training starts from and of the versions it writes."""

    def __init__(self, out: Path, policy: str, start: tuple[int, Path] | None) -> None:
        self._out, self._policy, self._start = out, policy, start

    async def deleted(self, asked: Collection[int]) -> set[int]:
        return set()

    def folder(self, version: int) -> Path | None:
        if self._start is not None and version == self._start[0]:
            return self._start[1]
        return version_folder(self._out, self._policy, version) if version else None


def first_number(episodes: Sequence[Episode], policy: str, start: int) -> int:
    """Return the first new version's number: above `start` and all versions that sampled a call."""
    calls = (call for episode in episodes for call in episode.calls if call.policy == policy)
    return max([start, *(call.policy_version or 0 for call in calls)]) + 1


async def train_episodes(
    episodes: Sequence[Episode],
    recipe: Recipe,
    policy: str,
    model: str,
    out: Path,
    show: Show,
    *,
    start: Path | None = None,
    seed: int = 0,
    teacher_key: SecretStr | None = None,
    trackers: Trackers,
) -> Mapping[str, int]:
    """Train one update after the other; return the number of episodes in no update, by reason.

    The first update starts from the base model, or from the version in the folder `start`. New
    versions are written into `out`. Calls that other versions sampled are off-policy, as in the
    trainer. `show` is called after each update.

    Raises:
        TrainerError: the model or the version cannot be used, or an update cannot be computed.
    """
    if has_several_processes():
        raise LearnerError("`pawl train` runs in one process: start it without `accelerate launch`")
    # Must come before a second thread starts: only malloc's first arena may be used.
    keep_freed_memory()
    if version_folders(out, policy):
        raise AdapterError(
            f"{out} already has versions of {policy!r}: name another folder with --out"
        )
    manifest = None if start is None else read_manifest(start)
    if start is not None and manifest is None:
        raise AdapterError(f"{start} is not a version's folder, POLICY/N: name one with --start")
    updates, left = groups_by_update(episodes, recipe, policy)
    parent = 0 if manifest is None else manifest.version
    start_version = None if start is None else (parent, start.resolve())
    learner = Learner(model, recipe, seed, out / ".scratch")
    why_another_base = None if start is None else learner.why_another_base(start)
    if why_another_base is not None:
        raise AdapterError(
            f"{start}: {why_another_base} than {model}: name the version's base with --model"
        )
    probe = learner.vocabulary_probe
    teacher = Teacher(recipe.teacher, probe, teacher_key) if recipe.teacher else None
    training = Training(learner, out, _LocalVersions(out, policy, start_version), teacher)
    baselines = None if manifest is None else manifest.baselines
    number = first_number(episodes, policy, parent)
    for groups in updates:
        made = await _run_update(training, recipe, policy, groups, parent, number, baselines)
        folder, metrics, baselines = made
        trackers.log(policy, metrics, number)
        show(number, folder, metrics, len(updates))
        if folder is not None:
            parent, number = number, number + 1
    return left


async def _run_update(
    training: Training,
    recipe: Recipe,
    policy: str,
    groups: tuple[Group, ...],
    parent: int,
    number: int,
    baselines: Mapping[str, Any] | None,
) -> tuple[Path | None, Mapping[str, Any], Mapping[str, Any] | None]:
    """Train version `parent` on `groups` and write version `number`.

    Episodes to blame for a failure are left out, and the update is run again. Return the version's
    folder (None: no signal, no version), the update's metrics, and the next moving baselines.
    """

    async def warn_off_policy(distant: int, measured: int) -> None:
        log.warning("many_episodes_off_policy", policy=policy, far=distant, measured=measured)

    while True:
        claim = Claim(
            update_id=uuid5(NAMESPACE_URL, f"{policy}@{number}"),
            policy=policy,
            parent_version=parent,
            groups=groups,
            baselines=baselines,
        )
        try:
            plan = await training.plan(claim, recipe, warn_off_policy)
            after = plan.baselines or baselines
            if not plan.rows:
                return None, plan.metrics, after
            metrics = plan.metrics | await training.train(parent, plan.rows, plan.step_share)
        except Unusable as error:
            members = sum(len(group.episodes) for group in groups)
            if not error.is_poison or looks_like_a_fault(len(error.episodes), members):
                raise
            log.error(f"episodes_{error.reason}", episodes=len(error.episodes), reason=str(error))
            groups = _without_episodes(groups, error.episodes)
            continue
        new = await training.describe_version(claim, plan, number, metrics)
        return await training.write(new), metrics, after


def _without_episodes(groups: Sequence[Group], episodes: Collection[UUID]) -> tuple[Group, ...]:
    kept = (
        msgspec.structs.replace(
            group, episodes=tuple(one for one in group.episodes if one.id not in episodes)
        )
        for group in groups
    )
    return tuple(group for group in kept if group.episodes)
