"""`pawl spool`: looks at what waits and what could not be stored, and tries again."""

from pathlib import Path

from sqlalchemy.ext.asyncio import AsyncEngine

from pawl.commands.spool import describe_view, replay_letters, view_spool
from proxy.spool.segments import Frame, encode_frame, read_frames
from store.ids import new_id
from store.records import GapRecord
from store.selecting import select_episodes
from store.tenants import scoped
from tests.support.records import captured, reward, statement


def payload(record: Frame) -> bytes:
    [(_, data)] = read_frames(encode_frame(record))
    return data


def write_dead_letters(folder: Path, name: str, data: bytes, reason: str) -> None:
    dead = folder / "dead"
    dead.mkdir(exist_ok=True)
    (dead / f"{name}.letter").write_bytes(data)
    (dead / f"{name}.reason").write_text(reason)


def test_spool_command_reports_no_records_for_a_missing_folder(tmp_path: Path) -> None:
    view = view_spool(tmp_path / "not there")
    assert (view.segments, view.records, view.dead_letters) == (0, 0, ())
    assert describe_view(view)[0].startswith("0 records")


def test_spool_command_shows_waiting_records_and_dead_letters(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    frames = encode_frame(captured()) + encode_frame(captured())
    (tmp_path / "0" / "a.open").write_bytes(frames + b"torn")
    write_dead_letters(tmp_path, "000000", payload(captured("e7")), "refused\nbecause")
    write_dead_letters(tmp_path, "000001", b"torn", "a torn frame")
    view = view_spool(tmp_path)
    assert (view.segments, view.records) == (1, 2)
    assert "episode e7" in view.dead_letters[0].about
    assert view.dead_letters[1].about == "not a record"
    assert view.dead_letters[1].reason == "a torn frame"
    assert any("000000.letter" in line and "refused" in line for line in describe_view(view))


async def test_only_the_tenants_own_dead_letters_are_shown_and_replayed(
    engine: AsyncEngine, tmp_path: Path
) -> None:
    keys = {tenant: scoped(tenant, "e") for tenant in ("a", "b", "default")}
    for tenant, key in keys.items():
        write_dead_letters(tmp_path, tenant, payload(captured(key)), "the partition was missing")
    gap = GapRecord(id=new_id(), episodes=(keys["a"], keys["b"]))
    write_dead_letters(tmp_path, "gap", payload(gap), "refused")
    write_dead_letters(tmp_path, "torn", b"torn", "a torn frame")

    def shown(tenant: str | None) -> list[str]:
        return [Path(letter.path).stem for letter in view_spool(tmp_path, tenant).dead_letters]

    assert shown("a") == ["a", "gap"]
    assert shown("default") == ["default"]
    assert shown("nobody") == []
    assert len(shown(None)) == 5
    assert await replay_letters(tmp_path, engine, tenant="default") == (1, [])
    assert shown(None) == ["a", "b", "gap", "torn"]


async def test_replay_stores_valid_dead_letters_and_keeps_the_others(
    engine: AsyncEngine, tmp_path: Path
) -> None:
    bad = statement("nul\x00", 1.0, episode="bad")
    write_dead_letters(tmp_path, "0", payload(captured("good")), "the partition was missing")
    write_dead_letters(tmp_path, "1", payload(bad), "refused")
    write_dead_letters(tmp_path, "2", b"torn", "a torn frame")
    write_dead_letters(tmp_path, "3", payload(reward(1.0, episode="good")), "refused")
    stored, refused = await replay_letters(tmp_path, engine)
    assert stored == 2
    assert [why.partition(":")[0] for why in refused] == ["1.letter", "2.letter"]
    assert [Path(d.path).name for d in view_spool(tmp_path).dead_letters] == [
        "1.letter",
        "2.letter",
    ]
    async with engine.connect() as connection:
        assert len(await select_episodes(connection)) == 1
    assert await replay_letters(tmp_path, engine) == (0, refused)
