"""Have a program of the user's redact each call, in the keeper, before the call is stored.

The program is started once and answers line by line: for each line of JSON on its standard input it
writes one on its standard output. A line in is an object with `call` (its id), `episode`, `agent`,
`request` and `reply`; a line out is an object with what is to be stored instead of `request` or
`reply`, or `{}` if that is as it should be.

A program that ends, takes too long or answers nonsense is started again, and asked once more. If it
then still fails over a call, but answers an empty one, the call is stored without its content. If
it does not answer that one either, no call is stored until it does. So nothing is ever stored that
the program has not seen.
"""

import asyncio
import os
import shlex
import signal
from collections.abc import Sequence
from contextlib import suppress
from shutil import which
from typing import Any, Final

import msgspec
import structlog

from proxy.errors import BadRedaction, ProgramFails
from proxy.redaction.calls import without_derived
from proxy.redaction.redactor import count_redacted
from proxy.redaction.withheld import without_content
from proxy.settings import ProxySettings
from store.records import CallRecord
from store.tenants import bare

log = structlog.get_logger()

NAME: Final = "program"
SETTING: Final = "PAWL_REDACTION_PROGRAM"
# A line holds a request and a reply.
LONGEST_LINE: Final = 2**30
# A process that it left behind, in a group of its own, may keep its pipes open for longer.
END_S: Final = 1.0
PROBE: Final = b'{"call":"","episode":"","agent":"","request":{},"reply":{}}\n'


class _Line(msgspec.Struct):
    """Describe a call to the program; a body is null where there is none."""

    call: str
    episode: str
    agent: str
    request: msgspec.Raw
    reply: msgspec.Raw


class _Answer(msgspec.Struct, forbid_unknown_fields=True):
    """Hold what the program wants stored instead, where it says so."""

    request: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    reply: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class BadAnswer(Exception):
    """Report that the program did not answer as it should; the message quotes nothing."""


_answers: Final = msgspec.json.Decoder(_Answer)
_NULL: Final = msgspec.Raw(b"null")


def open_program(settings: ProxySettings) -> "Program | None":
    """Return the program that the settings name, not started yet, or None if they name none.

    Raises:
        BadRedaction: there is no such program.
    """
    if settings.redaction_program is None:
        return None
    try:
        command = shlex.split(settings.redaction_program)
    except ValueError as error:
        raise BadRedaction(f"{SETTING} cannot be split into words: {error}") from error
    if not command or which(command[0]) is None:
        raise BadRedaction(
            f"{SETTING}: there is no program {command[0] if command else ''!r}; write a command "
            "that is on PATH, or the path of a file that may be executed, and its arguments"
        )
    return Program(command, settings.redaction_program_s)


class Program:
    """Run one such program, and ask it about one call at a time."""

    def __init__(self, command: Sequence[str], within_s: float) -> None:
        """Store the command, and how many seconds it may take for a call."""
        self._command = command
        self._within_s = within_s
        self._process: asyncio.subprocess.Process | None = None

    async def redacted(self, record: CallRecord) -> CallRecord:
        """Return a call as the program wants it stored.

        Raises:
            ProgramFails: the program does not work; the call must not be stored now.
        """
        if record.request_raw or record.reply_raw:
            count_redacted((), "not_json")
            record = without_derived(record, texts=True)
        line = _line_of(record)
        try:
            answer = await self._asked_twice(line)
        except BadAnswer as error:
            await self._check(str(error))
            count_redacted((), NAME)
            log.error("call_withheld", call=str(record.id), error=f"{SETTING}: {error}")
            return without_content(record)
        left = _with_answer(record, answer)
        if left is not record:
            count_redacted((NAME,))
        return left

    async def _asked_twice(self, line: bytes) -> _Answer:
        try:
            return await self._ask(line)
        except BadAnswer:
            return await self._ask(line)

    async def _check(self, why: str) -> None:
        """Return if the program answers when it is asked about nothing.

        Raises:
            ProgramFails: it does not.
        """
        try:
            await self._ask(PROBE)
        except BadAnswer as error:
            raise ProgramFails(
                f"{SETTING} {why}, and {error} when it is asked about an empty call. Calls wait on "
                "disk until it works: run it by hand and give it a line of JSON"
            ) from error

    async def _ask(self, line: bytes) -> _Answer:
        """Write a line and return the program's answer; after a failure it is not running.

        Raises:
            BadAnswer: it cannot be started, ends, takes too long, or answers something else.
        """
        try:
            async with asyncio.timeout(self._within_s):
                process = await self._running()
                answer = await _exchanged(process, line)
            if not answer.endswith(b"\n"):
                raise BadAnswer("ended without an answer")
            return _read(answer)
        except TimeoutError as error:
            why = BadAnswer(f"took longer than {self._within_s} s")
            await self.close()
            raise why from error
        except msgspec.MsgspecError as error:
            await self.close()
            raise BadAnswer("answered something else than an object with request, reply") from error
        except (OSError, ValueError) as error:
            await self.close()
            raise BadAnswer(f"cannot be run: {type(error).__name__}") from error
        except BaseException:
            # What it was asked last it may answer later: that must not count for another call.
            await self.close()
            raise

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                # It may quote calls, and the log must not.
                stderr=asyncio.subprocess.DEVNULL,
                limit=LONGEST_LINE,
                # A group of its own, so that what it started ends with it.
                start_new_session=True,
            )
        return self._process

    async def close(self) -> None:
        """End the program and what it started, if it runs."""
        process, self._process = self._process, None
        # Of one that has ended, the id may be another's by now.
        if process is None or process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        try:
            # It lasts until nobody has the program's pipes open any more.
            await asyncio.wait_for(process.wait(), END_S)
        except TimeoutError:
            log.warning("redaction_program_left_a_process", pid=process.pid)


async def _exchanged(process: asyncio.subprocess.Process, line: bytes) -> bytes:
    """Write a line and return the one that comes back, in whatever order the program does so."""
    writer, reader = process.stdin, process.stdout
    if writer is None or reader is None:
        raise BadAnswer("has no standard input or output")
    writer.write(line)
    _, answer = await asyncio.gather(writer.drain(), reader.readline())
    return answer


def _read(line: bytes) -> _Answer:
    """Return the program's answer.

    Raises:
        BadAnswer, msgspec.MsgspecError: it is none.
    """
    answer = _answers.decode(line)
    for raw in (answer.request, answer.reply):
        if raw is not msgspec.UNSET and bytes(raw).lstrip()[:1] not in (b"{", b"n"):
            raise BadAnswer("answered with a request or a reply that is no object")
    return answer


def _line_of(record: CallRecord) -> bytes:
    line = _Line(
        call=str(record.id),
        episode=bare(record.episode),
        agent=record.agent,
        request=_NULL if record.request is None else msgspec.Raw(record.request),
        reply=_NULL if record.reply is None else msgspec.Raw(record.reply),
    )
    # Without the line breaks that a client may have put between values.
    return msgspec.json.format(msgspec.json.encode(line), indent=-1) + b"\n"


def _with_answer(record: CallRecord, answer: _Answer) -> CallRecord:
    """Return a call with the program's bodies; it is `record` if they say the same."""
    changed: dict[str, Any] = {}
    for name, raw in (("request", answer.request), ("reply", answer.reply)):
        before: bytes | None = getattr(record, name)
        if isinstance(raw, msgspec.UnsetType) or _same(before, bytes(raw)):
            continue
        changed[name] = None if bytes(raw) == bytes(_NULL) else bytes(raw)
    if not changed:
        return record
    return without_derived(msgspec.structs.replace(record, **changed), texts=True)


def _same(before: bytes | None, after: bytes) -> bool:
    compact = msgspec.json.format(before if before is not None else b"null", indent=-1)
    return compact == msgspec.json.format(after, indent=-1)
