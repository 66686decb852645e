"""Examine a system: gather facts once, and check them, the cause most upstream first."""

from typing import Final

from msgspec.structs import replace
from sqlalchemy.ext.asyncio import AsyncEngine

from pawl.doctor import checks, policy_checks
from pawl.doctor.checks import NO_FIGURES, Check, Finding
from pawl.doctor.facts import Facts
from pawl.doctor.gather import gather
from pawl.settings import DoctorSettings

# In order of importance: what is upstream comes first.
CHECKS: Final[tuple[Check, ...]] = (
    *(checks.unusable_files, checks.database, checks.storage),
    *(checks.proxy_away, checks.server_away, checks.trainer_away, checks.no_calls),
    *(checks.unanswered, checks.broken, checks.untrainable, checks.only_evaluation),
    *(checks.unmatched, policy_checks.quarantined, policy_checks.unrewarded),
    *(policy_checks.equal_rewards, policy_checks.judges, checks.paused, checks.no_slot),
    *(policy_checks.trained_badly, policy_checks.outside_range, policy_checks.drifted),
    *(policy_checks.frozen, policy_checks.not_as_trained),
    *(checks.controller_away, policy_checks.undecided),
    *(checks.missing_key, checks.too_long, checks.spinning, policy_checks.learns),
)
# Of processes, servers and disks, which all tenants share.
OF_PARTS: Final[tuple[Check, ...]] = (
    *(checks.unusable_files, checks.storage, checks.proxy_away, checks.server_away),
    *(checks.trainer_away, checks.no_slot, checks.controller_away, checks.missing_key),
    checks.spinning,
)
# With figures that name such parts.
NAME_PARTS: Final[tuple[Check, ...]] = (checks.database, policy_checks.not_as_trained)


async def examine(
    settings: DoctorSettings,
    engine: AsyncEngine | None = None,
    tenant: str | None = None,
    *,
    of_parts: bool = True,
) -> list[Finding]:
    """Return why policies do not learn, or when they will next, as `findings` does.

    Without an `engine` the database of the settings is asked, if it runs. With `tenant` the
    policies and calls are this tenant's. It raises nothing: what cannot be asked is a finding.
    """
    return findings(await gather(settings, engine, tenant), of_parts=of_parts)


def findings(facts: Facts, *, of_parts: bool = True) -> list[Finding]:
    """Return what needs a person, the cause most upstream first, and then what passes by itself.

    Where nothing answers, that is the only finding. Unless `of_parts`, processes, servers and
    disks, which all tenants share, are left out, and so are figures that name them (pure).
    """
    if of_parts and (away := list(checks.all_away(facts))):
        return [*checks.unusable_files(facts), *away]
    found = [
        finding if of_parts or check not in NAME_PARTS else replace(finding, figures=NO_FIGURES)
        for check in CHECKS
        if of_parts or check not in OF_PARTS
        for finding in check(facts)
    ]
    return sorted(found, key=lambda finding: not finding.needs_person)
