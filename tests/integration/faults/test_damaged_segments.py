"""Damaged segments and dead letters: each costs what is damaged, and holds up no other record."""

import os
import stat
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from pawl.commands.spool import replay_letters
from proxy.calls.answer import ReplyBuffer
from proxy.ingester import batch_writer, segment_reader
from proxy.ingester.drain import Drainer
from proxy.spool.recorder import Spool
from proxy.spool.segments import HEAD_BYTES, encode_frame
from tests.integration.faults.conftest import Spooled
from tests.support.faults.counters import assert_adds_up, ledger
from tests.support.records import captured


async def test_compressed_reply_that_inflates_beyond_the_limit_becomes_a_dead_letter(
    engine: AsyncEngine, tmp_path: Path
) -> None:
    tape = ReplyBuffer()
    for _ in range(64):
        tape.add(b"\0" * 2**20)
    reply, deflated = tape.kept_bytes()
    assert deflated
    assert len(reply) < 2**20
    drainer = Drainer(tmp_path, lambda: engine, batch=10, most_reply=2**20)
    spooled = Spooled(tmp_path, engine, drainer)
    spooled.write(captured("bomb", reply=reply, deflated=True), captured("a"))
    await spooled.drain()
    assert (await spooled.stored(), len(spooled.letters())) == (1, 1)
    assert "PAWL_MAX_REPLY_MB" in spooled.reasons()
    # With more room it is stored after all.
    assert await replay_letters(tmp_path, engine) == (1, [])
    assert (await spooled.stored(), spooled.letters()) == (2, [])
    assert_adds_up()


async def test_flipped_bit_in_a_segment_loses_only_the_damaged_record(spooled: Spooled) -> None:
    path = spooled.write(*[captured(f"e{n}") for n in range(5)])
    data = bytearray(path.read_bytes())
    data[len(data) // 5 + HEAD_BYTES // 2] ^= 1
    path.write_bytes(data)
    await spooled.drain()
    assert await spooled.outcome() == (4, 1, [])
    assert "damaged" in spooled.reasons()


async def test_damage_in_a_growing_segment_costs_only_the_damaged_record(
    engine: AsyncEngine, tmp_path: Path
) -> None:
    spool = Spool(tmp_path / "0", segment_bytes=2**20)
    for number in range(4):
        await spool.append(encode_frame(captured(f"e{number}")))
    [path] = [path for path in tmp_path.glob("0/*.open") if path.stat().st_size]
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 4 + 20)
        file.write(b"\xff\xff")
    spooled = Spooled(tmp_path, engine, Drainer(tmp_path, lambda: engine, batch=10))
    await spooled.drainer.count()
    assert_adds_up()
    await spooled.drain()
    assert (await spooled.stored(), len(spooled.letters())) == (3, 1)
    spool.close()
    assert_adds_up()


async def test_dead_letters_are_private_and_durable_before_their_segment_is_deleted(
    spooled: Spooled, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real, unlink = os.fsync, Path.unlink

    def fsync(handle: int) -> None:
        real(handle)
        # A letter gets its name once it is whole.
        synced.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name.removesuffix(".new"))

    def unlinked(path: Path, missing_ok: bool = False) -> None:
        if path.suffix == ".seg":
            synced.append("gone")
        unlink(path, missing_ok)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "unlink", unlinked)
    before = os.umask(0)
    try:
        path = spooled.write(captured("a"))
        with path.open("ab") as file:
            file.write(b"torn")
        await spooled.drain()
    finally:
        os.umask(before)
    [letter] = spooled.letters()
    for file in (letter, letter.with_suffix(".reason")):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(letter.parent.stat().st_mode) == 0o700
    assert synced[-1] == "gone"
    assert set(synced[:-1]) == {
        letter.name,
        letter.with_suffix(".reason").name,
        "dead",
        spooled.folder.name,
    }
    assert synced[-2] == "dead"


@pytest.mark.parametrize("next_ingester", [False, True], ids=["same ingester", "next ingester"])
async def test_dead_letter_that_the_disk_refuses_waits_and_holds_up_no_other_record(
    spooled: Spooled, monkeypatch: pytest.MonkeyPatch, next_ingester: bool
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    bad = captured("bad", dialect="none such")
    with monkeypatch.context() as patched:
        patched.setattr(batch_writer, "write_dead_letters", full)
        first = spooled.write(captured("a"), bad, captured("b"), bad, bad)
        spooled.write(captured("c"))
        await spooled.drain()
    assert await spooled.outcome() == (3, 0, [first])
    assert spooled.drainer.progress.held == 3
    assert_adds_up()
    # A follower stores again the records behind the first of them, and loses nothing.
    monkeypatch.setattr(batch_writer, "LETTER_RETRY_S", 0.0)
    if next_ingester:
        await spooled.follow()
    await spooled.drain()
    assert await spooled.outcome() == (3, 3, [])


async def test_unreadable_segment_does_not_keep_other_segments_from_being_stored(
    spooled: Spooled, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = spooled.write(captured("a"))
    spooled.write(captured("b"))
    real = segment_reader.Segment._read

    def read(self: Any, offset: int, size: int) -> Any:
        if self.path.stem == broken.stem:
            raise OSError(5, "Input/output error")
        return real(self, offset, size)

    monkeypatch.setattr(segment_reader.Segment, "_read", read)
    await spooled.drain()
    assert await spooled.stored() == 1
    assert broken.exists()


async def test_segment_position_file_that_is_damaged_or_unwritable_loses_no_record(
    spooled: Spooled, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = spooled.write(captured("a"), captured("b"))
    for mark in (b"\xff" * 8, b"junk", (10**6).to_bytes(8), b"\0" * 20):
        path.with_suffix(".at").write_bytes(mark)
        assert segment_reader.Segment(path).stored == segment_reader.BEGIN
    path.with_suffix(".at").unlink()

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    before = ledger()["pawl_records_stored_total"]
    await spooled.drain()
    assert await spooled.outcome() == (2, 0, [])
    assert ledger()["pawl_records_stored_total"] == before + 2
