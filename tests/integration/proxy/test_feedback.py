"""/feedback: durable, order-free, idempotent, and clear about what it does not take."""

from uuid import uuid4

from store.records import Episode
from tests.integration.conftest import Proxy


def values(episodes: list[Episode]) -> dict[str, float | str | None]:
    return {one.metric: one.value for episode in episodes for one in episode.feedback}


async def test_feedback_about_a_known_episode_is_stored_with_its_metrics_and_values(
    proxy: Proxy,
) -> None:
    await proxy.chat("/episode/e")
    said = [
        {"value": 0.8, "episode": "e"},
        {"metric": "verdict", "value": "good", "episode": "e"},
        {"metric": "right", "value": True, "episode": "e"},
        {"metric": "wrong", "withdrawn": True, "episode": "e"},
    ]
    status, body = await proxy.feedback(said)
    assert (status, {one["status"] for one in body["results"]}) == (200, {"stored"})
    found = await proxy.episodes(1, lambda found: len(values(found)) == 4)
    assert values(found) == {"reward": 0.8, "verdict": "good", "right": 1.0, "wrong": None}


async def test_feedback_may_target_a_call_a_response_or_an_episode(proxy: Proxy) -> None:
    response = await proxy.chat()
    statements = [
        {"value": 1, "call": response.headers["x-pawl-call"]},
        {"value": 1, "response": response.json["id"]},
        {"value": 1, "episode": response.headers["x-pawl-episode"]},
    ]
    assert (await proxy.feedback(statements))[0] == 200


async def test_feedback_about_an_unrecorded_target_is_pending_until_the_target_comes(
    proxy: Proxy,
) -> None:
    status, body = await proxy.feedback({"value": 1, "call": str(uuid4())})
    assert (status, body["results"][0]["status"]) == (202, "pending")
    await proxy.feedback({"value": 0.3, "episode": "later"})
    await proxy.chat("/episode/later")
    assert values(await proxy.episodes(1, values)) == {"reward": 0.3}


async def test_feedback_repeated_under_an_idempotency_key_is_stored_once_and_another_body_409(
    proxy: Proxy,
) -> None:
    await proxy.chat("/episode/e")
    key = {"Idempotency-Key": uuid4().hex}
    for _ in range(3):
        assert (await proxy.feedback({"value": 1, "episode": "e"}, **key))[0] == 200
    status, body = await proxy.feedback({"value": 2, "episode": "e"}, **key)
    assert status == 409
    assert "Idempotency-Key" in body["error"]["message"]
    [episode] = await proxy.episodes(1, values)
    assert len(episode.feedback) == 1


async def test_feedback_list_with_an_invalid_statement_is_refused_whole(proxy: Proxy) -> None:
    before = (await proxy.counters())["pawl_records_total"]
    status, body = await proxy.feedback(
        [{"value": 1, "episode": "e"}, {"value": "1", "episode": "e"}]
    )
    assert status == 400
    assert body["error"]["param"] == "[1].value"
    assert (await proxy.counters())["pawl_records_total"] == before


async def test_reward_too_large_to_be_summed_is_refused(proxy: Proxy) -> None:
    await proxy.chat("/episode/e")
    before = sum((await proxy.counters("pawl_reward_stated_sum{")).values())
    for value, status in ((1.7e308, 400), (1.7e308, 400), (1e15, 200), (1e15, 200)):
        assert (await proxy.feedback({"value": value, "episode": "e"}))[0] == status
    after = sum((await proxy.counters("pawl_reward_stated_sum{")).values())
    assert after - before == 2e15


async def test_tool_status_in_feedback_reaches_the_call_that_asked_for_the_tool(
    proxy: Proxy,
) -> None:
    response_id = (await proxy.chat()).json["id"]
    statement = {"metric": "tool_status", "value": "malformed", "response": response_id}
    assert (await proxy.feedback(statement))[0] == 200
    [episode] = await proxy.episodes(1, lambda found: found[0].calls[0].tool_events)
    assert [e.status for e in episode.calls[0].tool_events] == ["malformed"]


async def test_feedback_metric_names_make_at_most_three_prometheus_series(proxy: Proxy) -> None:
    async def post_feedback(number: int) -> int:
        """Post a hundred metrics of names of their own; return how long the page of metrics is."""
        named = [{"metric": f"m{number}-{i}", "value": 1, "episode": "e"} for i in range(100)]
        await proxy.feedback(named)
        return len((await proxy.admin_page("/metrics")).body)

    await proxy.chat("/episode/e")
    first_page, *_, last_page = [await post_feedback(number) for number in range(10)]
    counted = await proxy.counters("pawl_feedback_total{")
    metrics = {sample.split('metric="')[1].split('"')[0] for sample in counted}
    assert metrics <= {"reward", "tool_status", "other"}
    assert last_page < first_page + 1_000
