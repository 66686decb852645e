"""Diagnose a system: collect facts once, and check them, upstream causes first."""

from typing import Final

from msgspec.structs import replace
from sqlalchemy.ext.asyncio import AsyncEngine

from pawl.doctor import checks, policy_checks
from pawl.doctor.checks import NO_FIGURES, Check, Finding
from pawl.doctor.collecting import collect_facts
from pawl.doctor.facts import Facts
from pawl.settings import DoctorSettings

# Upstream causes come first.
CHECKS: Final[tuple[Check, ...]] = (
    *(checks.unusable_files, checks.database_away, checks.full_storage),
    *(checks.proxy_away, checks.server_away, checks.trainer_away, checks.no_calls),
    *(checks.unanswered_calls, checks.broken_calls, checks.untrainable_calls),
    *(checks.only_evaluation, checks.unmatched_feedback, policy_checks.quarantined_episodes),
    *(policy_checks.missing_rewards, policy_checks.equal_rewards, policy_checks.unreliable_judges),
    *(checks.paused_training, checks.no_slot, policy_checks.trained_badly),
    *(policy_checks.rewards_outside_range, policy_checks.drifted_version),
    *(policy_checks.frozen_policy, policy_checks.misserved_versions),
    *(checks.controller_away, policy_checks.undecided_version, checks.missing_key),
    *(checks.too_long_contexts, checks.spinning_threads, policy_checks.policy_outlook),
)
# Checks of processes, servers and disks, which all tenants share.
PART_CHECKS: Final[tuple[Check, ...]] = (
    *(checks.unusable_files, checks.full_storage, checks.proxy_away, checks.server_away),
    *(checks.trainer_away, checks.no_slot, checks.controller_away, checks.missing_key),
    checks.spinning_threads,
)
# Checks whose figures name such parts.
CHECKS_NAMING_PARTS: Final[tuple[Check, ...]] = (
    checks.database_away,
    policy_checks.misserved_versions,
)


async def diagnose(
    settings: DoctorSettings,
    engine: AsyncEngine | None = None,
    tenant: str | None = None,
    *,
    of_parts: bool = True,
) -> list[Finding]:
    """Collect facts, and return their `findings`.

    Without an `engine` the settings' database is used, if it runs. `tenant` limits policies and
    calls to that tenant's. Nothing is raised: a part that does not answer is a finding.
    """
    return findings(await collect_facts(settings, engine, tenant), of_parts=of_parts)


def findings(facts: Facts, *, of_parts: bool = True) -> list[Finding]:
    """Return the findings that need a person, upstream causes first, and then the others (pure).

    If nothing answers, that and unusable files are the only findings. Without `of_parts`,
    findings about processes, servers and disks, which all tenants share, and figures that name
    them, are left out.
    """
    if of_parts and (away := list(checks.all_away(facts))):
        return [*checks.unusable_files(facts), *away]
    found = [
        finding
        if of_parts or check not in CHECKS_NAMING_PARTS
        else replace(finding, figures=NO_FIGURES)
        for check in CHECKS
        if of_parts or check not in PART_CHECKS
        for finding in check(facts)
    ]
    return sorted(found, key=lambda finding: not finding.needs_person)
