"""Check a policy's stored facts for causes that keep it from learning (pure)."""

from typing import Final

from pawl.doctor.checks import (
    LONGEST_NAME,
    MOST_NAMED,
    PAUSE_REMEDIES,
    Figure,
    Finding,
    list_names,
    of_each_policy,
)
from pawl.doctor.facts import Facts, PolicyFacts
from pawl.doctor.outlook import outlook_of
from store.link.joins import AMBIGUOUS_MATCH, DOUBTFUL_CALL, DOUBTFUL_NEED
from store.link.outages import IN_OUTAGE, LOST_CALL
from store.read.agreement import FEWEST_COMPARED, LEAST_AGREEMENT
from store.tenants import bare
from trainer.updates.training_warnings import MOST_UNTRAINED

# A probe's difference and drift are reported beyond these shares of the recipe's limits, as in the
# alerts.
NEAR_TOLERANCE: Final = 2 / 3
NEAR_DRIFT: Final = 0.5
# With fewer episodes, equal rewards mean nothing.
FEWEST_EQUAL: Final = 8


# Episodes and rewards


@of_each_policy
def quarantined_episodes(_: Facts, policy: PolicyFacts) -> Finding | None:
    """Find that many of the newest episodes are quarantined, or any because runs have no names."""
    counts = policy.counts
    every = counts.episodes + counts.quarantined
    is_unnamed = counts.quarantined_as in (DOUBTFUL_CALL, DOUBTFUL_NEED, AMBIGUOUS_MATCH)
    if not counts.quarantined or (not is_unnamed and counts.quarantined <= MOST_UNTRAINED * every):
        return None
    is_disk = counts.quarantined_as in (IN_OUTAGE, LOST_CALL)
    return Finding(
        title=f"{policy.name}: {counts.quarantined} of the newest {every} episodes are quarantined:"
        " it is doubtful which calls they have",
        since=counts.quarantined_since,
        figures={"quarantined": counts.quarantined, "mostly": counts.quarantined_as or ""},
        remedy="keep room on the disk of PAWL_SPOOL_DIR: calls were lost there"
        if is_disk
        else "name each run with the header x-pawl-episode (docs/howto/rewards.md)",
        needs_person=2 * counts.quarantined > every,
    )


@of_each_policy
def missing_rewards(facts: Facts, policy: PolicyFacts) -> Finding | None:
    """Find that no episodes have rewards, or many ended ones or ones with feedback have none."""
    counts = policy.counts
    lacks = sum(policy.lacks.values())
    if not counts.episodes or (policy.recipe and policy.recipe.teacher):
        return None
    if lacks and lacks > MOST_UNTRAINED * (lacks + counts.scored):
        lack = max(policy.lacks, key=lambda one: policy.lacks[one])
        wanted = list_names(policy.recipe.reward) if policy.recipe is not None else ""
        return Finding(
            title=f"{policy.name}: {lacks} episodes have feedback and no reward ({lack})",
            since=counts.unscored_since,
            figures={**policy.lacks, "scored": counts.scored},
            remedy="send a value for each of these, or give the metric a default in the recipe's"
            f" [reward]: {wanted}"
            if lack == "missing_metric"
            else "give the text a value in the recipe's [reward.METRIC] values",
        )
    if not counts.scored:
        return Finding(
            title=f"{policy.name}: no rewards",
            since=counts.first_at,
            figures={"episodes": counts.episodes, "with_reward": 0},
            remedy=f"POST a reward for each run to {facts.data_url}/feedback, or run `pawl judge`",
            needs_person=counts.ended > 0,
        )
    unscored = counts.ended - counts.scored
    if unscored > MOST_UNTRAINED * counts.ended:
        return Finding(
            title=f"{policy.name}: {unscored} of {counts.ended} episodes that are over have no"
            " reward",
            since=counts.unscored_since,
            figures={"ended": counts.ended, "with_reward": counts.scored},
            remedy="POST the missing rewards to /feedback, or run `pawl judge`",
        )
    return None


@of_each_policy
def equal_rewards(_: Facts, policy: PolicyFacts) -> Finding | None:
    """Find rewards that are all equal, or equal within each group, or all too low to imitate."""
    counts, rule = policy.counts, policy.rule
    if rule is None or rule.finished_after_s or counts.most is None or counts.least is None:
        return None
    figures: dict[str, Figure] = {
        "with_reward": counts.scored,
        "lowest": counts.least,
        "highest": counts.most,
    }
    if rule.least_reward is not None:
        if counts.most >= rule.least_reward or counts.scored < rule.groups:
            return None
        return Finding(
            title=f"{policy.name}: no episode reached the least reward that is imitated",
            since=counts.scored_since,
            figures=figures | {"least_reward": rule.least_reward},
            remedy="give easier tasks, or lower sft.min_reward in the recipe",
        )
    all_equal = counts.least == counts.most and rule.call_rewards_after_s is None
    has_groups = counts.groups > 1 or (counts.largest_group or 0) >= rule.group_size
    # With mostly single episodes, which are compared within their family, groups say nothing.
    has_groups &= rule.needs_spread and 2 * counts.groups > counts.tasks
    is_flat = all_equal or (has_groups and not counts.groups_that_differ)
    if counts.scored < FEWEST_EQUAL or not is_flat:
        return None
    return Finding(
        title=f"{policy.name}: all rewards are {counts.most:g}, which teaches nothing"
        if all_equal
        else f"{policy.name}: rewards are equal within each task, which teaches little",
        since=counts.scored_since,
        figures=figures | {"groups": counts.groups, "groups_that_differ": 0},
        remedy="give tasks that succeed sometimes, or rewards between all and nothing;"
        " if nearly all fail, begin with the recipe `sft`",
    )


@of_each_policy
def unreliable_judges(_: Facts, policy: PolicyFacts) -> Finding | None:
    """Find the least reliable of the judges that disagree with facts, or an unmeasured judge."""
    untrusted = [one for one in policy.judges if one.trust == 0.0]
    if not untrusted and all(one.share is not None for one in policy.judges):
        return None
    one = min(untrusted or policy.judges, key=lambda judge: (judge.share or 0.0, judge.source))
    figures: dict[str, Figure] = {"statements": one.statements, "compared": one.compared}
    judge = f"{policy.name}: the judge {bare(one.source)[:LONGEST_NAME]!r}"
    if one.share is None:
        return Finding(
            title=f"{judge} is unmeasured, and its rewards count in full: {one.compared} of"
            " them are about an episode that has a factual reward, too",
            figures=figures | {"needed": FEWEST_COMPARED},
            remedy=f"POST rewards for {FEWEST_COMPARED} episodes, good ones and bad ones, and keep"
            " `pawl judge` at work (--compare)",
            needs_person=False,
        )
    return Finding(
        title=f"{judge} agrees with facts in {one.share:.0%} of the pairs (chance: 50%): its"
        " rewards are ignored",
        figures=figures | {"agreement": round(one.share, 3), "needed": LEAST_AGREEMENT},
        remedy="name another model, or write another rubric, and run `pawl judge` with that",
    )


@of_each_policy
def trained_badly(_: Facts, policy: PolicyFacts) -> Finding | None:
    """Find that the last updates collapsed, consumed episodes untrained, or had no signal."""
    for kind in ("collapsed", "untrained", "no_signal"):
        if (problem := policy.problems.get(kind)) is not None:
            return Finding(
                title=f"{policy.name}: {problem.why}",
                since=problem.since or policy.about.trained_at,
                remedy=problem.remedy,
            )
    return None


@of_each_policy
def rewards_outside_range(_: Facts, policy: PolicyFacts) -> Finding | None:
    """Find rewards outside the recipe's range (default: 0 to 1)."""
    recipe, least, most = policy.recipe, policy.counts.least, policy.counts.most
    if recipe is None or recipe.reward or least is None or most is None:
        return None
    low, high = recipe.reward_range
    if low <= least and most <= high:
        return None
    return Finding(
        title=f"{policy.name}: rewards of {least:g} to {most:g} are outside the range of"
        f" {low:g} to {high:g}",
        since=policy.counts.scored_since,
        figures={"lowest": least, "highest": most},
        remedy="set publish.reward_range in the recipe to the lowest and the highest reward that"
        " your agents can get",
    )


@of_each_policy
def drifted_version(facts: Facts, policy: PolicyFacts) -> Finding | None:
    """Find a version on which server and trainer differ nearly as much as the recipe allows."""
    if policy.recipe is None:
        return None
    off_policy, publish = policy.recipe.off_policy, policy.recipe.publish
    past = dict[str, Figure]()
    for process, name, limit in (
        (facts.trainer, "drift_kl", NEAR_DRIFT * off_policy.max_drift),
        (facts.controller, "probe_difference", NEAR_TOLERANCE * publish.tolerance),
    ):
        value = process.value(f"pawl_update_{name}", policy=policy.name)
        if value is not None and value > limit:
            past[name] = round(value, 4)
    if not past:
        return None
    return Finding(
        title=f"{policy.name}: model server and trainer disagree about one version",
        since=policy.about.trained_at,
        figures=past,
        remedy=PAUSE_REMEDIES["drift"],
    )


# Versions


@of_each_policy
def frozen_policy(_: Facts, policy: PolicyFacts) -> Finding | None:
    """Find that a person froze the policy: no new version gets the traffic."""
    if policy.about.frozen_at is None:
        return None
    return Finding(
        title=f"{policy.name} is frozen: no new version gets the traffic",
        since=policy.about.frozen_at,
        remedy=f"run `pawl policies freeze {policy.name} --off`",
    )


@of_each_policy
def misserved_versions(facts: Facts, policy: PolicyFacts) -> Finding | None:
    """Find versions that a server lacks, has from elsewhere, or does not serve as trained."""
    ready = facts.controller.ready
    troubles = dict[str, Figure]()
    for server in facts.servers:
        # Only servers of the policy's base model should have its versions.
        for version in policy.servable if policy.about.base in server.models else ():
            listed = server.models.get(version.served_name)
            if listed is None:
                troubles.setdefault(version.served_name, f"{server.url} does not have it")
            elif version.adapter_path is not None and listed.get("root") != version.adapter_path:
                troubles.setdefault(
                    version.served_name,
                    f"{server.url} serves {listed.get('root')}, not {version.adapter_path}",
                )
    names = {version.served_name for version in policy.servable}
    for reasons in (ready.altered, ready.unread, *ready.misserved.values()):
        troubles |= {name: why for name, why in reasons.items() if name in names}
    for name, why in ready.waiting.items():
        if name.rpartition("@")[0] == policy.name:
            troubles[name] = f"it waits to be loaded: {why}"
    if not troubles:
        return None
    return Finding(
        title=f"{policy.name}: not served as trained: {list_names(sorted(troubles))}",
        since=policy.standing.serving.since if policy.standing is not None else None,
        figures=dict(sorted(troubles.items())[:MOST_NAMED]),
        remedy="start `pawl controller`, which loads it; `pawl policies check` says what is wrong"
        " with files",
    )


@of_each_policy
def undecided_version(facts: Facts, policy: PolicyFacts) -> Finding | None:
    """Find a version that waits for approval, cannot be judged, or is still being compared."""
    standing = policy.standing
    if standing is None:
        return None
    if policy.waits is not None:
        return Finding(
            title=f"{policy.name}@{policy.waits.version} waits for approval",
            since=policy.waits.at,
            figures={"evidence": policy.waits.reason},
            remedy=f"run `pawl policies promote {policy.name}@{policy.waits.version}`",
        )
    tried = standing.canary or standing.candidate
    if tried is None or standing.frozen:
        return None
    controller = facts.controller
    if controller.value("pawl_controller_gate_failed", policy=policy.name):
        return Finding(
            title=f"{tried.version.served_name} cannot be judged",
            since=tried.since,
            remedy="read why in the controller's log (policy_not_judged)",
        )
    figures: dict[str, Figure] = {}
    about = {"policy": policy.name, "compared": "trial"}
    for version, count in controller.values("pawl_controller_gate_episodes", **about).items():
        figures[f"episodes_{version}"] = int(count)
    for bound, value in controller.values("pawl_controller_gate_bound", **about).items():
        figures[bound] = round(value, 4)
    if tried.version.share is not None:
        figures["share"] = round(tried.version.share, 4)
    return Finding(
        title=f"{tried.version.served_name} is being tried: the decision is pending",
        since=tried.since,
        figures=figures,
        remedy="wait: the controller decides (publish.decide_within_h in the recipe)",
        needs_person=False,
    )


# Outlook


@of_each_policy
def policy_outlook(facts: Facts, policy: PolicyFacts) -> Finding | None:
    """Report a policy's outlook: how many episodes are usable, and when updates come."""
    if policy.rule is None:
        return None
    updates = 1.0 if policy.about.running_since is not None else policy.updates
    is_untrained = policy.about.trained_at is None
    outlook = outlook_of(policy.counts, policy.rule, updates, facts.now, is_untrained=is_untrained)
    if outlook is None:
        return None
    return Finding(
        title=f"{policy.name}: {outlook}",
        since=policy.about.trained_at,
        figures={"usable": outlook.usable, **outlook.unused},
        remedy=outlook.remedy,
        needs_person=False,
        is_outlook=True,
    )
