"""/feedback: durable, order-free, idempotent, and clear about what it does not take."""

from uuid import uuid4

from tests.integration.conftest import Proxy
from tests.support.waiting import eventually


async def test_a_reward_for_a_known_episode_is_stored(proxy: Proxy) -> None:
    await proxy.chat(headers={"x-pawl-episode": "e"})
    status, body = await proxy.feedback({"value": 0.8, "episode": "e"})
    assert (status, body["results"][0]["status"]) == (200, "stored")

    async def scored() -> bool:
        [episode] = await proxy.episodes(1)
        return [f.value for f in episode.feedback] == [0.8]

    assert await eventually(scored)


async def test_texts_truth_values_and_withdrawals_are_kept_as_they_came(proxy: Proxy) -> None:
    await proxy.chat(headers={"x-pawl-episode": "e"})
    said = [
        {"metric": "verdict", "value": "good", "episode": "e"},
        {"metric": "right", "value": True, "episode": "e"},
        {"metric": "reward", "withdrawn": True, "episode": "e"},
    ]
    assert (await proxy.feedback(said))[0] == 200

    async def kept() -> bool:
        [episode] = await proxy.episodes(1)
        values = {one.metric: one.value for one in episode.feedback}
        return values == {"verdict": "good", "right": 1.0, "reward": None}

    assert await eventually(kept)


async def test_each_kind_of_target_is_known(proxy: Proxy) -> None:
    response = await proxy.chat()
    statements = [
        {"value": 1, "call": response.headers["x-pawl-call"]},
        {"value": 1, "response": response.json["id"]},
        {"value": 1, "episode": response.headers["x-pawl-episode"]},
    ]
    assert (await proxy.feedback(statements))[0] == 200


async def test_a_target_not_seen_yet_is_pending(proxy: Proxy) -> None:
    status, body = await proxy.feedback({"value": 1, "call": str(uuid4())})
    assert (status, body["results"][0]["status"]) == (202, "pending")
    await proxy.feedback({"value": 0.3, "episode": "later"})
    await proxy.chat(headers={"x-pawl-episode": "later"})

    async def scored() -> bool:
        return any(f.value == 0.3 for e in await proxy.episodes(1) for f in e.feedback)

    assert await eventually(scored)


async def test_a_repeat_under_a_key_is_harmless_and_another_body_is_refused(proxy: Proxy) -> None:
    await proxy.chat(headers={"x-pawl-episode": "e"})
    key = {"Idempotency-Key": uuid4().hex}
    for _ in range(3):
        assert (await proxy.feedback({"value": 1, "episode": "e"}, **key))[0] == 200
    status, body = await proxy.feedback({"value": 2, "episode": "e"}, **key)
    assert status == 409
    assert "Idempotency-Key" in body["error"]["message"]

    async def stated() -> bool:
        return any(e.feedback for e in await proxy.episodes(1))

    await eventually(stated)
    [episode] = await proxy.episodes(1)
    assert len(episode.feedback) == 1


async def test_a_list_stands_or_falls_as_one(proxy: Proxy) -> None:
    before = (await proxy.counters())["pawl_records_total"]
    status, body = await proxy.feedback(
        [{"value": 1, "episode": "e"}, {"value": "1", "episode": "e"}]
    )
    assert status == 400
    assert body["error"]["param"] == "[1].value"
    assert (await proxy.counters())["pawl_records_total"] == before


async def test_a_tool_status_reaches_the_call_that_asked(proxy: Proxy) -> None:
    response = await proxy.chat()
    response_id = response.json["id"]
    statement = {"metric": "tool_status", "value": "malformed", "response": response_id}
    assert (await proxy.feedback(statement))[0] == 200

    async def told() -> bool:
        call = await proxy.only_call()
        return [e.status for e in call.tool_events] == ["malformed"]

    assert await eventually(told)
