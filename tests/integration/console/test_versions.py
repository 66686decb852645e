"""The screens of versions and updates: what they show, and how the traffic is moved from them."""

import asyncio
import html
import re
from collections.abc import Mapping
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from store.errors import StateChanged
from store.grants import Scope
from store.read import lineage
from store.records import SpoolRecord
from store.tenants import DEFAULT
from store.version_queries import list_events, list_versions
from store.version_states import await_approval, begin_canary, lock_version
from tests.integration.conftest import Reply
from tests.integration.console.conftest import OpenConsole, Pages
from tests.support.ledger.episodes import ingest
from tests.support.ledger.lineage import load, promote, trained, unload
from tests.support.proxy.keys import bearer, made
from tests.support.records import ago, call, reward

EVIDENCE = {"verdict": "better", "episodes": 120}
Headers = dict[str, str]
RULE = {"control_share": 0.05}


@pytest.fixture
async def line(engine: AsyncEngine) -> AsyncEngine:
    """`m` has the versions 1 to 3, each trained from the one before; 1 serves, 2 waits."""
    async with engine.begin() as connection:
        await trained(connection, 0, 1, 2)
        await promote(connection, "m", 1, rule=RULE)
        await load(connection, "m", 2, RULE, reason="probed", actor="trainer")
    return engine


async def wait(engine: AsyncEngine, number: int) -> None:
    async with engine.begin() as connection:
        tried = await lock_version(connection, "m", number)
        why = "it waits for approval: it is better"
        await await_approval(connection, tried, reason=why, actor="controller", evidence=EVIDENCE)


async def states(engine: AsyncEngine) -> dict[int, str]:
    async with engine.connect() as connection:
        return {one.version: one.state for one in await list_versions(connection, "m")}


async def events(engine: AsyncEngine) -> list[Any]:
    async with engine.connect() as connection:
        return await list_events(connection, "m")


def text_of(reply: Reply) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", reply.body.decode()))


def words_in(reply: Reply) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", reply.body.decode())).split())


def seen_in(reply: Reply) -> str:
    found = re.search(r'name="saw" value="(\w+)"', reply.body.decode())
    assert found
    return found[1]


async def confirmed(
    console: Pages, path: str, headers: Mapping[str, str] | None = None, **form: str
) -> Reply:
    """Ask for a change, and confirm what the page says of it."""
    asked = await console.get(path, headers)
    assert asked.status == 200, asked.body
    return await console.ask("POST", path.partition("?")[0], headers, saw=seen_in(asked), **form)


async def key_of(engine: AsyncEngine, name: str, *scopes: Scope, tenant: str = DEFAULT) -> Headers:
    return bearer(await made(engine, name, *scopes, tenant=tenant))


async def test_version_pages_show_state_figures_parent_and_reason(
    console: Pages, line: AsyncEngine
) -> None:
    await wait(line, 2)
    shown = await console.get("/versions")
    assert shown.status == 200
    said = words_in(shown)
    assert "Version 1 serves" in said
    assert "0 base control with 5 % of new episodes" in said
    assert "Version 2 waits for a person" in said
    assert [said.count(f" {number} from {number - 1} ") for number in (1, 2, 3)] == [1, 1, 1]
    one = words_in(await console.get("/versions/m/2"))
    assert "it waits for approval: it is better" in one
    assert '"verdict": "better"' in one or "Verdict: better" in one
    assert (await console.get("/versions/m/7")).status == 404
    assert (await console.get("/versions?policy=n")).status == 404


async def test_running_comparisons_are_shown_with_their_evidence(
    console: Pages, line: AsyncEngine
) -> None:
    async with line.begin() as connection:
        canary = (await list_versions(connection, "m"))[2]
        await begin_canary(connection, canary, 0.5, reason="tried", actor="controller")
        records: list[SpoolRecord] = [call("before", policy_version=1, **ago(3600))]
        for number, key in enumerate(("a", "b", "c", "d")):
            of = {"policy_version": 2 if number < 3 else 1, "task": key}
            records.append(call(key, **of, **ago(-60, number)))
            records.append(reward(float(number > 0), episode=key))
        await ingest(connection, [*records, reward(0.0, episode="before")])
    said = words_in(await console.get("/versions"))
    assert "Version 2 is a canary" in said
    assert "the canary against the serving version" in said
    assert "version 2 0.667 0.208 to 0.939 3 of 3 episodes" in said
    assert "version 1 1 0.207 to 1 1 of 1 episodes" in said
    assert "the serving version against its control" in said


async def test_newer_versions_episodes_do_not_crowd_out_an_older_versions_reward_figures(
    line: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lineage, "MOST_EPISODES", 1)
    async with line.begin() as connection:
        old, new = call("old", policy_version=1, **ago(60)), call("new", policy_version=2)
        await ingest(connection, [old, reward(1.0, episode="old"), new])
        live, _ = await lineage.rewards_of(connection, "m", [1], None)
    assert live[1].mean == 1.0


async def test_pages_without_policies_say_that_there_are_none_yet(console: Pages) -> None:
    for path in ("/versions", "/updates"):
        assert "yet" in text_of(await console.get(path))


async def test_approval_promotes_and_records_evidence_and_approver(
    console: Pages, line: AsyncEngine
) -> None:
    await wait(line, 2)
    anna = await key_of(line, "anna", "read", "train")
    asked = await console.get("/versions/m/2/promote", anna)
    assert await states(line) == {0: "retired", 1: "serving", 2: "loaded", 3: "written"}
    said = words_in(asked)
    assert "Approve m@2 ?" in said
    assert "New episodes begin with it" in said
    assert "2 loaded serving 1 serving retired" in said
    done = await confirmed(console, "/versions/m/2/promote", anna, reason="seen by eye")
    assert (done.status, done.headers["Location"]) == (303, "/versions/m/2")
    assert await states(line) == {0: "retired", 1: "retired", 2: "serving", 3: "written"}
    last = (await events(line))[0]
    assert (last.reason, last.actor) == ("seen by eye (by anna, in the console)", "operator")
    assert last.evidence == EVIDENCE
    again = await console.get("/versions/m/2/promote", anna)
    assert (again.status, "serves already" in text_of(again)) == (409, True)


@pytest.mark.parametrize(
    ("path", "said", "after"),
    [
        (
            "/versions/m/1/rollback",
            ["2 loaded rejected", "1 serving rolled back", "5 % of new episodes serving"],
            {0: "serving", 1: "rolled_back", 2: "rejected", 3: "rejected"},
        ),
        (
            "/versions/m/0/promote",
            ["1 serving retired", "0 control with 5 % of new episodes serving"],
            {0: "serving", 1: "retired", 2: "loaded", 3: "written"},
        ),
        (
            "/versions/m/0/freeze",
            ["Only people move the traffic", "of new episodes policy frozen"],
            {0: "retired", 1: "serving", 2: "loaded", 3: "written"},
        ),
    ],
)
async def test_confirmed_traffic_change_matches_its_preview(
    console: Pages, line: AsyncEngine, path: str, said: list[str], after: dict[int, str]
) -> None:
    before = await states(line)
    asked = words_in(await console.get(path))
    assert [one for one in said if one not in asked] == [], asked
    assert await states(line) == before
    assert (await confirmed(console, path)).status == 303
    assert await states(line) == after
    assert (await events(line))[0].actor == "operator"


async def test_frozen_policy_is_shown_and_thawed(console: Pages, line: AsyncEngine) -> None:
    assert (await confirmed(console, "/versions/m/0/freeze")).status == 303
    assert "Frozen since" in text_of(await console.get("/versions"))
    twice = await console.get("/versions/m/0/freeze")
    assert (twice.status, "so already" in text_of(twice)) == (409, True)
    assert (await confirmed(console, "/versions/m/0/unfreeze")).status == 303
    assert "Frozen since" not in text_of(await console.get("/versions"))


async def test_traffic_change_is_refused_if_its_effect_differs_from_the_preview(
    console: Pages, line: AsyncEngine
) -> None:
    seen = seen_in(await console.get("/versions/m/2/promote"))
    async with line.begin() as connection:
        await promote(connection, "m", 0)
    before = await states(line)
    stale = await console.ask("POST", "/versions/m/2/promote", saw=seen)
    assert (stale.status, "Nothing was done" in text_of(stale)) == (409, True)
    assert await states(line) == before
    assert (await console.ask("POST", "/versions/m/2/promote", saw=seen_in(stale))).status == 303


async def test_approval_is_refused_after_the_evidence_changed(
    console: Pages, line: AsyncEngine
) -> None:
    await wait(line, 2)
    seen = seen_in(await console.get("/versions/m/2/promote"))
    await wait(line, 2)
    assert (await console.ask("POST", "/versions/m/2/promote", saw=seen)).status == 409
    assert (await states(line))[2] == "loaded"


async def test_traffic_change_is_refused_without_scope_confirmation_or_own_page(
    console: Pages, line: AsyncEngine
) -> None:
    reader = await key_of(line, "reader", "read")
    owner = await key_of(line, "owner", "read", "train")
    path, before = "/versions/m/2/promote", await states(line)
    seen = seen_in(await console.get(path, owner))
    assert (await console.get(path, reader)).status == 403
    assert (await console.ask("POST", path, reader, saw=seen)).status == 403
    assert (await console.ask("POST", path, owner)).status == 409
    other = owner | {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"}
    assert (await console.ask("POST", path, other, saw=seen)).status == 403
    assert (await console.ask("POST", path, saw=seen)).status == 401
    assert await states(line) == before
    assert "Roll back" not in text_of(await console.get("/versions", reader))


async def test_link_of_another_site_previews_no_change(console: Pages, line: AsyncEngine) -> None:
    followed = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "document"}
    assert (await console.get("/versions/m/1", followed)).status == 200
    reply = await console.get("/versions/m/1/rollback", followed)
    assert reply.status == 403
    assert "A link of another site" in reply.body.decode()


async def test_versions_list_beyond_the_first_version_is_answered(
    console: Pages, line: AsyncEngine
) -> None:
    assert (await console.get("/versions?policy=m&before=0")).status == 200


async def test_tenant_sees_and_moves_its_own_policies_alone(
    console: Pages, line: AsyncEngine
) -> None:
    async with line.begin() as connection:
        updates = [one.update_id for one in await list_versions(connection, "m")]
    theirs = await key_of(line, "theirs", "read", "train", tenant="acme")
    assert "yet" in text_of(await console.get("/versions", theirs))
    hidden = ["/versions/m/1", "/versions?policy=m", "/versions/m/2/promote", "/updates?policy=m"]
    for path in [*hidden, f"/updates/{updates[1]}"]:
        assert (await console.get(path, theirs)).status == 404, path
    owner = await key_of(line, "owner", "read", "train")
    seen = seen_in(await console.get("/versions/m/2/promote", owner))
    assert (await console.ask("POST", "/versions/m/2/promote", theirs, saw=seen)).status == 404


async def test_promotion_of_an_unloaded_version_is_refused_with_the_command_that_loads_it(
    console: Pages, line: AsyncEngine
) -> None:
    async with line.begin() as connection:
        await promote(connection, "m", 2)
        await unload(connection, "m", 1)
    asked = await console.get("/versions/m/1/promote")
    assert asked.status == 409
    assert "`pawl policies promote m@1` loads it first" in text_of(asked)


async def test_update_pages_show_figures_and_episodes(console: Pages, line: AsyncEngine) -> None:
    async with line.begin() as connection:
        made = (await list_versions(connection, "m"))[1].update_id
        metrics = text("UPDATE updates SET metrics = '{\"reward_mean\": 0.5}' WHERE id = :id")
        await connection.execute(metrics, {"id": made})
    assert "One by one" in text_of(await console.get("/updates"))
    one = text_of(await console.get(f"/updates/{made}"))
    assert "Its episodes, by task" in one
    assert "Mean final reward of the episodes" in one
    assert (await console.get("/updates/01900000-0000-7000-8000-000000000000")).status == 404


async def test_policy_name_with_special_characters_is_linked_and_escaped(
    console: Pages, engine: AsyncEngine
) -> None:
    async with engine.begin() as connection:
        await trained(connection, 0, name="org/m <b>?#%41@2")
    address = "/versions/org/m%20%3Cb%3E%3F%23%2541@2/1"
    listed = (await console.get("/versions")).body.decode()
    assert f'href="{address}"' in listed
    assert "<b>" not in listed.partition("<main")[2].partition("made</th>")[0].replace(
        "<b></b>", ""
    )
    assert "org/m <b>?#%41@2@1" in text_of(await console.get(address))
    assert "so already" not in text_of(await console.get(f"{address[:-1]}0/freeze"))


@pytest.mark.usefixtures("line")
async def test_remote_viewer_without_a_key_cannot_make_changes(
    open_console: OpenConsole,
) -> None:
    async with open_console(access="anyone") as console:
        assert (await console.get("/versions/m/0/freeze")).status == 200
        relayed = await console.get("/versions", {"Via": "1.1 nginx"})
        assert relayed.status == 200
        relayed = await console.get("/versions/m/0/freeze", {"Via": "1.1 nginx"})
        assert (relayed.status, "Changes need a key" in text_of(relayed)) == (403, True)


@pytest.mark.usefixtures("line")
async def test_concurrent_previews_of_traffic_changes_run_sequentially(
    console: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, most = 0, 0

    async def carry_out(*_: Any) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.05)
        running -= 1
        raise StateChanged("later")

    monkeypatch.setattr("console.versions.carry_out", carry_out)
    await asyncio.gather(*(console.get("/versions/m/0/freeze") for _ in range(3)))
    assert most == 1
