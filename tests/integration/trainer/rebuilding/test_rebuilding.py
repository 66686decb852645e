"""A line that is rebuilt without some episodes: bit for bit one that never had them."""

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from msgspec import UNSET
from sqlalchemy import select, text
from sqlalchemy.ext.asyncio import AsyncEngine

from pawl.policies.show import versions_of
from store.connection.engine import make_engine
from store.deleting.delete import delete_episode
from store.deleting.receipts import Receipt
from store.embedded.server import EmbeddedPostgres
from store.rebuilding.choosing import Query
from store.records import SpoolRecord
from store.schema.recorded import episodes
from store.schema.trained import consumptions
from store.updates import claims, policies
from store.updates.gating import begin_canary, freeze
from store.updates.policies import list_versions
from store.write.ingest import ingest
from tests.conftest import Psql, database_of
from tests.support.faults.killing import Killed, killing
from tests.support.records import call, reward, tokens
from tests.support.servers.computing_server import computing_server
from trainer.errors import PublishError, TrainerError
from trainer.learners.learner import Learner
from trainer.loop import Loop
from trainer.publishing import adapters
from trainer.publishing.publish import Publisher
from trainer.publishing.replicas import Replicas
from trainer.rebuilding.rebuild import Result, Wish, rebuild_policy
from trainer.recipes.recipe import Recipe, load_recipe
from trainer.settings import TrainerSettings

GROUP = """
[claim]
group_size = 4
groups = 2
max_age_s = 1.0
[off_policy]
sequence_min = 0.0
sequence_max = 1e9
max_drift = 1e9
[optimizer]
learning_rate = 2e-3
[lora]
rank = 4
alpha = 8
[publish]
tolerance = 1e-3
retire_after_s = 1e9
"""
MOVING = GROUP.replace("group_size = 4\ngroups = 2", "group_size = 1\ngroups = 8") + (
    '[credit]\nbaseline = "moving"\nnormalisation = "batch"\n'
)
PPO = (
    GROUP
    + '[credit]\nbaseline = "none"\nnormalisation = "batch"\n[ppo]\nepochs = 2\n'
    + "value_learning_rate = 1e-2\n"
)
PPO = f'learner = "ppo"\n{PPO}'
GATED = f'{GROUP}[gate]\nmode = "gated"\n'
RECIPES = {"group": GROUP, "moving": MOVING, "ppo": PPO}
FILES = ("adapter_model.safetensors", "adapter_config.json", "progress.json")
WAVES = 3
Waves = list[list[SpoolRecord]]


def waves(version: int | None = None) -> Waves:
    """Three waves of eight scored episodes of two tasks; the first task is asked in each.

    Each was sampled by the version that the wave before came to, or by `version`. In the last one
    the first task is short of a member.
    """
    made: Waves = []
    for wave in range(WAVES):
        records: list[SpoolRecord] = []
        for number in range(wave == WAVES - 1, 8):
            task = "t/all" if number < 4 else f"t/{wave}"
            ids = tokens([5, 6, 7 + wave], [9 + number, 11 + wave, 20 + 3 * number], -4.5)
            sampled_by = wave if version is None else version
            key = f"w{wave}/e{number}"
            records.append(call(key, task=task, policy_version=sampled_by, tokens=ids))
            records.append(reward(float(number % 3), episode=key, at=wave))
        made.append(records)
    return made


def without(records: Iterable[SpoolRecord], keys: Sequence[str]) -> list[SpoolRecord]:
    def is_of(record: Any) -> bool:
        key = record.episode if hasattr(record, "episode") else record.items[0].target
        return key in keys

    return [record for record in records if not is_of(record)]


class Bench:
    """A trainer of policy `m`, with a database, a folder and a model server of its own."""

    def __init__(
        self, engine: AsyncEngine, folder: Path, model: str, url: str, recipe: str = GROUP
    ) -> None:
        self.engine, self.model, self.folder = engine, model, folder
        folder.mkdir(exist_ok=True)
        (folder / "recipe.toml").write_text(recipe)
        values = {"upstream_url": url, "adapter_dir": folder / "adapters", "policy": "m"}
        self.settings = TrainerSettings.model_validate(
            values | {"recipe": str(folder / "recipe.toml")}
        )

    @property
    def recipe(self) -> Recipe:
        return load_recipe(self.settings.recipe)

    async def store(self, records: Sequence[SpoolRecord]) -> None:
        async with self.engine.begin() as connection:
            await ingest(connection, list(records))

    async def train(self, records: Sequence[SpoolRecord]) -> bool:
        """Store records, and do what a trainer does from its start on, once."""
        await self.store(records)
        async with Replicas(self.settings.server_urls) as server:
            learner = Learner(self.model, self.recipe, seed=0, scratch=self.settings.scratch)
            gate = self.recipe.gate
            publisher = Publisher(self.engine, server, "m", self.recipe.publish, gate=gate)
            loop = Loop(self.settings, self.recipe, self.engine, publisher, learner, "m")
            await loop.recover()
            return await loop.update_once()

    async def trains(self, made: Waves) -> None:
        async with self.engine.begin() as connection:
            await policies.ensure_base(connection, "m")
        for records in made:
            assert await self.train(records)

    async def rebuild(self, *keys: str, leave_missing: bool = False, **more: Any) -> Result:
        queries = [Query(episode=key) for key in keys] + ([Query(**more)] if more else [])
        wish = Wish(queries=tuple(queries), leave_missing=leave_missing)
        self.told: list[tuple[int, int]] = []

        def tell(done: int, of: int) -> None:
            self.told.append((done, of))

        return await rebuild_policy(self.settings, self.engine, "m", wish, tell)

    async def states(self) -> dict[int, str]:
        async with self.engine.connect() as connection:
            return {v.version: v.state for v in await list_versions(connection, "m")}

    async def running(self) -> object:
        async with self.engine.connect() as connection:
            return await claims.running_update(connection, "m")

    async def spent(self) -> dict[str, tuple[bool, str | None]]:
        """Whether each episode was trained, and the reason beside it."""
        query = select(episodes.c.key, consumptions.c.trained, consumptions.c.reason).join(
            consumptions, consumptions.c.episode_id == episodes.c.id
        )
        async with self.engine.connect() as connection:
            return {row[0]: (row[1], row[2]) for row in await connection.execute(query)}

    async def all(self, query: str) -> list[Any]:
        async with self.engine.connect() as connection:
            return list((await connection.execute(text(query))).all())

    def version(self, number: int) -> Path:
        return adapters.version_folder(self.settings.adapter_dir, "m", number)

    def written(self, number: int) -> dict[str, bytes]:
        """The bytes of a version's adapter, and of its progress."""
        return {
            name: (self.version(number) / name).read_bytes() for name in (*FILES, "progress.json")
        }

    def state(self, number: int) -> dict[str, bytes]:
        """The bytes of what a version resumes with."""
        kept = self.version(number) / "trainer"
        return {path.name: path.read_bytes() for path in sorted(kept.glob("*.pt"))}


class Stand:
    """Make benches, each with a database of its own."""

    def __init__(
        self, postgres: EmbeddedPostgres, psql: Psql, template: str, folder: Path, model: str
    ) -> None:
        self.open = AsyncExitStack()
        self._make = lambda: database_of(postgres, psql, template)
        self.folder, self.model = folder, model

    async def bench(self, name: str, recipe: str = GROUP) -> Bench:
        engine = make_engine(self.open.enter_context(self._make()))
        self.open.push_async_callback(engine.dispose)
        url = await self.open.enter_async_context(computing_server("m", self.model))
        return Bench(engine, self.folder / name, self.model, url, recipe)


@pytest.fixture
async def stand(
    postgres: EmbeddedPostgres, psql: Psql, template: str, tmp_path: Path, tiny_model: str
) -> AsyncIterator[Stand]:
    made = Stand(postgres, psql, template, tmp_path, tiny_model)
    async with made.open:
        yield made


@pytest.mark.parametrize("rule", RECIPES)
async def test_it_is_bit_for_bit_a_line_that_never_had_them(stand: Stand, rule: str) -> None:
    bench = await stand.bench("rebuilt", RECIPES[rule])
    never = await stand.bench("never", RECIPES[rule])
    made, out = waves(), ["w0/e1", "w0/e2", "w1/e0", "w2/e6"]
    await bench.trains(made)
    before = {number: bench.written(number) for number in (1, 2, 3)}
    result = await bench.rebuild(*out)
    await never.trains([without(records, out) for records in made])

    assert (result.version.served_name, result.version.state) == ("m@6", "serving")
    assert (result.left_out, result.waiting, result.updates) == (4, 0, 3)
    for old, new in ((1, 4), (2, 5), (3, 6)):
        assert bench.written(new) == never.written(old)
        assert bench.written(new) != bench.written(old)
        assert bench.written(old) == before[old]
    assert bench.state(6) == never.state(3) != {}
    baselines = "SELECT baselines FROM updates WHERE version = {}"
    assert await bench.all(baselines.format(6)) == await never.all(baselines.format(3))
    assert bench.told == [(0, 3), (1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize("rule", ["group", "moving"])
async def test_the_new_line_replaces_the_old_one_and_training_goes_on_from_it(
    stand: Stand, rule: str
) -> None:
    bench = await stand.bench("rebuilt", RECIPES[rule])
    never = await stand.bench("never", RECIPES[rule])
    made, out = waves(version=0), ["w0/e1", "w1/e0"]
    await bench.trains(made[:2])
    await bench.rebuild(*out)
    assert await bench.states() == {
        0: "published",
        1: "retired",
        2: "retired",
        3: "rejected",
        4: "serving",
    }
    shown = {line.version: line.rebuilt_from for line in await versions_of(bench.engine, "m")}
    assert (shown["m@2"], shown["m@3"], shown["m@4"]) == (UNSET, "m@1", "m@2")
    assert await bench.train(made[2])
    await never.trains([without(records, out) for records in made])
    # The last wave's first task is filled up with a member of the one before: not the first of it.
    assert bench.written(5) == never.written(3)
    assert bench.state(5) == never.state(3)


async def test_what_is_left_out_stays_spent_and_what_waits_is_never_claimed(stand: Stand) -> None:
    bench = await stand.bench("rebuilt")
    made = waves()
    await bench.trains(made[:2])
    await bench.store([call("w0/new", task="t/new", policy_version=2), *made[2]])
    result = await bench.rebuild(prefix="w0/")
    assert (result.left_out, result.waiting) == (8, 1)
    spent = await bench.spent()
    assert {spent[f"w0/e{number}"][1] for number in range(8)} == {"left_out"}
    assert spent["w0/e2"][0]
    assert spent["w0/new"] == (False, "left_out")
    assert spent["w1/e0"][1] is None
    await bench.store([reward(1.0, episode="w0/new")])
    assert await bench.train([])
    assert (await bench.spent())["w0/new"] == (False, "left_out")
    # The first update has nothing left, and makes no version.
    assert result.version.version == 3
    assert [row.version for row in await bench.all("SELECT version FROM updates ORDER BY id")] == [
        *(1, 2, None, None, 3, 4)
    ]


async def test_a_line_without_any_signal_left_is_the_base_model(stand: Stand) -> None:
    bench = await stand.bench("rebuilt")
    await bench.trains(waves()[:1])
    result = await bench.rebuild(prefix="w0/")
    assert (result.version.version, result.version.state) == (0, "serving")
    assert result.retired == ("m@1",)
    assert await bench.states() == {0: "serving", 1: "retired"}


async def test_with_a_gate_it_serves_at_once_and_nothing_of_the_old_line_is_tried(
    stand: Stand,
) -> None:
    bench, never = await stand.bench("rebuilt", GATED), await stand.bench("never")
    made = waves(version=0)
    await bench.trains(made[:1])
    async with bench.engine.begin() as connection:
        [tried] = [v for v in await list_versions(connection, "m") if v.state == "candidate"]
        await begin_canary(connection, tried, 0.1, 0.02, reason="a trial", actor="steward")
    for records in made[1:]:
        assert await bench.train(records)
    before = {0: "serving", 1: "canary", 2: "rejected", 3: "candidate"}
    assert await bench.states() == before
    # Nobody but an operator may move the traffic, which is who asks for a rebuild.
    async with bench.engine.begin() as connection:
        await freeze(connection, "m", frozen=True, reason="wrong rewards", actor="operator")
    result = await bench.rebuild("w1/e1")
    assert (result.version.state, result.retired) == ("serving", ("m@1", "m@3"))
    # The canary was trained on none of it, and stands for itself.
    rebuilt = {0: "published", 1: "retired", 2: "rejected", 3: "rejected", 4: "rejected"}
    assert await bench.states() == {**rebuilt, 5: "serving"}
    await never.trains([without(records, ["w1/e1"]) for records in made])
    assert bench.written(5) == never.written(3)
    ended = "SELECT version, from_state, to_state, actor FROM policy_events WHERE reason = '{}'"
    assert await bench.all(ended.format("rebuilt as m@5 without 1 episodes")) == [
        (1, "canary", "retired", "operator"),
        (3, "candidate", "rejected", "operator"),
    ]
    assert await bench.all("SELECT share FROM policies WHERE version = 0") == [(0.02,)]


async def test_with_a_gate_a_trainer_that_finds_it_lets_it_serve(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = f"{GATED}updates_per_candidate = 2\n"
    bench = await stand.bench("rebuilt", recipe)
    await bench.trains(waves(version=0)[:2])
    assert await bench.states() == {0: "serving", 1: "rejected", 2: "candidate"}
    STEPS["before publishing"](monkeypatch)
    with pytest.raises(Killed):
        await bench.rebuild("w0/e1")
    assert not await bench.train([])
    assert (await bench.states())[4] == "serving"
    assert (await bench.rebuild("w0/e1")).retired == ("m@2",)


async def test_what_is_tried_goes_on_if_the_rebuilt_version_is_rejected(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = await stand.bench("rebuilt", GATED)
    await bench.trains(waves(version=0)[:2])

    async def fails(*_: object) -> object:
        raise PublishError("it answers otherwise")

    with monkeypatch.context() as patched:
        patched.setattr(Publisher, "_probe", fails)
        with pytest.raises(PublishError, match=r"m@4, which is rebuilt, was rejected"):
            await bench.rebuild("w0/e1")
    states = await bench.states()
    assert (states[0], states[2], states[4]) == ("serving", "candidate", "rejected")
    result = await bench.rebuild("w0/e1")
    assert (result.version.served_name, result.version.state) == ("m@4", "serving")


STEPS = {
    "before the version exists": killing(adapters, "write_version", after=False),
    "after the version exists": killing(adapters, "write_version", after=True),
    "before the record": killing(claims, "consume", after=False),
    "after the record": killing(Publisher, "clean", after=False),
    "before publishing": killing(Publisher, "publish", after=False),
    "before promoting": killing(policies, "promote", after=False),
}


KILLED = ["w0/e1", "w1/e2"]


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, dict[str, bytes]]:
    """Keep what a rebuild comes to that nobody kills."""
    return {}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("trains_on", [False, True])
async def test_one_that_is_killed_goes_on_where_it_stopped(
    stand: Stand,
    monkeypatch: pytest.MonkeyPatch,
    undisturbed: dict[str, dict[str, bytes]],
    step: str,
    trains_on: bool,
) -> None:
    made, out = waves(version=0), KILLED
    if not undisturbed:
        whole = await stand.bench("whole")
        await whole.trains(made[:2])
        await whole.rebuild(*out)
        undisturbed |= {"adapter": whole.written(4), "state": whole.state(4)}
    bench = await stand.bench("killed")
    await bench.trains(made[:2])
    STEPS[step](monkeypatch)
    with pytest.raises(Killed):
        await bench.rebuild(*out)
    if trains_on:
        # A trainer that is started meanwhile publishes no part of it, and takes nothing from it.
        assert not await bench.train([])
        is_offered = step in ("before publishing", "before promoting")
        serving = [number for number, state in (await bench.states()).items() if state == "serving"]
        assert serving == [4 if is_offered else 2]
    result = await bench.rebuild(*out)
    assert await bench.running() is None
    head = result.version.version
    assert result.version.state == "serving"
    assert {"adapter": bench.written(head), "state": bench.state(head)} == undisturbed
    done = await bench.all("SELECT id FROM updates WHERE state = 'done'")
    assert len(done) == 4
    states = await bench.states()
    assert (states[1], states[2]) == ("retired", "retired")


async def test_versions_before_the_first_loss_stand_for_themselves(stand: Stand) -> None:
    bench, never = await stand.bench("rebuilt"), await stand.bench("never")
    made = waves()
    await bench.trains(made)
    result = await bench.rebuild("w2/e1")
    await never.trains([without(records, ["w2/e1"]) for records in made])
    assert (result.version.version, result.updates) == (4, 1)
    assert bench.written(4) == never.written(3)
    assert bench.state(4) == never.state(3)
    # A second one leaves out what the first did, too.
    again = await bench.rebuild("w1/e1")
    other = await stand.bench("other")
    await other.trains([without(records, ["w1/e1", "w2/e1"]) for records in made])
    assert bench.written(again.version.version) == other.written(3)
    assert again.left_out == 2


async def test_done_twice_it_changes_nothing(stand: Stand) -> None:
    bench = await stand.bench("rebuilt")
    await bench.trains(waves()[:2])
    first = await bench.rebuild("w0/e1")
    updates = await bench.all("SELECT id FROM updates")
    again = await bench.rebuild("w0/e1")
    assert again.version == first.version
    assert again.retired == ()
    assert await bench.all("SELECT id FROM updates") == updates


async def test_what_was_deleted_is_told_and_left_out_if_that_is_asked_for(stand: Stand) -> None:
    bench, never = await stand.bench("rebuilt"), await stand.bench("never")
    made = waves()
    await bench.trains(made)
    deleted = await delete(bench, "w1/e5")
    assert deleted.trained == ("m@2",)
    with pytest.raises(TrainerError, match=r"1 episodes .* \(1 deleted\).*--leave-out-missing"):
        await bench.rebuild("w0/e1")
    assert (await bench.spent())["w0/e1"][1] is None
    result = await bench.rebuild("w0/e1", leave_missing=True)
    await never.trains([without(records, ["w0/e1", "w1/e5"]) for records in made])
    assert bench.written(result.version.version) == never.written(3)
    # What a rebuilt version was trained on is told like that of any other.
    assert (await delete(bench, "w2/e5")).trained == ("m@3", "m@6")
    assert (await delete(bench, "w0/e1")).trained == ("m@1",)


async def delete(bench: Bench, key: str) -> Receipt:
    async with bench.engine.begin() as connection:
        [whole] = await connection.scalars(select(episodes.c.id).where(episodes.c.key == key))
        receipt = await delete_episode(connection, whole)
    assert receipt is not None
    return receipt


async def test_nothing_of_the_line_is_left_out(stand: Stand) -> None:
    bench = await stand.bench("rebuilt")
    await bench.trains(waves()[:1])
    await bench.store([call("late", policy_version=1)])
    result = await bench.rebuild("late")
    assert (result.version.served_name, result.version.state) == ("m@1", "serving")
    assert (result.left_out, result.waiting, result.updates) == (0, 1, 0)


async def test_while_a_trainer_works_on_the_policy_it_is_refused(stand: Stand) -> None:
    bench = await stand.bench("rebuilt")
    await bench.trains(waves()[:1])
    async with bench.engine.connect() as guard:
        assert await claims.hold_policy(guard, "m")
        with pytest.raises(TrainerError, match=r"being worked on.*rebuild again"):
            await bench.rebuild("w0/e1")
        await guard.invalidate()
    assert (await bench.spent())["w0/e1"][1] is None
