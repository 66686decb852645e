"""`pawl episodes delete`: through a running proxy, past dead letters, and after a kill."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy.ext.asyncio import AsyncEngine
from structlog.testing import capture_logs

from pawl.commands.episodes import (
    UnknownEpisodes,
    choose_episodes,
    delete_episodes,
    describe_receipt,
    wait_until_drained,
)
from proxy.ingester import removing as deleting
from proxy.ingester.removing import DeadLetter, write_dead_letters
from proxy.spool.segments import Frame, decode_payload, encode_frame, encode_payload
from store.deleting import Receipt
from store.ids import new_id
from store.records import FeedbackRecord, GapRecord
from store.selecting import Selection
from store.write.ingest import Ingester
from tests.integration.conftest import Proxy
from tests.support.ledger.deleting import exported, places_with
from tests.support.ledger.sessions import until_idle
from tests.support.proxy.kept_files import bytes_now, paths_of
from tests.support.records import call, captured, reward
from tests.support.waiting import eventually

CANARY = "canary-7f3a9c"
GONE = f"gone {CANARY}"
ENDS = ("stored", "dead_lettered", "dropped", "deleted")


async def receipts(
    engine: AsyncEngine, spool: Path, *names: str, dry: bool = False, **chosen: Any
) -> list[Receipt]:
    selection = Selection(**chosen) if chosen else None
    found = await choose_episodes(engine, names, selection, marking=False)
    return [receipt async for receipt in delete_episodes(engine, spool, found, dry=dry)]


def files_with(folder: Path, word: str) -> list[Path]:
    """Every file below a folder that holds the word's bytes, or has it in its name."""
    return [
        path for path in paths_of(folder) if word in str(path) or word.encode() in bytes_now(path)
    ]


async def test_deleted_episode_is_removed_from_the_spool_and_stays_deleted(proxy: Proxy) -> None:
    spool = proxy.settings.spool_dir
    said = [{"role": "user", "content": CANARY}]
    for key in (GONE, "kept"):
        path = f"/episode/{key.replace(' ', '%20')}"
        assert (await proxy.chat(path, messages=said)).status == 200
    await proxy.feedback({"episode": GONE, "value": 1.0})
    await proxy.episodes(2)
    [receipt] = await receipts(proxy.engine, spool, GONE)
    assert receipt.removed["transitions"] == 1
    late = await proxy.chat(f"/episode/{GONE.replace(' ', '%20')}", messages=said)
    assert late.status == 200
    status, _ = await proxy.feedback({"call": late.headers["x-pawl-call"], "value": 1.0})
    assert status in (200, 202)
    assert await wait_until_drained(proxy.engine, spool, 60) == 0

    async def counted() -> dict[str, float]:
        counters = await proxy.counters()
        return counters if counters["pawl_records_deleted_total"] >= 2 else {}

    counters = await eventually(counted)
    ended = sum(counters[f"pawl_records_{end}_total"] for end in ENDS)
    assert counters["pawl_records_total"] == ended + counters["pawl_records_spooled"]
    assert list(await exported(proxy.engine)) == ["kept"]
    # What the other one said is its own.
    assert await places_with(proxy.engine, GONE) == []
    assert files_with(spool, GONE) == []


def letter(folder: Path, name: str, frame: Frame | bytes) -> Path:
    payload = frame if isinstance(frame, bytes) else encode_payload(frame)
    write_dead_letters(folder, [DeadLetter(name, payload, f"it quotes {name} {CANARY}")])
    return folder / "dead" / f"{name}.letter"


async def test_dead_letters_lose_only_the_deleted_episodes_records(
    engine: AsyncEngine, tmp_path: Path
) -> None:
    await Ingester().store(engine, [call(GONE), call("kept")])
    both = FeedbackRecord(
        id=new_id(),
        at=reward(1.0, episode="kept").at,
        items=(*reward(1.0, episode=GONE).items, *reward(1.0, episode="kept").items),
    )
    kept = [
        letter(tmp_path, "kept", captured("kept")),
        letter(tmp_path, "torn", b"torn"),
    ]
    before = [path.read_bytes() for path in kept]
    shared = letter(tmp_path, "shared", both)
    lost = letter(tmp_path, "lost", GapRecord(id=new_id(), episodes=(GONE, "kept")))
    letter(tmp_path, "call", captured(GONE))
    letter(tmp_path, "rewarded", reward(1.0, episode=GONE))
    letter(tmp_path, "damaged", b"damaged " + msgspec.msgpack.encode(GONE) + b" frames")
    # A word in somebody's prompt is no name of a record.
    kept.append(letter(tmp_path, "quoted", b"damaged, about " + GONE.encode()))
    before.append(kept[-1].read_bytes())
    [dry] = await receipts(engine, tmp_path, GONE, dry=True)
    assert len(list((tmp_path / "dead").glob("*.letter"))) == 8
    [receipt] = await receipts(engine, tmp_path, GONE)
    assert receipt.removed == {**dry.removed, "dead_letters": 5}
    assert sorted((tmp_path / "dead").glob("*.letter")) == sorted([*kept, shared, lost])
    assert [path.read_bytes() for path in kept] == before
    assert files_with(tmp_path, GONE) == [kept[-1]]
    left = decode_payload(shared.read_bytes())
    assert isinstance(left, FeedbackRecord)
    assert [item.target for item in left.items] == ["kept"]
    gap = decode_payload(lost.read_bytes())
    assert isinstance(gap, GapRecord)
    assert gap.episodes == ("kept",)
    # Again, as after a kill.
    [again] = await receipts(engine, tmp_path, GONE)
    assert (again.state, again.removed) == ("deleted_before", {"dead_letters": 0})


async def test_other_ingester_removes_its_dead_letters_of_deleted_episodes(
    engine: AsyncEngine, tmp_path: Path
) -> None:
    await Ingester().store(engine, [call(GONE), call("later")])
    gone, later = letter(tmp_path, "g", captured(GONE)), letter(tmp_path, "l", captured("later"))
    letters = deleting.DeadLetterCleaner(tmp_path)
    await receipts(engine, tmp_path / "elsewhere", GONE)
    with capture_logs() as logs:
        await letters.remove(engine)
        assert later.exists()
        assert not gone.exists()
        await receipts(engine, tmp_path / "elsewhere", "later")
        await letters.remove(engine)
        await letters.remove(engine)
    assert not later.exists()
    # Of deletions before it began it knows nothing; and no name of an episode is in a line.
    assert [line for line in logs if line["event"] == "episodes_deleted"] == [
        {"event": "episodes_deleted", "log_level": "info", "episodes": 1}
    ]


async def test_spooled_records_of_deleted_episodes_are_counted(
    engine: AsyncEngine, tmp_path: Path
) -> None:
    (tmp_path / "0").mkdir()
    frames = [captured(GONE), captured("kept"), reward(1.0, episode=GONE)]
    segment = tmp_path / "0" / "a.open"
    segment.write_bytes(b"".join(map(encode_frame, frames)))
    await Ingester().store(engine, [call(GONE)])
    assert await wait_until_drained(engine, tmp_path, 0) == 0
    await receipts(engine, tmp_path, GONE)
    assert await wait_until_drained(engine, tmp_path, 0) == 2
    segment.unlink()
    assert await wait_until_drained(engine, tmp_path, 0) == 0


async def test_delete_refuses_an_unrecorded_episode_name_unless_asked_to_mark_it(
    engine: AsyncEngine, tmp_path: Path
) -> None:
    await Ingester().store(engine, [call("e1")])
    with pytest.raises(UnknownEpisodes, match=r"'e2'.*nothing was deleted"):
        await choose_episodes(engine, ["e1", "e2"], None, marking=False)
    assert list(await exported(engine)) == ["e1"]
    chosen = await choose_episodes(engine, ["e1", "e2"], None, marking=True)
    done = [receipt async for receipt in delete_episodes(engine, tmp_path, chosen, dry=False)]
    assert [receipt.state for receipt in done] == ["deleted", "marked"]
    assert [describe_receipt(receipt, dry=False) for receipt in done] == [
        "e1: deleted (1 transitions)",
        "e2: not recorded; its calls and feedback will not be stored",
    ]


def pawl(url: str, folder: Path, arguments: Sequence[str]) -> "subprocess.Popen[str]":
    """Start the command as a user does."""
    environment = os.environ | {"DATABASE_URL": url, "PAWL_SPOOL_DIR": str(folder)}
    command = [sys.executable, "-m", "pawl.cli", "episodes", "delete", *arguments]
    return subprocess.Popen(
        command,
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


async def test_second_delete_removes_episodes_left_by_a_killed_delete(
    engine: AsyncEngine, database_url: str, tmp_path: Path
) -> None:
    await Ingester().store(
        engine, [call(f"{name}/{number}") for number in range(30) for name in ("u1", "u2")]
    )
    before = await exported(engine)
    process = pawl(database_url, tmp_path, ["--prefix", "u1/", "--json"])
    assert process.stdout is not None
    first = json.loads(await asyncio.to_thread(process.stdout.readline))
    process.kill()
    await asyncio.to_thread(process.communicate)
    await until_idle(engine)
    assert first["episode"].startswith("u1/")
    left = {key for key in await exported(engine) if key.startswith("u1/")}
    assert first["episode"] not in left
    again = pawl(database_url, tmp_path, ["--prefix", "u1/", "--json"])
    out, err = await asyncio.to_thread(again.communicate)
    assert again.returncode == 0, err
    assert {json.loads(line)["episode"] for line in out.splitlines()} == left
    assert await exported(engine) == {
        key: line for key, line in before.items() if key.startswith("u2/")
    }
    assert await places_with(engine, "u1/") == []
    refused = pawl(database_url, tmp_path, ["u2/0", "--prefix", "u1/"])
    _, err = await asyncio.to_thread(refused.communicate)
    assert (refused.returncode, "one of both" in err) == (2, True)
