"""`pawl doctor` names the reason why nothing is learned: each is made on a working system."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
from aiohttp import web
from pydantic import SecretStr
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from benchmarks.stack import free_port
from controller.run import app_of
from pawl.doctor.checks import Finding
from pawl.doctor.diagnosis import diagnose
from pawl.settings import DoctorSettings
from proxy.metrics import REFUSED
from store import claims, version_states
from store.admin_port import serve_app
from store.tenants import scoped
from store.version_states import await_approval, lock_version
from tests.integration.conftest import Pawl, Proxy, proxy_with, settings_for
from tests.support.controller.replicas import assert_has, controlling, publish
from tests.support.ledger.episodes import ingest
from tests.support.ledger.lineage import load
from tests.support.records import call
from tests.support.servers.fake_server import FakeModelServer, fake_model_server
from tests.support.servers.fake_upstream import whole_reply
from tests.support.waiting import awaited
from trainer.metrics import LEFT_POLICY, UPDATE_GAUGES, show_pause
from trainer.run import port_app

RECIPE = "[claim]\ngroup_size = 4\ngroups = 2\nmax_age_s = 60"
LIMIT_S = 5.0


@dataclass
class Stack:
    """A system that works: proxy, model server, controller, and a trainer's hold and port."""

    settings: DoctorSettings
    engine: AsyncEngine
    proxy: Proxy
    server: FakeModelServer
    parts: dict[str, AsyncExitStack] = field(default_factory=dict)

    async def stop(self, part: str) -> None:
        """End a part of it."""
        await self.parts[part].aclose()

    async def work(self, *rewards: tuple[str, float | None], **asked: Any) -> None:
        """Let an agent do an episode for each task, and post its reward, if there is one."""
        for number, (task, value) in enumerate(rewards):
            name = f"{task}-{number}"
            headers = {"x-pawl-episode": name, "x-pawl-task": task}
            await self.proxy.chat(headers=headers, **asked)
            if value is not None:
                await self.proxy.feedback({"metric": "reward", "value": value, "episode": name})
        await self.proxy.episodes(len(rewards), are_stored(rewards))

    async def findings(self) -> list[Finding]:
        """Examine it, within the time that a person is promised."""
        began = perf_counter()
        found = await diagnose(self.settings)
        assert perf_counter() - began < LIMIT_S
        return found


def are_stored(rewards: tuple[tuple[str, float | None], ...]) -> Callable[[list[Any]], bool]:
    """Return whether all episodes of these tasks are stored, and the rewards of those with one."""
    names = {f"{task}-{n}" for n, (task, _) in enumerate(rewards)}
    scored = {f"{task}-{n}" for n, (task, value) in enumerate(rewards) if value is not None}

    def all_there(episodes: list[Any]) -> bool:
        return names <= {e.key for e in episodes} and scored <= {
            e.key for e in episodes if e.feedback
        }

    return all_there


async def chat(request: web.Request) -> web.StreamResponse:
    """Answer for the base model and its versions, as vLLM does."""
    asked = await request.json()
    if asked["model"].partition("@")[0] != "m":
        return web.json_response({"error": {"message": "no such model"}}, status=404)
    return web.json_response(whole_reply(asked, 1))


@pytest.fixture
async def stack(engine: AsyncEngine, database_url: str, tmp_path: Path) -> AsyncIterator[Stack]:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    # Of proxies in this process before.
    REFUSED.clear()
    parts = {name: AsyncExitStack() for name in ("server", "trainer", "controller", "proxy")}
    async with AsyncExitStack() as exits:
        for part in parts.values():
            exits.push_async_callback(part.aclose)
        server = await parts["server"].enter_async_context(fake_model_server())
        server.chats, server.adapter_slots = chat, 8
        await publish(engine, tmp_path / "adapters", 1)
        settings = DoctorSettings.model_validate(
            settings_for(database_url, server.url, tmp_path).model_dump(exclude_unset=True)
            | {
                "DATABASE_URL": database_url,
                "recipe": str(tmp_path / "recipe.toml"),
                "adapter_dir": tmp_path / "adapters",
                "trainer_listen": f"127.0.0.1:{free_port()}",
                "controller_listen": f"127.0.0.1:{free_port()}",
            }
        )
        running = await parts["controller"].enter_async_context(controlling(engine, server.url))
        port = await serve_app(
            app_of(running.servable, running.controllers, running.publishing),
            settings.controller_listen,
            "PAWL_CONTROLLER_LISTEN",
            (),
        )
        parts["controller"].push_async_callback(port.cleanup)
        await run_trainer(parts["trainer"], engine, settings)
        proxy = await parts["proxy"].enter_async_context(proxy_with(settings, engine))
        await assert_has(server, "m@1")
        async with engine.begin() as connection:
            await connection.execute(
                text("UPDATE policies SET changed_at = now() - interval '1 h'")
            )
        yield Stack(settings, engine, proxy, server, parts)


async def run_trainer(exits: AsyncExitStack, engine: AsyncEngine, settings: DoctorSettings) -> None:
    """Hold the policy, and serve metrics, as a trainer does that waits for episodes."""
    show_pause("m", None)
    LEFT_POLICY.labels("m").set(0)
    for gauge in UPDATE_GAUGES.values():
        gauge.labels("m").set(0)
    guard = await exits.enter_async_context(engine.connect())
    assert await claims.hold_policy(guard, "m")
    exits.push_async_callback(claims.release_policy, guard, "m")
    is_up = asyncio.Event()
    is_up.set()
    app = port_app(settings, is_up, is_up)
    port = await serve_app(app, settings.trainer_listen, "PAWL_TRAINER_LISTEN", ())
    exits.push_async_callback(port.cleanup)


# Each breaks a system that works, or uses it in a way from which nothing can be learned.


async def another_database(stack: Stack) -> None:
    gone = f"postgresql://pawl:p@127.0.0.1:{free_port()}/pawl"
    stack.settings = stack.settings.model_copy(update={"database_url": SecretStr(gone)})


async def rewards_of_nothing(stack: Stack) -> None:
    await stack.work(*GOOD)
    await stack.proxy.feedback({"value": 1.0, "response": "chatcmpl-unknown"})
    stated = "UPDATE feedback SET at = now() - interval '1 h' WHERE episode_id IS NULL RETURNING 1"

    async def is_stored() -> bool:
        async with stack.engine.begin() as connection:
            return bool(await connection.scalar(text(stated)))

    assert await awaited(is_stored)


async def no_proxy(stack: Stack) -> None:
    await stack.stop("proxy")


async def no_model_server(stack: Stack) -> None:
    await stack.work(*GOOD)
    await stack.stop("server")


async def no_trainer(stack: Stack) -> None:
    await stack.work(*GOOD)
    await stack.stop("trainer")


async def no_calls(_: Stack) -> None:
    pass


async def another_model(stack: Stack) -> None:
    await stack.work(("t", None), ("t", None), model="gpt-4o")


async def temperature_0(stack: Stack) -> None:
    await stack.work(*GOOD, temperature=0)


async def no_token_ids(stack: Stack) -> None:
    async def strips(request: web.Request) -> web.StreamResponse:
        return web.json_response(whole_reply({"model": (await request.json())["model"]}, 1))

    stack.server.chats = strips
    await stack.work(*GOOD)


async def strict_tools(stack: Stack) -> None:
    tool = {"name": "calc", "parameters": {"type": "object"}, "strict": True}
    await stack.work(*GOOD, tools=[{"type": "function", "function": tool}])


async def doubtful_episodes(stack: Stack) -> None:
    async with stack.engine.begin() as connection:
        await ingest(connection, [call(f"e{n}", confidence="doubtful") for n in range(4)])


async def no_rewards(stack: Stack) -> None:
    await stack.work(*((task, None) for task, _ in GOOD))
    async with stack.engine.begin() as connection:
        # They have been over for an hour.
        for table in ("episodes", "episode_policies"):
            hour = f"UPDATE {table} SET last_call_at = last_call_at - interval '1 h'"
            await connection.execute(text(hour))


async def equal_rewards(stack: Stack) -> None:
    await stack.work(*((task, 1.0) for task, _ in GOOD))


async def paused_training(stack: Stack) -> None:
    await stack.work(*GOOD)
    show_pause("m", "out_of_memory")


async def stale_episodes(stack: Stack) -> None:
    await stack.work(*GOOD)
    async with stack.engine.begin() as connection:
        update = await claims.begin_update(connection, "m", 1, {})
        expired = {"episodes": 8, "dropped": {"stale": 8}}
        values = {"id": update, "metrics": json.dumps(expired)}
        done = "UPDATE updates SET state = 'expired', metrics = CAST(:metrics AS jsonb)"
        await connection.execute(text(f"{done} WHERE id = :id"), values)


async def frozen_policy(stack: Stack) -> None:
    await stack.work(*GOOD)
    async with stack.engine.begin() as connection:
        why: Any = {"reason": "a test", "actor": "operator"}
        await version_states.freeze(connection, "m", frozen=True, **why)


async def another_adapter(stack: Stack) -> None:
    await stack.work(*GOOD)
    await stack.stop("controller")
    stack.server.loaded["m@1"] = "/another/folder"


async def unapproved_version(stack: Stack) -> None:
    await stack.work(*GOOD)
    await publish(stack.engine, stack.settings.adapter_dir, 2)
    async with stack.engine.begin() as connection:
        why: Any = {"reason": "a test", "actor": "trainer"}
        rule = {"mode": "immediate", "approve": True}
        state = "UPDATE policies SET state = 'written' WHERE version = 2"
        await connection.execute(text(state))
        serves = "UPDATE policies SET state = 'serving' WHERE version = 1"
        await connection.execute(text(serves))
        await load(connection, "m", 2, rule, **why)
        tried = await lock_version(connection, "m", 2)
        waits: Any = {"evidence": {}, "actor": "controller", "reason": "it passed its probe"}
        await await_approval(connection, tried, **waits)


# Two groups of four whose rewards differ: from these an update is made.
GOOD = tuple((task, float(n % 2)) for task in ("a", "b") for n in range(4))
REASONS: dict[Callable[[Stack], Awaitable[None]], tuple[str, str]] = {
    another_database: ("The database cannot be used from here", "DATABASE_URL"),
    no_proxy: ("The proxy does not answer", "start `pawl proxy`"),
    no_model_server: ("The model server at", "start vLLM"),
    no_trainer: ("No trainer runs", "start `pawl trainer`"),
    no_calls: ("No calls arrive", "set OPENAI_BASE_URL="),
    another_model: ("Calls ask for gpt-4o", 'ask for model = "m"'),
    temperature_0: ("m: 8 of the newest 8 calls are asked at temperature 0", "temperature = 1"),
    no_token_ids: ("m: 8 of the newest 8 calls have no token ids", "with vLLM"),
    strict_tools: ("m: 8 of the newest 8 calls cannot be trained", "PAWL_TOOL_PARSER"),
    doubtful_episodes: ("m: 4 of the newest 4 episodes are quarantined", "x-pawl-episode"),
    no_rewards: ("m: no rewards", "/feedback"),
    rewards_of_nothing: ("Feedback is about calls or episodes", "`id` of the reply"),
    equal_rewards: ("m: all rewards are 1", "tasks that succeed sometimes"),
    paused_training: ("m: training is paused (out_of_memory)", "`pawl plan`"),
    stale_episodes: ("m: 8 of the last 8 episodes were spent untrained", "claim.max_staleness"),
    frozen_policy: ("m is frozen", "`pawl policies freeze m --off`"),
    another_adapter: ("m: not served as trained: m@1", "pawl controller"),
    unapproved_version: ("m@2 waits for approval", "`pawl policies promote m@2`"),
}


@pytest.mark.parametrize("reason", REASONS, ids=lambda reason: reason.__name__)
async def test_doctors_first_finding_names_the_fault_and_its_remedy(
    reason: Callable[[Stack], Awaitable[None]], stack: Stack
) -> None:
    await reason(stack)
    first = (await stack.findings())[0]
    title, remedy = REASONS[reason]
    assert first.title.startswith(title), first
    assert remedy in first.remedy
    assert first.needs_person


async def test_doctor_finds_nothing_that_needs_a_person_in_a_working_system(stack: Stack) -> None:
    await stack.work(*GOOD)
    assert [one.title for one in await stack.findings() if one.needs_person] == []


async def test_doctor_counts_new_rewarded_episodes_as_over(stack: Stack) -> None:
    await no_rewards(stack)
    await stack.work(*(("c", float(n % 2)) for n in range(8)))
    first = (await stack.findings())[0]
    assert first.title == "m: 8 of 16 episodes that are over have no reward"


@pytest.mark.parametrize(
    ("name", "value"), [("OMP_WAIT_POLICY", "active"), ("GOMP_SPINCOUNT", "1000")]
)
async def test_doctor_names_environment_variables_that_let_threads_spin(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    await stack.work(*GOOD)
    [found] = [one for one in await stack.findings() if name in one.title]
    assert found.title.startswith(f"{name}={value} makes waiting threads")
    assert (f"unset {name}" in found.remedy, found.needs_person) == (True, False)


async def test_doctor_reports_a_stopped_system_as_a_single_finding(stack: Stack) -> None:
    await another_database(stack)
    for part in stack.parts:
        await stack.stop(part)
    [found] = await stack.findings()
    assert (found.title, found.needs_person) == ("Pawl does not run here", True)
    assert "`pawl up`" in found.remedy


async def test_doctor_reports_hanging_parts_within_the_time_limit(
    tmp_path: Path,
) -> None:
    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(hang, "127.0.0.1", 0) as silent:
        port = silent.sockets[0].getsockname()[1]
        listen = f"127.0.0.1:{port}"
        addresses = ("admin_listen", "trainer_listen", "controller_listen")
        settings = DoctorSettings.model_validate(
            dict.fromkeys(addresses, listen)
            | {"DATABASE_URL": f"postgresql://pawl:p@{listen}/pawl", "spool_dir": tmp_path}
            | {"upstream_url": f"http://{listen}/v1"}
        )
        began = perf_counter()
        found = await diagnose(settings)
        assert perf_counter() - began < LIMIT_S
    [away] = found
    assert str(away.figures["error"]).startswith("no answer within")


async def test_doctor_cuts_off_and_reports_a_slow_database_read(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def slow(*_: Any) -> None:
        await asyncio.Event().wait()

    await stack.work(("a", 1.0))
    monkeypatch.setattr("pawl.doctor.collecting.STORE_S", 1.0)
    monkeypatch.setattr("pawl.doctor.collecting._read_policy", slow)
    titles = [one.title for one in await stack.findings()]
    assert titles == ["The database took too long: some policies and calls were not checked"]


async def test_doctor_command_prints_findings_of_a_tenant_and_exits_with_status_1(
    engine: AsyncEngine, pawl: Pawl, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ADMIN_LISTEN", "TRAINER_LISTEN", "CONTROLLER_LISTEN"):
        monkeypatch.setenv(f"PAWL_{name}", f"127.0.0.1:{free_port()}")
    async with engine.begin() as connection:
        for tenant, model in (("a", "gpt-a"), ("b", "gpt-b")):
            none: Any = {"policy": None, "policy_version": None, "served_model": model}
            await ingest(connection, [call(scoped(tenant, "e"), **none)])
    done = await pawl("doctor", "--json", "--tenant", "a")
    assert done.exit_code == 1
    titles = [json.loads(line)["title"] for line in done.stdout.splitlines()]
    assert "Calls ask for gpt-a, and no policy answers that" in titles
    assert "gpt-b" not in done.stdout
    monkeypatch.setenv("PAWL_WORKERS", "many")
    done = await pawl("doctor", "--json")
    assert done.exit_code == 1
    assert "PAWL_WORKERS" in json.loads(done.stdout)["figures"]["error"]
