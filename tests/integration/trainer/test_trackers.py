"""Trackers get the recipe and every update's and evaluation's figures, and stop no update."""

from pathlib import Path
from typing import Any, ClassVar

import pytest
from accelerate import tracking
from structlog.testing import capture_logs

from tests.support.controller.publishing import PublishedLoop
from tests.support.ledger.episodes import ingest
from tests.support.records import call, reward
from tests.support.trainer.bench import Bench
from trainer.errors import TrainerError
from trainer.publishing.model_server import Replicas
from trainer.settings import TrainerSettings
from trainer.trackers import Trackers

RECIPE = {"m": {"learner": "grpo", "lora": {"rank": 4, "target_modules": ["q_proj"]}, "kept": None}}


class Noted(tracking.GeneralTracker):
    """Note what it is told, and fail for as long as it is away."""

    name = "noted"
    requires_logging_directory = True
    made: ClassVar[list["Noted"]] = []
    away = False

    def __init__(self, run_name: str, logging_dir: str) -> None:
        super().__init__()
        self.where = f"{logging_dir}/{run_name}"
        self.config: dict[str, Any] = {}
        self.logged: list[tuple[int | None, dict[str, Any]]] = []
        self.finished = False
        self.made.append(self)

    @property
    def tracker(self) -> "Noted":
        return self

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.config = values

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        if Noted.away:
            raise OSError("no route to host")
        self.logged.append((step, values))

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> type[Noted]:
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "noted", Noted)
    monkeypatch.setattr(Noted, "made", [])
    monkeypatch.setattr(Noted, "away", False)
    return Noted


async def run_once(bench: Bench, trackers: Trackers) -> None:
    async with Replicas([bench.fake.url], None) as servers:
        settings = TrainerSettings(adapter_dir=bench.folder)
        loop = PublishedLoop(
            settings, bench.recipe, bench.engine, servers, bench.learner, "m", trackers=trackers
        )
        await loop.recover()
        assert await loop.update_once()


async def test_update_evaluation_and_recipe_are_tracked(
    bench: Bench, noted: type[Noted], tmp_path: Path
) -> None:
    trackers = Trackers(["noted"], tmp_path, RECIPE)
    await bench.fill()
    async with bench.engine.begin() as connection:
        asked = call("e", split="eval", policy="m", policy_version=0)
        await ingest(connection, [asked, reward(1.0, episode="e")])
    await run_once(bench, trackers)
    trackers.close()
    [made] = noted.made
    assert made.where == f"{tmp_path}/pawl"
    assert made.config == {
        "m/learner": "grpo",
        "m/lora/rank": 4,
        "m/lora/target_modules": '["q_proj"]',
    }
    (_, evaluated), (step, updated) = made.logged
    assert (evaluated["m/eval/version"], evaluated["m/eval/mean"]) == (0, 1.0)
    assert (step, updated["m/reward_mean"], updated["m/episodes"]) == (1, 0.5, 4)
    assert all(isinstance(value, int | float) for value in updated.values())
    assert made.finished


async def test_tracker_that_fails_stops_no_update_and_is_logged_once(
    bench: Bench, noted: type[Noted], tmp_path: Path
) -> None:
    noted.away = True
    with capture_logs() as logs:
        trackers = Trackers(["noted"], tmp_path, RECIPE)
        for name in ("a", "b"):
            await bench.fill(name)
            await run_once(bench, trackers)
        trackers.close()
    failed = [line["reason"] for line in logs if line["event"] == "tracker_failed"]
    assert failed == ["OSError: no route to host"]
    assert (await bench.states())[2] == "serving"


def test_tracker_steps_never_decrease_in_a_run_shared_by_policies(
    noted: type[Noted], tmp_path: Path
) -> None:
    trackers = Trackers(["noted"], tmp_path, {})
    for policy, version in (("a", 7), ("b", 1), ("a", 8)):
        trackers.log(policy, {"loss": 0.5}, version)
    trackers.close()
    assert [step for step, _ in noted.made[0].logged] == [7, 8, 9]


@pytest.mark.parametrize(
    ("name", "why"),
    [("wandb", "run `pip install wandb`"), ("wanbd", r"'wanbd' is not known: use .*, wandb")],
)
def test_tracker_that_cannot_be_used_is_refused(
    name: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "_available_trackers", [])
    with pytest.raises(TrainerError, match=f"PAWL_TRACKERS: .*{why}"):
        Trackers([name], tmp_path, {})
