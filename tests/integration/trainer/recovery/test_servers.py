"""Model servers that fail, restart or do not fit: the version before serves on, or all waits."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine
from structlog.testing import capture_logs

from benchmarks.stack import free_port
from store.version_states import recall
from tests.support.controller.replicas import publish, reconcile, unload
from tests.support.servers.fake_server import FakeModelServer, fake_model_server
from tests.support.trainer.bench import (
    OWN,
    STEPS,
    TEST_LOGPROB,
    Bench,
    paused_for,
    try_again,
)
from trainer.errors import PublishError, ShortOfMemory, UpstreamAway
from trainer.publishing.model_server import ModelServer, Replicas

NOBODY = "http://127.0.0.1:9/v1"


@pytest.mark.parametrize("fault", ["served wrongly", "refused"])
async def test_version_that_the_model_server_refuses_or_serves_wrongly_is_rejected(
    bench: Bench, fault: str
) -> None:
    if fault == "refused":
        bench.fake.refused = {"m@1"}
    else:
        bench.fake.logprobs["m@1"] = -7.0
    await bench.run_once()
    assert await bench.states() == {0: "serving", 1: "rejected"}
    assert bench.fake.loaded == {}
    await bench.update("u")
    assert bench.learner.restored is None
    assert await bench.states() == {0: "retired", 1: "rejected", 2: "serving"}


async def test_a_restarted_server_gets_its_adapters_back(bench: Bench) -> None:
    await bench.run_once()
    bench.fake.loaded.clear()
    bench.fake.refuse_load = True
    async with Replicas([bench.fake.url]) as server:
        # A version that cannot be loaded stops nothing.
        await reconcile(bench.engine, server)
        bench.fake.refuse_load = False
        await reconcile(bench.engine, server)
    assert list(bench.fake.loaded) == ["m@1"]


async def test_version_goes_live_although_the_server_lost_its_parent_version(
    bench: Bench,
) -> None:
    """The version is what repairs the policy."""
    await bench.run_once()
    bench.fake.loaded.clear()
    bench.fake.refused = {"m@1"}
    await bench.update("u")
    assert (await bench.states())[2] == "serving"
    bench.fake.refused = {"m@2"}
    bench.fake.loaded.clear()
    # What is served as the base model has not been loaded.
    bench.fake.logprobs["m@3"] = OWN
    await bench.update("v")
    assert (await bench.states())[3] == "rejected"
    await bench.assert_spent_once(12)


@pytest.mark.parametrize("fault", ["its engine is dead", "it restarts between load and probe"])
async def test_a_server_that_cannot_answer_rejects_no_version(bench: Bench, fault: str) -> None:
    if fault == "its engine is dead":
        bench.fake.engine_is_dead = True
    else:
        bench.fake.forgets = {"m@1"}
    assert await bench.run_once()
    assert (await bench.states())[1] == "written"
    bench.fake.engine_is_dead = False
    await bench.run_once()
    assert await bench.states() == {0: "retired", 1: "serving"}


# Several replicas


@pytest.fixture
async def other(bench: Bench) -> AsyncIterator[FakeModelServer]:
    """Another replica, which answers as the bench's own does."""
    async with fake_model_server() as server:
        server.logprobs = bench.fake.logprobs
        yield server


async def test_an_update_goes_live_on_every_replica(bench: Bench, other: FakeModelServer) -> None:
    async with bench.working(bench.fake.url, other.url) as loop:
        assert await loop.update_once()
        assert bench.fake.loads == other.loads == ["m@1"]
        # One was restarted: it alone loads again.
        other.loaded.clear()
        await reconcile(bench.engine, loop._servers)
        assert (bench.fake.loads, other.loads) == (["m@1"], ["m@1", "m@1"])


async def test_replica_without_the_parent_probes_against_the_base_model(
    bench: Bench, other: FakeModelServer
) -> None:
    async with bench.working(bench.fake.url, other.url) as loop:
        assert await loop.update_once()
        await bench.fill("u")
        # It was restarted in the middle of an update.
        other.loaded.clear()
        assert await loop.update_once()
        assert (await bench.states())[2] == "serving"
        assert set(other.loaded) == {"m@2"}
        await reconcile(bench.engine, loop._servers)
    assert set(other.loaded) == {"m@1", "m@2"}


async def test_version_misserved_by_a_replica_is_rejected_and_unloaded_everywhere(
    bench: Bench, other: FakeModelServer
) -> None:
    other.logprobs = {"m": OWN, "m@1": -9.0}
    async with bench.working(bench.fake.url, other.url) as loop:
        await loop.update_once()
    assert (await bench.states())[1] == "rejected"
    assert not bench.fake.loaded
    assert not other.loaded


async def test_while_a_replica_is_away_training_and_publishing_go_on(bench: Bench) -> None:
    async with bench.working(NOBODY, bench.fake.url) as loop:
        await loop.watch_servers()
        assert await loop.update_once()
        assert await bench.states() == {0: "retired", 1: "serving"}
        await bench.fill("u")
        await loop.watch_servers()
        assert await loop.update_once()
    assert await bench.states() == {0: "retired", 1: "retired", 2: "serving"}
    assert bench.fake.loads == ["m@1", "m@2"]


async def test_with_every_replica_away_a_version_waits(bench: Bench) -> None:
    async with bench.working(NOBODY, f"http://127.0.0.1:{free_port()}/v1") as loop:
        assert await loop.update_once()
        assert (await bench.states())[1] == "written"
        with pytest.raises(UpstreamAway):
            await loop.watch_servers()
    await bench.assert_spent_once(4)
    async with bench.working():
        assert (await bench.states())[1] == "serving"


@pytest.mark.parametrize("is_recalled", [False, True])
async def test_version_recalled_while_servers_list_their_models_stays_loaded(
    engine: AsyncEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_recalled: bool
) -> None:
    """Recalled: it was unloaded, and is to be loaded again."""
    await publish(engine, tmp_path, 1, 2)
    await unload(engine, 1)
    async with engine.begin() as connection:
        await connection.execute(text("UPDATE policies SET changed_at = now() - interval '1 day'"))
    models = ModelServer.models

    async def answer(server: ModelServer) -> list[str]:
        if is_recalled:
            async with engine.begin() as connection:
                await recall(connection, "m", 1, reason="it serves again", actor="operator")
        return await models(server)

    monkeypatch.setattr(ModelServer, "models", answer)
    async with fake_model_server() as server, Replicas([server.url]) as servers:
        server.loaded.update({"m@1": "/1", "m@2": "/2"})
        await reconcile(engine, servers)
        assert set(server.loaded) == ({"m@1", "m@2"} if is_recalled else {"m@2"})


async def test_idle_trainer_asks_its_servers_seldom_while_all_answer(
    bench: Bench,
) -> None:
    port = free_port()
    async with bench.working(bench.fake.url, f"http://127.0.0.1:{port}/v1") as loop:
        async with fake_model_server(port) as back:
            await loop.watch_servers()
            asked = bench.fake.lists
            for _ in range(5):
                await loop.watch_servers()
            assert bench.fake.lists == asked
            assert back.lists
        loop._ask_at = 0.0
        for _ in range(3):
            await loop.watch_servers()
    assert bench.fake.lists == asked + 3


# Self-tests: before the first claim, and once a server is back


async def test_a_server_that_was_away_is_tested_before_the_next_claim(bench: Bench) -> None:
    async with bench.working() as loop:
        loop._breaker.pause_until_test("the model servers were away")
        bench.fake.sampled_logprob = -4.0
        await loop.test_if_due()
        assert not await loop.update_once()
        assert (await bench.updates(), await bench.consumed()) == ([], 0)
        bench.fake.sampled_logprob = None
        assert await try_again(loop)
    await bench.assert_spent_once(4)


def full(*_: object) -> None:
    raise ShortOfMemory("the memory has no room")


async def test_trainer_pauses_at_its_start_until_memory_is_free(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench.working() as loop:
        with monkeypatch.context() as patched:
            patched.setattr(bench.learner, "write_test_adapter", full)
            await loop.check_server()
            assert loop._breaker.why == "the memory has no room"
            assert paused_for() == ["out_of_memory"]
            assert not await try_again(loop)
        assert (await bench.updates(), await bench.consumed()) == ([], 0)
        assert await try_again(loop)
        assert paused_for() == []
    await bench.assert_spent_once(4)


async def test_version_waits_while_the_server_has_another_base_model(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be rejected otherwise, and its episodes lost."""
    await bench.run_killed(monkeypatch, STEPS["before publishing"])
    bench.fake.logprobs |= {"m": -4.0, "m@1": -4.5}
    async with Replicas([bench.fake.url]) as servers:
        loop = bench.loop(servers)
        await loop.recover()
        assert (await bench.states())[1] == "written"
        assert not bench.fake.loaded
        # The next update is not made before it is known what becomes of this one.
        await bench.fill("u")
        assert not await loop.update_once()
        bench.fake.logprobs |= {"m": OWN, "m@1": -2.0}
        await loop.look()
    assert await bench.states() == {0: "retired", 1: "serving"}


async def test_self_test_overrides_the_servers_sampling_defaults(bench: Bench) -> None:
    async with bench.working() as loop:
        await loop.check_server()
    neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert bench.fake.sampled_with is not None
    assert bench.fake.sampled_with.items() >= neutral.items()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("refuses", "--max-lora-rank"),
        ("another base", "PAWL_MODEL"),
        ("another adapter", "LoRA in the layers"),
        ("raw", "--logprobs-mode processed_logprobs"),
    ],
)
async def test_unfit_server_is_refused_before_the_first_claim(
    bench: Bench, fault: str, message: str
) -> None:
    async with bench.working() as loop:
        await loop.check_server()
        if fault == "refuses":
            bench.fake.refuse_load = True
        elif fault == "another base":
            bench.fake.logprobs["m"] = -4.0
        elif fault == "another adapter":
            bench.learner.test_logprob = -4.0
        else:
            bench.fake.sampled_logprob = -4.0
        with pytest.raises(PublishError, match=message):
            await loop.check_server()
    assert bench.fake.loaded == {}
    assert not list(bench.folder.glob("m/*"))
    assert await bench.updates() == []


async def test_layers_that_the_server_ignores_are_not_trained(bench: Bench) -> None:
    bench.learner.kinds, bench.learner.ignored = ["a.*.q", "a.*.shared", "a.*.k"], {"a.*.shared"}
    bench.learner.ignored_once = {"a.*.k"}
    async with bench.working() as loop:
        with capture_logs() as logs:
            await loop.check_server()
    assert bench.learner.kinds == ["a.*.q", "a.*.k"]
    [said] = [line["layers"] for line in logs if line["event"] == "layers_left_out"]
    assert said == {"a.*.shared": "the model server ignores them"}


async def test_model_server_that_ignores_all_adapter_layers_fails_the_self_test(
    bench: Bench,
) -> None:
    bench.learner.kinds, bench.learner.ignored = ["a.*.q", "a.*.k"], {"a.*.q", "a.*.k"}
    bench.learner.test_logprob = OWN
    async with bench.working() as loop:
        with pytest.raises(PublishError, match=r"does not apply .*0% of its effect arrives"):
            await loop.check_server()
    assert bench.learner.kinds == ["a.*.q", "a.*.k"]


async def test_model_server_that_is_away_does_not_stop_the_self_test_of_the_others(
    bench: Bench,
) -> None:
    async with bench.working(NOBODY, bench.fake.url) as loop:
        await loop.check_server()
    async with bench.working(NOBODY) as loop:
        with pytest.raises(UpstreamAway):
            await loop.check_server()


async def test_replica_back_with_another_base_pauses_training_and_spends_no_episode(
    bench: Bench,
) -> None:
    port = free_port()
    async with bench.working(bench.fake.url, f"http://127.0.0.1:{port}/v1") as loop:
        await loop.watch_servers()
        assert await loop.update_once()
        await bench.fill("u")
        async with fake_model_server(port) as back:
            back.logprobs = {"m": -4.0, "m@1": -4.0}
            await loop.watch_servers()
            assert not back.loaded
            assert not await loop.update_once()
            await loop.test_if_due()
            assert "base model and the trainer's differ" in (loop._breaker.why or "")
            assert not await loop.update_once()
            assert (await bench.consumed(), await bench.claimed()) == (4, 4)
            # It has the right one again.
            back.logprobs = {"m": OWN, "m@self-test": TEST_LOGPROB, "m@2": -3.0}
            assert await try_again(loop)
            assert set(back.loaded) == {"m@2"}
    assert await bench.states() == {0: "retired", 1: "retired", 2: "serving"}
