"""What the doctor makes of facts: what is wrong, what to do, and whether a person is needed."""

from datetime import UTC, datetime, timedelta
from typing import Any, get_args

import pytest
from msgspec.structs import replace
from prometheus_client.samples import Sample

from pawl.doctor.checks import PAUSE_REMEDIES, REMEDIES, Finding
from pawl.doctor.diagnosis import findings
from pawl.doctor.facts import Disk, Drain, Facts, PolicyFacts, ProcessAnswer, Ready, ReplicaAnswer
from pawl.doctor.outlook import describe_time
from proxy.trainable import Reason
from store.adapter_slots import LiveCounts, VersionKeptForEpisodes
from store.link.joins import DOUBTFUL_NEED
from store.link.outages import LOST_CALL
from store.read.agreement import Agreement
from store.read.gates import GatedPolicy, VersionInRole
from store.read.health import BegunPolicy, CallCount, EpisodeCounts, UnmatchedFeedback
from store.versions import PolicyVersion
from trainer.recipes.recipe import Recipe
from trainer.updates.circuit_breaker import PauseReason
from trainer.updates.claiming import claim_rule
from trainer.updates.training_warnings import TrainingProblem

NOW = datetime(2026, 11, 26, 12, tzinfo=UTC)
HOUR = NOW - timedelta(hours=1)


def ago(**time: float) -> datetime:
    return NOW - timedelta(**time)


def kind(**changes: Any) -> CallCount:
    """Forty calls of `m` that can be trained."""
    made = CallCount(
        policy="m",
        model=None,
        reason=None,
        http_status=200,
        split="train",
        calls=40,
        first_at=HOUR,
        last_at=ago(minutes=1),
    )
    return replace(made, **changes)


def version(number: int, **changes: Any) -> PolicyVersion:
    made = PolicyVersion(
        name="m",
        version=number,
        state="serving",
        served_name=f"m@{number}",
        adapter_path=f"/a/{number}",
        update_id=None,
    )
    return replace(made, **changes)


# Forty episodes of ten tasks, half of them solved.
COUNTS = EpisodeCounts(
    episodes=40,
    first_at=HOUR,
    scored=40,
    ended=40,
    scored_since=HOUR,
    least=0.0,
    most=1.0,
    tasks=10,
    largest_group=4,
    groups=10,
    groups_that_differ=5,
)


def policy(recipe: dict[str, Any] | None = None, **changes: Any) -> PolicyFacts:
    """A policy whose first version serves, and for whose next update all is there."""
    rule = Recipe.model_validate(recipe or {"claim": {"group_size": 4, "groups": 4}})
    about = BegunPolicy(name="m", base="base", tenant="default", created_at=HOUR, is_held=True)
    made = PolicyFacts(
        about=replace(about, trained_at=HOUR),
        recipe=rule,
        rule=claim_rule(rule, "m"),
        counts=COUNTS,
        updates=1.0,
        standing=GatedPolicy(
            now=NOW,
            frozen=False,
            is_held=False,
            serving=VersionInRole(version=version(1), since=HOUR),
        ),
        servable=(version(1),),
        live=LiveCounts(serving=1, kept=0, coming=0),
    )
    return replace(made, **changes)


def counted(**changes: Any) -> PolicyFacts:
    return policy(counts=replace(COUNTS, **changes))


def sample(name: str, value: float, **labels: str) -> Sample:
    return Sample(name=name, labels=labels, value=value)


NOT_JUDGED = sample("pawl_controller_gate_failed", 1.0, policy="m")


def trainer(*samples: Sample) -> ProcessAnswer:
    return ProcessAnswer(address="127.0.0.1:8102", samples=samples)


def facts(*policies: PolicyFacts, **changes: Any) -> Facts:
    """A system that works, with these policies instead of its own."""
    models = {
        "base": {"root": "/base", "parent": None, "max_model_len": 2048},
        "m@1": {"root": "/a/1", "parent": "base"},
    }
    made = Facts(
        now=NOW,
        data_url="http://127.0.0.1:8100",
        proxy=ProcessAnswer(address="127.0.0.1:8101"),
        trainer=trainer(),
        controller=ProcessAnswer(address="127.0.0.1:8103"),
        servers=(ReplicaAnswer(url="http://gpu:8000/v1", models=models, slots=8),),
        disks=(Disk(setting="PAWL_SPOOL_DIR", folder="var/spool", free_gib=50.0),),
        calls=(kind(),),
        policies=policies or (policy(),),
    )
    return replace(made, **changes)


AWAY = "Cannot connect"
IS_STUCK = Ready(drain=Drain(state="stuck", for_s=60.0, reason="disk full", held=7))
MISSERVED = Ready(misserved={"http://gpu:8000/v1": {"m@1": "it is 0.4 nats off"}})
WAITING = Ready(waiting={"m@2": "its base model's log-probabilities differ", "n@1": "away"})
LONG_FULL = LiveCounts(serving=4, held=4, kept=1, coming=0)
KEPT_FULL = LiveCounts(serving=1, held=1, kept=6, coming=0)


def kept(number: int, *, is_under_way: bool = True) -> tuple[VersionKeptForEpisodes, ...]:
    """So many versions, one of which is kept for another 400 seconds at most, and so on."""
    return tuple(
        VersionKeptForEpisodes(
            name="m",
            version=version,
            served_name=f"m@{version}",
            is_under_way=is_under_way,
            at_most_s=400.0 + version,
        )
        for version in range(number)
    )


TRIED = GatedPolicy(
    now=NOW,
    frozen=False,
    is_held=False,
    serving=VersionInRole(version=version(1), since=HOUR),
    canary=VersionInRole(version=version(2, state="canary", share=0.1), since=HOUR),
)
SUM = {"reward": {"correct": {"range": [0, 1]}}, "claim": {"group_size": 4, "groups": 4}}
SFT = {
    "learner": "sft",
    "claim": {"group_size": 1, "groups": 4},
    "credit": {"baseline": "none", "normalisation": "none"},
}
YOUNG = sample("process_start_time_seconds", ago(minutes=9).timestamp())
LONGEST = sample("pawl_longest_call_tokens", 512.0)
DRIFT = sample("pawl_update_drift_kl", 0.08, policy="m")
FAR_OFF = sample("pawl_update_probe_difference", 0.14, policy="m")


@pytest.mark.parametrize(
    ("known", "title", "remedy", "needs_person"),
    [
        (facts(unusable={"PAWL_POLICIES": "line 3"}), "PAWL_POLICIES cannot", "error names", False),
        (
            facts(
                unusable={"PAWL_UPSTREAMS": "OPENAI_API_KEY is not set"},
                proxy=ProcessAnswer(address="", why_not=AWAY),
            ),
            "PAWL_UPSTREAMS cannot be used",
            "correct what the error names",
            True,
        ),
        (
            facts(disks=(Disk(setting="PAWL_SPOOL_DIR", folder="var/spool", free_gib=0.4),)),
            "The disk of var/spool is nearly full",
            "PAWL_SPOOL_DIR",
            True,
        ),
        (
            facts(proxy=ProcessAnswer(address="", ready=Ready(recording_outage_s=30.0))),
            "Records are being lost",
            "PAWL_SPOOL_DIR",
            True,
        ),
        (
            facts(proxy=ProcessAnswer(address="", ready=IS_STUCK)),
            "Records wait on",
            "`pawl spool`",
            True,
        ),
        (facts(letters=3), "The database refused records", "--replay", True),
        (
            facts(
                policy(about=replace(policy().about, is_held=False)),
                trainer=ProcessAnswer(address="", why_not="503 the model is being loaded"),
            ),
            "The trainer loads its model",
            "wait",
            False,
        ),
        (facts(unbegun=("w",), trainer=trainer(YOUNG)), "No trainer works on w", "wait", False),
        (facts(unbegun=("writer",)), "No trainer works on writer", "PAWL_POLICIES", True),
        (
            facts(policy(about=replace(policy().about, base="qwen"))),
            "The model server does not have qwen, the base model of m",
            "--served-model-name qwen",
            True,
        ),
        (
            facts(calls=(kind(last_at=ago(days=2)),)),
            "No calls arrived for a day",
            "OPENAI_BASE_URL=http://127.0.0.1:8100/v1",
            True,
        ),
        (
            facts(
                calls=(),
                proxy=ProcessAnswer(
                    address="", samples=(sample("pawl_refused_total", 5.0, reason="NoKey"),)
                ),
            ),
            "No calls arrive",
            "pawl keys create",
            True,
        ),
        (
            facts(calls=(kind(split="eval", first_at=ago(hours=3)),)),
            "Only evaluation arrives",
            "x-pawl-split",
            True,
        ),
        (
            facts(calls=(kind(), kind(policy=None, model="gpt\x1b[2J", calls=20))),
            "Calls ask for 'gpt\\x1b[2J'",
            'model = "m"',
            False,
        ),
        (
            facts(calls=(kind(calls=60), kind(reason="not_text", calls=40))),
            "m: 40 of the newest 100 calls cannot be trained",
            "text alone",
            False,
        ),
        (
            facts(calls=(kind(calls=9), kind(split="eval", reason="incomplete"))),
            "m: 40 of the newest 49 calls broke off",
            "timeout",
            True,
        ),
        (
            facts(counted(quarantined=80, quarantined_as=LOST_CALL)),
            "m: 80 of the newest 120 episodes are quarantined",
            "PAWL_SPOOL_DIR",
            True,
        ),
        (
            facts(counted(quarantined=1, quarantined_as=DOUBTFUL_NEED)),
            "m: 1 of the newest 41 episodes are quarantined",
            "x-pawl-episode",
            False,
        ),
        (
            facts(database="no database in /var", proxy=ProcessAnswer(ready=Ready(database="up"))),
            "The database cannot be used from here, while the proxy says that its own is up",
            "PAWL_DATA_DIR",
            True,
        ),
        (  # A server that hangs, before the proxy has found it out.
            facts(database="no answer within 4 s", proxy=ProcessAnswer(ready=Ready(database="up"))),
            "The database cannot be used from here, while the proxy says that its own is up",
            "if it is the same database, mend what the error names",
            True,
        ),
        (
            facts(database="refused", proxy=ProcessAnswer(ready=Ready(database="away"))),
            "The database cannot be used: records wait on disk",
            "start PostgreSQL",
            True,
        ),
        (
            facts(
                database="refused",
                **dict.fromkeys(("proxy", "trainer", "controller"), ProcessAnswer(why_not=AWAY)),
                servers=(ReplicaAnswer(url="http://gpu:8000/v1", why_not=AWAY),),
            ),
            "Pawl does not run here",
            "`pawl up`",
            True,
        ),
        (
            facts(
                unmatched=UnmatchedFeedback(
                    statements=3, since=HOUR, kind="episode", target="run-7"
                )
            ),
            "Feedback is about calls or episodes that were never recorded",
            "`id` of the reply",
            True,
        ),
        (
            facts(policy(SUM, lacks={"missing_metric": 30})),
            "m: 30 episodes have feedback and no reward (missing_metric)",
            "[reward]: correct",
            True,
        ),
        (
            facts(counted(scored=10, ended=30)),
            "m: 20 of 30 episodes that are over have no reward",
            "`pawl judge`",
            True,
        ),
        (
            facts(counted(groups_that_differ=0)),
            "m: rewards are equal within each task",
            "`sft`",
            True,
        ),
        (
            facts(policy(SFT, counts=replace(COUNTS, most=0.5))),
            "m: no episode reached the least reward that is imitated",
            "sft.min_reward",
            True,
        ),
        (
            facts(trainer=trainer(sample("pawl_policy_left", 1.0, policy="m"))),
            "m: the trainer stopped working on it",
            "trainer's log",
            True,
        ),
        (
            facts(trainer=trainer(sample("pawl_trainer_paused", 1.0, policy="m", reason="drift"))),
            "m: training is paused (drift)",
            "PAWL_DEFAULT_SAMPLING",
            True,
        ),
        (
            facts(policy(live=LONG_FULL, kept=kept(1))),
            "m: no update begins, as all 8",
            "PAWL_ADAPTER_SLOTS=16",
            True,
        ),
        (
            facts(policy(live=KEPT_FULL, kept=kept(6))),
            "m: no update begins, as all 8",
            "wait for at most 400 s",
            False,
        ),
        (
            facts(trainer=trainer(DRIFT)),
            "m: model server and trainer disagree",
            "PAWL_TOOL_PARSER",
            True,
        ),
        (
            facts(controller=ProcessAnswer(address="", ready=MISSERVED)),
            "m: not served as trained: m@1",
            "`pawl policies check`",
            True,
        ),
        (
            facts(controller=ProcessAnswer(address="", ready=WAITING)),
            "m: not served as trained: m@2",
            "`pawl controller`",
            True,
        ),
        (
            facts(controller=ProcessAnswer(address="", samples=(FAR_OFF,))),
            "m: model server and trainer disagree",
            "PAWL_TOOL_PARSER",
            True,
        ),
        (
            facts(controller=ProcessAnswer(address="", why_not=AWAY)),
            "The controller does not answer",
            "`pawl controller`",
            True,
        ),
        (
            facts(policy(standing=TRIED), controller=ProcessAnswer(address="", why_not=AWAY)),
            "The controller does not answer",
            "`pawl controller`",
            True,
        ),
        (
            facts(policy(problems={"collapsed": TrainingProblem("worse than 1", "roll back")})),
            "m: worse than 1",
            "roll back",
            True,
        ),
        (
            facts(counted(least=-1.0)),
            "m: rewards of -1 to 1 are outside the range of 0 to 1",
            "publish.reward_range",
            True,
        ),
        (facts(policy(standing=TRIED)), "m@2 is being tried", "wait", False),
        (
            facts(
                policy(standing=TRIED), controller=ProcessAnswer(address="", samples=(NOT_JUDGED,))
            ),
            "m@2 cannot be judged",
            "in the controller's log (policy_not_judged)",
            True,
        ),
        (
            facts(proxy=ProcessAnswer(address="", asks_key=True)),
            "The proxy refuses PAWL_API_KEY",
            "read",
            False,
        ),
        (facts(trainer=trainer(LONGEST)), "Calls longer than 512", "PAWL_MAX_MODEL_LEN=512", False),
    ],
)
def test_finding_names_the_trouble_and_the_remedy(
    known: Facts, title: str, remedy: str, needs_person: bool
) -> None:
    first = findings(known)[0]
    assert first.title.startswith(title)
    assert remedy in first.remedy
    assert first.needs_person is needs_person


def troubles(known: Facts) -> list[Finding]:
    """The findings, but for the outlook of a policy that learns."""
    return [one for one in findings(known) if not one.is_outlook]


def test_doctor_reports_only_an_outlook_for_a_working_system() -> None:
    [outlook] = findings(facts())
    assert not outlook.needs_person
    assert outlook.title == (
        "m: about 40 of 40 episodes an hour count towards an update; the next update now"
    )


def test_idle_versions_in_all_slots_are_no_finding() -> None:
    assert troubles(facts(policy(live=KEPT_FULL, kept=kept(6, is_under_way=False)))) == []


@pytest.mark.parametrize(
    "known",
    [
        policy(
            {"publish": {"reward_range": [-1, 1]}, "claim": {"group_size": 4, "groups": 4}},
            counts=replace(COUNTS, least=-1.0),
        ),
        policy(SUM, counts=replace(COUNTS, most=1.5)),
        counted(first_at=ago(days=2), alike=4),
    ],
    ids=["declared range", "range of the sum", "enough a day"],
)
def test_enough_rewards_within_their_range_are_no_finding(known: PolicyFacts) -> None:
    assert troubles(facts(known)) == []


def test_findings_that_need_a_person_come_first() -> None:
    paused = trainer(sample("pawl_trainer_paused", 1.0, policy="m", reason="failed"))
    found = findings(facts(controller=ProcessAnswer(address="", why_not=AWAY), trainer=paused))
    assert [one.needs_person for one in found] == [True, True, False]


def test_outlook_counts_usable_and_unusable_episodes_and_forecasts() -> None:
    """Of 50 episodes in two days 10 have no reward, and 20 are attempts that are all alike."""
    known = policy(
        counts=replace(COUNTS, episodes=50, first_at=ago(days=2), scored=40, alike=20),
        updates=0.5,
        about=replace(policy().about, trained_at=None),
    )
    [found] = [one for one in findings(facts(known)) if one.is_outlook]
    assert not found.needs_person
    assert found.figures == {"usable": 20, "without a reward": 10, "all alike": 20}
    assert found.title == (
        "m: about 10 of 25 episodes a day count towards an update (of 50: 10 without a reward,"
        " 20 all alike); the next update in about 19 hours; a first difference in about 12 days to"
        " 75 days, if it takes 250 episodes as the packaged task does, or 1500 as the slowest of"
        " six others"
    )
    assert found.remedy == "give tasks that succeed sometimes, or rewards between all and nothing"


def test_there_is_no_outlook_where_nothing_can_be_trained() -> None:
    for none in (counted(scored=0, least=None, most=None), counted(alike=40)):
        assert not any(one.is_outlook for one in findings(facts(none)))


@pytest.mark.parametrize(
    ("time", "words"),
    [
        (timedelta(seconds=40), "about 40 seconds"),
        (timedelta(seconds=85), "about 85 seconds"),
        (timedelta(hours=0.04), "about 2 minutes"),
        (timedelta(hours=1.4), "about 84 minutes"),
        (timedelta(days=1.6), "about 2 days"),
    ],
)
def test_doctors_forecast_is_given_in_the_largest_fitting_unit_of_time(
    time: timedelta, words: str
) -> None:
    assert describe_time(time) == words


def test_equal_rewards_within_groups_are_no_trouble_where_groups_are_not_compared() -> None:
    ppo = {
        "learner": "ppo",
        "claim": {"group_size": 4, "groups": 4},
        "credit": {"baseline": "none", "normalisation": "batch"},
    }
    assert troubles(facts(policy(ppo, counts=replace(COUNTS, groups_that_differ=0)))) == []


def test_random_judge_and_unmeasured_judge_are_findings() -> None:
    dice = Agreement(source="dice", statements=90, compared=40, share=0.52, error=0.05)
    good = Agreement(source="good", statements=90, compared=40, share=0.9, error=0.03)
    new = Agreement(source="new", statements=90, compared=3)
    assert troubles(facts(policy(judges=(good,)))) == []
    [found] = troubles(facts(policy(judges=(dice, good, new))))
    assert ("'dice' agrees with facts in 52%" in found.title, found.needs_person) == (True, True)
    [found] = troubles(facts(policy(judges=(good, new))))
    assert ("'new' is unmeasured" in found.title, found.needs_person) == (True, False)
    assert "20 episodes" in found.remedy


def test_doctor_leaves_side_calls_out_of_all_counts() -> None:
    side = kind(reason="side", calls=1000)
    assert troubles(facts(calls=(kind(), side))) == []
    greedy = kind(reason="greedy", calls=20)
    [found] = troubles(facts(calls=(kind(), side, greedy)))
    assert found.title.startswith("m: 20 of the newest 60 calls")


def test_greedy_calls_are_no_trouble_for_a_learner_that_imitates() -> None:
    greedy = (kind(reason="greedy"),)
    assert troubles(facts(policy(SFT), calls=greedy)) == []
    [found] = troubles(facts(calls=greedy))
    assert "temperature 0" in found.title


def test_remedy_for_calls_without_token_ids_names_messages_that_chat_cannot_express() -> None:
    [found] = troubles(facts(calls=(kind(reason="no_token_ids"),)))
    assert "messages that chat completions cannot express" in found.remedy


def test_doctor_has_a_remedy_for_every_untrainable_reason_and_pause_reason() -> None:
    assert set(REMEDIES) == set(get_args(Reason))
    assert set(PAUSE_REMEDIES) == set(get_args(PauseReason))


def test_findings_of_another_tenants_policy_are_not_shown() -> None:
    paused = sample("pawl_trainer_paused", 1.0, policy="theirs", reason="failed")
    assert troubles(facts(trainer=trainer(paused))) == []
    for away in ({"database": AWAY}, {"is_late": True}):
        titles = [one.title for one in findings(facts(trainer=trainer(paused), tenant="a", **away))]
        assert [title for title in titles if "theirs" in title] == []


@pytest.mark.parametrize("away", [{"database": AWAY}, {"is_late": True, "calls": ()}])
def test_doctor_tells_a_tenant_that_the_database_did_not_answer_completely(
    away: dict[str, Any],
) -> None:
    found = findings(replace(facts(tenant="a", **away), policies=()), of_parts=False)
    assert ["The database" in one.title for one in found] == [True]
    assert AWAY not in repr(found)


def test_tenant_is_shown_no_address_of_a_server() -> None:
    found = findings(facts(policy(servable=(version(2),))), of_parts=False)
    assert "not served as trained: m@2" in found[0].title
    assert "gpu" not in repr(found)
