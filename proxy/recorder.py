"""Hands records to the spool; what could not be written is counted and marked."""

import asyncio
from pathlib import Path

import structlog

from proxy.capture import Captured, Frame, Gap
from proxy.metrics import DROPPED, RECORDED
from proxy.recent import Recent
from proxy.segments import encode_frame
from proxy.spool import take_folder
from store.ids import new_id

log = structlog.get_logger()

# Episodes with a gap that are still to be told of; what comes past them is only counted.
MOST_GAPS = 10_000


class Recorder:
    """A worker's way to the disk: a record is durable, or it is dropped, counted and marked."""

    def __init__(self, root: Path, *, segment_bytes: int, recent: Recent) -> None:
        """Take a folder under `root`.

        Raises:
            OSError: it cannot be made or written.
        """
        self._recent = recent
        self._gaps: dict[str, None] = {}
        self._spool = take_folder(root, segment_bytes=segment_bytes, on_commit=self._committed)

    def take(self, record: Captured, call: str, response_id: str | None) -> "asyncio.Future[bool]":
        """Take a call's record; it goes to disk whether or not anybody waits for it."""
        self._recent.remember_call(record, call, response_id)
        return self._spool.append(encode_frame(record), record.episode)

    def lose(self, episode: str) -> "asyncio.Future[bool]":
        """Count a record that could not even be made: as one that the disk refused."""
        self._committed(False, [episode])
        lost: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        lost.set_result(False)
        return lost

    async def append(self, record: Frame) -> bool:
        """Put any other record into the spool; False where the disk refused it."""
        return await self._spool.append(encode_frame(record))

    def _committed(self, durable: bool, episodes: list[str]) -> None:
        if durable:
            if self._gaps:
                self._tell_of_gaps()
            return
        RECORDED.inc(len(episodes))
        DROPPED.inc(len(episodes))
        log.error("records_dropped", records=len(episodes), reason="they could not be written")
        for episode in episodes:
            if episode and len(self._gaps) < MOST_GAPS:
                self._gaps[episode] = None

    def _tell_of_gaps(self) -> None:
        """The disk takes records again: the episodes that miss one are marked as incomplete."""
        episodes, self._gaps = tuple(self._gaps), {}
        gap = encode_frame(Gap(id=new_id().bytes, episodes=episodes))
        self._spool.append(gap).add_done_callback(
            lambda told: None if told.result() else self._gaps.update(dict.fromkeys(episodes))
        )

    async def close(self) -> None:
        """Write what waits, and let go of the folder."""
        await self._spool.flush()
        self._spool.close()
