"""`pawl spool`: show records that wait on disk, and show or replay dead letters."""

import json
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated
from uuid import UUID

import msgspec
import typer
from sqlalchemy.ext.asyncio import AsyncEngine

from pawl.commands.common import OfTenant, run_with_engine
from pawl.serving.supervisor import check_spans
from pawl.settings import read_settings
from proxy.ingester.removing import LETTER_SUFFIX, LETTERS_FOLDER, REASON_SUFFIX, names_in
from proxy.ingester.segment_reader import Segment
from proxy.ingester.transcribe import NO_READERS, question_digest, record_of
from proxy.redaction import Redactor, open_redactor
from proxy.settings import ProxySettings
from proxy.spool.folders import OPEN_SUFFIX, SEALED_SUFFIX
from proxy.spool.segments import MOST_INFLATED, CapturedCall, Frame, decode_payload, read_pieces
from proxy.tool_events import ResultReaders
from store.database import prevents_all_storing
from store.records import CallRecord, GapRecord, Record, SpoolRecord
from store.tenants import bare, tenant_of
from store.write.ingest import Ingester


def spool(
    replay: Annotated[
        bool, typer.Option("--replay", help="Try to store the dead letters again first.")
    ] = False,
    tenant: OfTenant = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Show the records that wait on disk, and the dead letters that could not be stored.

    With --tenant only dead letters of the tenant are shown and tried again; a segment holds records
    of all tenants. Reads PAWL_SPOOL_DIR; --replay also needs the database. Status 0 also if
    --replay could not store some letters: they stay on disk, and each is listed with the reason.
    """
    settings = read_settings(ProxySettings)
    folder = settings.spool_dir
    if replay:
        redactor, max_reply = open_redactor(settings), settings.max_reply_mb * 2**20

        async def run(engine: AsyncEngine) -> tuple[int, list[str]]:
            async with span_sender(settings) as send_spans:
                return await replay_letters(
                    folder,
                    engine,
                    settings.tool_results,
                    max_reply,
                    redactor,
                    tenant,
                    send_spans=send_spans,
                )

        stored, refused = run_with_engine(run)
        print(f"{stored} dead letters stored, {len(refused)} refused again", file=sys.stderr)
        for reason in refused:
            print(f"  {reason}", file=sys.stderr)
    view = view_spool(folder, tenant)
    print(json.dumps(msgspec.to_builtins(view)) if as_json else "\n".join(describe_view(view)))


SendSpans = Callable[[Iterable[SpoolRecord]], None]


@asynccontextmanager
async def span_sender(settings: ProxySettings) -> AsyncIterator[SendSpans | None]:
    """Yield the function that sends spans of stored calls, or None without `PAWL_OTEL`.

    Raises:
        NoSpans: `PAWL_OTEL` is set, but spans cannot be sent.
    """
    if not settings.otel:
        yield None
        return
    check_spans()
    from proxy.ingester.spans import Spans

    spans = Spans()
    try:
        yield spans.send
    finally:
        await spans.close(settings.spans_end_s)


class DeadLetterLine(Record, frozen=True, kw_only=True):
    """A record that the store refused, or an unreadable frame of the spool.

    `about` describes the record as far as it can be read: a call, a gap or feedback.
    """

    path: str
    reason: str
    bytes: int
    about: str


class SpoolView(Record, frozen=True, kw_only=True):
    """The contents of a spool directory: counts of its segments, and dead letters, oldest first.

    `records` counts the records that are not in the database yet; a full segment with none of them
    is deleted. The ingester turns `damaged` records into dead letters.
    """

    segments: int
    records: int
    damaged: int
    bytes: int
    dead_letters: tuple[DeadLetterLine, ...]


def view_spool(folder: Path, tenant: str | None = None) -> SpoolView:
    """Return the contents of the spool directory `folder`; `tenant` filters its dead letters.

    Segments have records of all tenants. An unreadable letter belongs to no tenant.
    """
    segments = records = damaged = size = 0
    for path in sorted([*folder.glob(f"*/*{SEALED_SUFFIX}"), *folder.glob(f"*/*{OPEN_SUFFIX}")]):
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            # A running proxy stored its records and deleted it meanwhile.
            continue
        segments, size = segments + 1, size + len(content)
        stored = Segment(path).stored.offset
        for piece in read_pieces(content, ended=path.suffix == SEALED_SUFFIX):
            records += not piece.damage and piece.start >= stored
            damaged += piece.records if piece.damage else 0
    letters = sorted((folder / LETTERS_FOLDER).glob(f"*{LETTER_SUFFIX}"))
    return SpoolView(
        segments=segments,
        records=records,
        damaged=damaged,
        bytes=size,
        dead_letters=tuple(_dead_letter_lines(letters, tenant)),
    )


def _dead_letter_lines(paths: Iterable[Path], tenant: str | None) -> Iterator[DeadLetterLine]:
    for path in paths:
        payload, reason = path.read_bytes(), path.with_suffix(REASON_SUFFIX)
        try:
            frame = decode_payload(payload)
        except Exception:
            # The letter's bytes are not a record.
            frame = None
        if tenant is not None and (
            frame is None or tenant not in {tenant_of(name) for _, name in names_in(frame)}
        ):
            continue
        yield DeadLetterLine(
            path=str(path),
            reason=reason.read_text(errors="replace") if reason.exists() else "unknown",
            bytes=len(payload),
            about=_describe_record(frame),
        )


def _describe_record(record: Frame | None) -> str:
    if record is None:
        return "not a record"
    if isinstance(record, CapturedCall):
        return f"call {UUID(bytes=record.id)} of episode {bare(record.episode)}"
    if isinstance(record, CallRecord):
        return f"call {record.id} of episode {bare(record.episode)}, redacted"
    if isinstance(record, GapRecord):
        return f"gap: the mark of {len(record.episodes)} episodes that miss a call"
    return f"feedback {record.id} ({len(record.items)} statements)"


async def replay_letters(
    folder: Path,
    engine: AsyncEngine,
    readers: ResultReaders = NO_READERS,
    most_reply: int = MOST_INFLATED,
    redactor: Redactor | None = None,
    tenant: str | None = None,
    *,
    send_spans: SendSpans | None = None,
) -> tuple[int, list[str]]:
    """Try to store each dead letter again; delete stored letters, and keep the others.

    Return the number of stored letters, and a line with the reason for each other letter. If the
    database does not answer (`prevents_all_storing`), its error is raised, and the rest are kept.
    `send_spans` is called with each stored record.
    """
    ingester = Ingester(question_digest=question_digest)
    stored, refused = 0, []
    for letter in view_spool(folder, tenant).dead_letters:
        path = Path(letter.path)
        payload = path.read_bytes()
        try:
            record = record_of(payload, readers, most_reply)
            if redactor is not None:
                record = redactor.redact_record(record)
            left_out = await ingester.store(engine, [record])
        except Exception as error:
            if prevents_all_storing(error):
                raise
            # An error of one letter must not stop the next.
            refused.append(f"{path.name}: {_first_line(str(error)) or type(error).__name__}")
            continue
        if send_spans is not None and not left_out:
            send_spans([record])
        path.unlink()
        path.with_suffix(REASON_SUFFIX).unlink(missing_ok=True)
        stored += 1
    return stored, refused


def describe_view(view: SpoolView) -> list[str]:
    lines = [
        f"{view.records} records wait to be stored; {view.segments} segments ({view.bytes} bytes)"
    ]
    if view.damaged:
        lines.append(f"{view.damaged} damaged records, which cannot be read")
    lines.append(f"{len(view.dead_letters)} dead letters")
    lines += [
        f"  {Path(d.path).name}: {d.about}: {_first_line(d.reason)}" for d in view.dead_letters
    ]
    return lines


def _first_line(reason: str) -> str:
    return reason.splitlines()[0][:200] if reason else ""
