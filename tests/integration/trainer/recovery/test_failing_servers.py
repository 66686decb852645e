"""A server serves a version wrongly, refuses it or has lost it: the one before it serves on."""

from tests.support.trainer.recovery import Bench, bench, run_once
from trainer.publishing.model_server import Replicas

__all__ = ["bench"]


async def test_a_version_that_is_not_served_right_is_rejected(bench: Bench) -> None:
    bench.fake.logprobs["m@1"] = -7.0
    await run_once(bench)
    assert await bench.states() == {0: "serving", 1: "rejected"}
    assert bench.fake.loaded == {}
    await bench.fill("u")
    await run_once(bench)
    assert bench.learner.restored is None
    assert await bench.states() == {0: "published", 1: "rejected", 2: "serving"}


async def test_a_version_that_cannot_be_loaded_again_stops_nothing(bench: Bench) -> None:
    await run_once(bench)
    bench.fake.loaded.clear()
    bench.fake.refuse_load = True
    async with Replicas([bench.fake.url]) as server:
        await bench.loop(server).sync_adapters()
        bench.fake.refuse_load = False
        await bench.loop(server).sync_adapters()
    assert list(bench.fake.loaded) == ["m@1"]


async def test_a_parent_that_the_server_has_lost_for_good_keeps_nothing_from_going_live(
    bench: Bench,
) -> None:
    """The probe compares with the base model instead: the version is what repairs the policy."""
    await run_once(bench)
    await bench.fill("u")
    bench.fake.loaded.clear()
    bench.fake.refused = {"m@1"}
    assert await run_once(bench)
    assert (await bench.states())[2] == "serving"
    await bench.fill("v")
    bench.fake.refused = {"m@2"}
    bench.fake.loaded.clear()
    # What is served as the base model has not been loaded.
    bench.fake.logprobs["m"] = bench.fake.logprobs["m@3"] = -4.0
    assert await run_once(bench)
    assert (await bench.states())[3] == "rejected"
    await bench.assert_spent_once(12)


async def test_a_server_that_refuses_the_load_keeps_the_old_version(bench: Bench) -> None:
    bench.fake.refuse_load = True
    await run_once(bench)
    assert await bench.states() == {0: "serving", 1: "rejected"}


async def test_a_restarted_server_gets_its_adapters_back(bench: Bench) -> None:
    await run_once(bench)
    bench.fake.loaded.clear()
    async with Replicas([bench.fake.url]) as server:
        await bench.loop(server).sync_adapters()
    assert list(bench.fake.loaded) == ["m@1"]
