"""One trainer of several policies: whose turn it is, what fails alone, and who goes live when."""

import asyncio
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from controller import publishing
from store import claims, version_states
from tests.support.controller.replicas import reconcile
from tests.support.faults.killing import Killed, killing
from tests.support.trainer.policies import NAMES, Policies
from tests.support.waiting import until
from trainer.errors import AdapterError, FilesUnread, PublishError
from trainer.loop import Loop
from trainer.metrics import LEFT_POLICY
from trainer.publishing.adapters import version_folder
from trainer.publishing.model_server import Replicas
from trainer.scheduler import PolicyWorker


async def test_policy_with_the_most_waiting_updates_is_trained_next(
    policies: Policies,
) -> None:
    # 16 episodes are two updates of the writer's; 6 are three of the checker's.
    await policies.fill({"writer": 16, "checker": 6})
    assert await policies.turns(5) == ["checker", "writer", "checker", "writer", "checker"]
    assert await policies.serving() == {"writer": 2, "checker": 3}


async def test_a_policy_that_fails_does_not_stop_the_other(policies: Policies) -> None:
    await policies.fill({"writer": 16, "checker": 4})
    policies.learners["checker"].restore_fails = AdapterError("its files are gone")
    assert await policies.turns(2) == ["writer", "writer"]
    assert LEFT_POLICY.labels("checker")._value.get() == 1
    # Its episodes are held by its update, which who works on it next gives up.
    policies.learners["checker"].restore_fails = None
    assert await policies.turns(2) == ["writer", "writer", "checker", "checker"]
    assert LEFT_POLICY.labels("checker")._value.get() == 0


@pytest.mark.parametrize("fails", [False, True])
async def test_trainer_is_ready_once_its_model_servers_have_passed_the_self_test(
    policies: Policies, fails: bool
) -> None:
    begins, is_tested = asyncio.Event(), asyncio.Event()
    async with policies.scheduler(["checker"]) as scheduler:
        worker = scheduler._workers["checker"]
        begin = worker._begin

        async def after_the_test(engine: AsyncEngine) -> Loop:
            begins.set()
            await is_tested.wait()
            if fails:
                raise PublishError("the model server serves another model")
            return await begin(engine)

        worker._begin = after_the_test
        work = asyncio.create_task(scheduler.run(0.01, once=False))
        await asyncio.wait_for(begins.wait(), 30)
        assert not policies.is_ready.is_set()
        is_tested.set()
        if fails:
            with pytest.raises(PublishError, match="serves another model"):
                await asyncio.wait_for(work, 30)
        else:
            await asyncio.wait_for(policies.is_ready.wait(), 30)
            work.cancel()
            await asyncio.wait([work])
    assert policies.is_ready.is_set() is not fails


async def test_trainer_ends_if_all_its_policies_fail(policies: Policies) -> None:
    await policies.fill({"writer": 16, "checker": 4})
    for learner in policies.learners.values():
        learner.restore_fails = AdapterError("its files are gone")
    async with policies.scheduler() as scheduler:
        with pytest.raises(AdapterError, match="its files are gone"):
            await asyncio.wait_for(scheduler.run(0.01, once=True), 30)


async def test_trainer_resumes_by_itself_after_its_files_are_readable_again(
    policies: Policies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.scheduler.FIRST_PAUSE_S", 0.05)
    await policies.fill({"checker": 2})
    learner = policies.learners["checker"]
    learner.restore_fails = FilesUnread("weights cannot be read (Input/output error)")
    async with policies.scheduler(["checker"]) as scheduler:
        # It has no other policy, and does not end.
        work = asyncio.create_task(scheduler.run(0.01, once=True))
        await until(lambda: LEFT_POLICY.labels("checker")._value.get() == 1)
        await until(lambda: work.done() or scheduler._workers["checker"]._failures > 1)
        assert not work.done()
        learner.restore_fails = None
        await asyncio.wait_for(work, 30)
    assert await policies.states() == {"checker@1": "serving"}
    assert LEFT_POLICY.labels("checker")._value.get() == 0


async def test_policys_rejected_versions_do_not_stop_another_policy(policies: Policies) -> None:
    await policies.fill({"writer": 8, "checker": 6})
    policies.learners["checker"].served_off = -5.0
    # After two in a row it holds, and its other episodes wait.
    async with policies.scheduler() as scheduler:
        for _ in range(6):
            await scheduler._run_turn(await scheduler._hold_workable())
    assert sorted(await policies.updates()) == ["checker"] * 2 + ["writer"]
    assert await policies.serving() == {"writer": 1, "checker": 0}
    assert [s for name, s in (await policies.states()).items() if "checker" in name] == [
        "rejected"
    ] * 2


async def test_policy_that_another_trainer_works_on_is_skipped(
    policies: Policies,
) -> None:
    await policies.fill({"writer": 8, "checker": 8})
    async with policies.engine.connect() as other:
        assert await claims.hold_policy(other, "checker")
        assert await policies.turns(1) == ["writer"]
        await other.invalidate()
    assert await policies.turns(1) == ["writer", "checker"]


async def test_failed_policy_can_be_taken_by_another_trainer(policies: Policies) -> None:
    await policies.fill({"writer": 8, "checker": 8})
    policies.learners["checker"].restore_fails = AdapterError("its files are gone")
    async with policies.scheduler() as scheduler, policies.engine.connect() as other:
        await scheduler._run_turn(await scheduler._hold_workable())
        assert await claims.hold_policy(other, "checker")
        assert not await claims.hold_policy(other, "writer")
        await other.invalidate()


async def test_slow_start_of_a_policy_does_not_delay_the_next_look_at_the_store(
    policies: Policies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server may take a minute to come up; the store is looked at as often as before."""
    looks, now, taken = 0, 0.0, PolicyWorker.try_to_hold
    looked_again = asyncio.Event()

    async def slowly(self: PolicyWorker, guard: Any, engine: Any) -> bool:
        nonlocal looks, now
        looks, now = looks + 1, now + 60.0
        if looks > 1:
            looked_again.set()
        return await taken(self, guard, engine)

    monkeypatch.setattr(PolicyWorker, "try_to_hold", slowly)
    # No time passes but in beginning: else the pause would depend on the machine.
    monkeypatch.setattr("trainer.scheduler.perf_counter", lambda: now)
    async with policies.scheduler(["writer"]) as scheduler:
        running = asyncio.create_task(scheduler.run(0.01, once=False))
        try:
            # Ten times a minute's beginning would be ten minutes.
            await asyncio.wait_for(looked_again.wait(), 120.0)
        finally:
            running.cancel()
            await asyncio.wait([running])
    assert looks > 1


# Versions that go live together


@pytest.fixture
def together(policies: Policies) -> Policies:
    policies.together = dict.fromkeys(NAMES, NAMES)
    return policies


async def test_versions_going_live_together_share_a_transaction(together: Policies) -> None:
    await together.fill({"writer": 8, "checker": 8})
    assert len(await together.turns(1)) == 1
    assert list((await together.states()).values()) == ["loaded"]
    assert await together.serving() == {"writer": 0, "checker": 0}
    assert sorted(await together.turns(1)) == ["checker", "writer"]
    assert await together.serving() == {"writer": 1, "checker": 1}
    async with together.engine.connect() as connection:
        query = text(
            "SELECT count(DISTINCT CAST(xmin AS text)) FROM policies WHERE state = 'serving'"
        )
        assert await connection.scalar(query) == 1


async def test_a_policy_trains_no_further_while_its_version_waits(together: Policies) -> None:
    await together.fill({"writer": 24})
    assert await together.turns(1) == ["writer"]
    await together.turn()
    assert await together.updates() == ["writer"]


async def test_policy_without_a_version_does_not_keep_its_partner_waiting_for_ever(
    together: Policies,
) -> None:
    await together.fill({"writer": 24})
    await together.turns(1)
    together.wait_s = 1e-6
    await together.turn()
    # And it trains on: the next version has waited for so long, too.
    assert await together.updates() == ["writer", "writer"]
    assert await together.serving() == {"writer": 2, "checker": 0}


async def test_rejected_version_keeps_partner_policies_waiting_until_the_next_version(
    together: Policies,
) -> None:
    await together.fill({"writer": 8, "checker": 2})
    together.learners["checker"].served_off = -5.0
    await together.turns(2)
    assert await together.states() == {"writer@1": "loaded", "checker@1": "rejected"}
    assert await together.serving() == {"writer": 0, "checker": 0}
    together.learners["checker"].served_off = 0.0
    await together.fill({"checker": 2}, "u")
    await together.turns(1)
    assert await together.serving() == {"writer": 1, "checker": 2}


@pytest.mark.parametrize("first", [("writer",), ("checker",)])
async def test_two_trainers_bring_their_policies_live_together(
    together: Policies, first: tuple[str]
) -> None:
    await together.fill({"writer": 8, "checker": 2})
    await together.turn(first)
    assert set((await together.states()).values()) == {"loaded"}
    await together.turn([name for name in NAMES if name not in first])
    assert await together.serving() == {"writer": 1, "checker": 1}


async def test_restarted_server_reloads_a_waiting_version(together: Policies) -> None:
    await together.fill({"writer": 8})
    await together.turns(1)
    together.fake.loaded.clear()
    async with Replicas([together.fake.url]) as servers:
        await reconcile(together.engine, servers)
    assert list(together.fake.loaded) == ["writer@1"]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    ("where", "step"),
    [
        (publishing, "make_loaded"),
        (version_states, "promote"),
        (publishing, "promote_together"),
    ],
)
async def test_kill_while_going_live_leaves_no_policy_live_alone(
    together: Policies, monkeypatch: pytest.MonkeyPatch, where: Any, step: str, after: bool
) -> None:
    await together.fill({"writer": 8, "checker": 2})
    await together.turns(1)
    killing(where, step, after=after)(monkeypatch)
    with pytest.raises(Killed):
        await together.turn()
    assert await together.serving() == {"writer": 0, "checker": 0}
    await together.turn()
    assert await together.serving() == {"writer": 1, "checker": 1}


async def test_waiting_version_goes_live_by_itself_once_policies_need_not_go_live_together(
    together: Policies,
) -> None:
    await together.fill({"writer": 8})
    await together.turns(1)
    assert version_folder(together.folder, "writer", 1).exists()
    # Policies that need no longer go live together do so by themselves.
    together.together = {}
    await together.turn()
    assert await together.serving() == {"writer": 1, "checker": 0}
