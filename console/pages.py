"""Make pages: the viewer, database connections for reading and writing, and filters for values.

Screens use this module and do not deal with keys, prefixes and headers (`console.app`). Text
of agents and models is hostile: it is shown by `visible_text`, as plain text.
"""

import asyncio
import re
import unicodedata
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import cache, partial
from hashlib import sha256
from importlib.resources import files
from itertools import groupby, islice
from typing import Any, Final, Generic, TypeVar, cast
from urllib.parse import parse_qsl, quote, urlencode
from uuid import UUID

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse

from pawl.credit import ExplainedUpdate
from pawl.doctor.checks import Finding
from pawl.settings import ConsoleSettings
from store.database import make_engine
from store.grants import Scope
from store.read.browsing import set_up_transaction
from store.records import Record
from store.tenants import bare

# Longest wait for a connection: to spare the database, pages are read one by one.
CONNECTION_WAIT_S: Final = 10.0
# Longest time of one statement: no page is worth slowing the database down for longer.
STATEMENT_LIMIT_S: Final = 5.0
# In bytes; a larger page is refused.
LARGEST_PAGE: Final = 2_000_000
LARGEST_FORM: Final = 1024 * 1024
# Characters shown of one text of an agent or a model, unless its screen says otherwise.
SHOWN_CHARACTERS: Final = 4000


T = TypeVar("T")

# The viewer's name if no key is needed; no key has a name with spaces.
NOBODY: Final = "anyone without a key"


class Viewer(Record, frozen=True, kw_only=True):
    """Who looks at the console, and what the key allows.

    `name` is the key's, or `NOBODY` if no key is needed. `tenant` is None for a viewer who sees all
    tenants' data: with an admin key of the default tenant, or if no key is needed.
    """

    name: str
    tenant: str | None
    scopes: frozenset[Scope]


class Refusal(HTTPException):
    """A page cannot be shown: `title` says what went wrong, and `detail` what to do."""

    def __init__(self, status: int, title: str, detail: str = "") -> None:
        super().__init__(status, detail)
        self.title = title


class SharedCache(Generic[T]):
    """A cache of values, each computed once in a task for all requests that wait for it."""

    def __init__(self, kept_s: float, most: int) -> None:
        """Keep the newest `most` values, each for `kept_s` seconds."""
        self._kept_s, self._most = kept_s, most
        self._tasks: dict[Any, asyncio.Task[T]] = {}

    async def get(self, key: object, compute: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the value of a key; a failed computation is repeated at the next request."""
        if key not in self._tasks:
            self._tasks[key] = asyncio.create_task(compute())
            asyncio.get_running_loop().call_later(self._kept_s, self._tasks.pop, key, None)
        task = self._tasks[key]
        done = [old for old, one in self._tasks.items() if one.done() and old != key]
        for old in done[: -self._most]:
            self._tasks.pop(old)
        try:
            return await asyncio.shield(task)
        finally:
            if task.done() and (task.cancelled() or task.exception()):
                self._tasks.pop(key, None)


class Console:
    """The parts that all pages share: the database, and the templates with their functions."""

    def __init__(self, app: Starlette, settings: ConsoleSettings, database_url: str) -> None:
        """Make the pools, which connect on first use, and load the templates."""
        self.app = app
        self.settings = settings
        self.prefix = settings.console_prefix
        pool = partial(
            make_engine,
            database_url,
            max_overflow=0,
            limit_s=2 * STATEMENT_LIMIT_S,
            wait_s=CONNECTION_WAIT_S,
        )
        # Pages share one connection. The check of a key and the doctor wait for no page.
        self.engine: AsyncEngine = pool(pool_size=1)
        self.unqueued: AsyncEngine = pool(pool_size=3)
        self.templates = Environment(
            loader=PackageLoader("console"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self.templates.filters.update(
            when=time_element,
            figure=format_number,
            visible=visible_text,
            plain=plain_text,
            bare=bare,
        )
        self.templates.globals.update(url=self.url, static=cache(self.static), nobody=NOBODY)
        # The doctor's findings, by tenant. Cached, as the doctor asks all processes.
        self.examined: SharedCache[list[Finding]] = SharedCache(kept_s=10.0, most=20)
        # The credit of an update, by tenant and update. Few, as each has the texts of its calls;
        # cached, as a viewer of an episode also looks at its calls and its update.
        self.explained: SharedCache[ExplainedUpdate] = SharedCache(kept_s=60.0, most=2)
        # Held while a change is tried out, which takes the change's database locks.
        self.previewing = asyncio.Lock()

    def url(self, name: str, *, query: Mapping[str, Any] | None = None, **parameters: Any) -> str:
        """Return the address of a route, which begins with the console's prefix."""
        path = self.prefix + quote(str(self.app.url_path_for(name, **parameters)), safe="/@:~+")
        return f"{path}?{urlencode(query)}" if query else path

    def static(self, name: str) -> str:
        """Return the address of a static file, which changes with the file's content."""
        content = files("console").joinpath("static", name).read_bytes()
        return self.url("static", path=name, query={"v": sha256(content).hexdigest()[:12]})


def console_of(request: Request) -> Console:
    return cast("Console", request.app.state.console)


def viewer_of(request: Request) -> Viewer:
    """Return who sent the request, as stored in it by `app.Guard`."""
    return cast("Viewer", request.state.viewer)


# The database


@asynccontextmanager
async def reading(request: Request) -> AsyncIterator[AsyncConnection]:
    """Open a read-only transaction; a statement takes at most `STATEMENT_LIMIT_S`."""
    async with console_of(request).engine.connect() as connection:
        await connection.execution_options(postgresql_readonly=True)
        await set_up_transaction(connection, STATEMENT_LIMIT_S)
        yield connection


@asynccontextmanager
async def writing(request: Request) -> AsyncIterator[AsyncConnection]:
    """Open a transaction for a change that `require` allowed; it is committed after the block."""
    async with console_of(request).engine.begin() as connection:
        await set_up_transaction(connection, STATEMENT_LIMIT_S)
        yield connection


def require(request: Request, scope: Scope) -> None:
    """Refuse a change if the viewer's key lacks `scope`, or if another site linked to it.

    Raises:
        Refusal: the key lacks the scope, or the request comes from another site.
    """
    if request.headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
        title = "A link of another site leads here"
        raise Refusal(403, title, "Open the console itself, and ask for the change there.")
    who = viewer_of(request)
    if scope not in who.scopes:
        raise Refusal(
            403,
            f"Changes need a key for {scope}",
            f"You are {who.name}, with the scopes {', '.join(sorted(who.scopes))}: log in with a "
            f"key that was made with --scope read,{scope} (`pawl keys create NAME`).",
        )


# Requests and responses


def uuid_in(text: str | None) -> UUID | None:
    """Return the UUID in a parameter, or None if it is missing or invalid."""
    try:
        return UUID(text) if text else None
    except ValueError:
        return None


async def form(request: Request) -> dict[str, str]:
    """Return the fields of a posted form; the last of repeated fields counts.

    Raises:
        Refusal: the form is too large, or not UTF-8.
    """
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > LARGEST_FORM:
            raise Refusal(413, "The form is too large", f"Send at most {LARGEST_FORM} bytes.")
    try:
        return dict(parse_qsl(body.decode(), keep_blank_values=True, errors="strict"))
    except ValueError as error:
        raise Refusal(400, "The form cannot be read", "Send it as UTF-8.") from error


def page(request: Request, template: str, status: int = 200, **context: Any) -> HTMLResponse:
    """Return a whole page from a template that extends `base.html`."""
    console = console_of(request)
    context["viewer"] = getattr(request.state, "viewer", None)
    # The first part of the path names an entry of the navigation.
    inner = request.scope["path"].removeprefix(console.prefix)
    context.setdefault("screen", inner.strip("/").partition("/")[0] or "overview")
    body = console.templates.get_template(template).render(context).encode(errors="replace")
    if len(body) > LARGEST_PAGE:
        why = f"It has {len(body):,} bytes, over {LARGEST_PAGE:,}: choose less with the filter."
        raise Refusal(500, "This page is too large to be shown", why)
    return HTMLResponse(body, status)


def part(request: Request, template: str, **context: Any) -> HTMLResponse:
    """Return a part of a page for htmx; for a browser without scripts, a page with only it."""
    alone = "hx-request" not in request.headers
    return page(request, "base.html" if alone else template, part=template, **context)


# How values are shown: the filters of the templates


def time_element(moment: datetime | None) -> Markup:
    """Return a time as an element that `console.js` rewrites in the viewer's zone."""
    if moment is None:
        return Markup("–")
    utc = moment.astimezone(UTC)
    return Markup('<time datetime="{}">{:%Y-%m-%d %H:%M:%S} UTC</time>').format(
        utc.isoformat(timespec="milliseconds"), utc
    )


def format_number(value: float | None, digits: int = 3) -> str:
    """Format a whole number with grouped digits, another with `digits` significant, None as –."""
    if value is None:
        return "–"
    if value != value or abs(value) == float("inf"):  # noqa: PLR0124
        return str(value)
    size = abs(value)
    if isinstance(value, int) or (float(value).is_integer() and size < 1e15):
        text = f"{int(value):,}"
    elif 1e-3 <= size < 1e6:
        # Decimals fill up to `digits`, so that figures in a column can be compared.
        text = f"{value:,.{max(digits - (len(str(int(size))) if size >= 1 else 0), 0)}f}"
    else:
        text = f"{value:.{digits}g}"
    return text.replace(",", "\u202f").replace("-", "\u2212")


# Invisible characters that may change how other text is shown: control characters except tab and
# newline, direction marks, zero-width characters, and halves of surrogate pairs.
_INVISIBLE: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u115f\u1160\u180e\u200b-\u200f\u2028-\u202e"
    "\u2060-\u206f\u3164\ufeff\ufff9-\ufffb\uffa0\ud800-\udfff\U000e0000-\U000e0fff]+"
)


def plain_text(text: str) -> str:
    """Return text of an agent or a model for a tooltip or a title; U+FFFD replaces `_INVISIBLE`."""
    return _INVISIBLE.sub("\ufffd", text)


# Combining marks kept on one letter, so that they do not grow over its neighbours.
_MARKS: Final = 4


def visible_text(text: str | None, limit: int = SHOWN_CHARACTERS, raw: str | None = None) -> Markup:
    """Return text of an agent or a model as markup, with invisible characters made visible.

    It is cut after `limit` characters, and says so; `raw` is the address of the whole text.
    """
    if text is None:
        return Markup("–")
    kept = text[:limit]
    if not kept.isascii():
        runs = groupby(kept, key=lambda letter: unicodedata.combining(letter) > 0)
        kept = "".join("".join(islice(run, _MARKS if marks else None)) for marks, run in runs)
    shown = _INVISIBLE.sub(_code_points, str(escape(kept)))
    if len(text) > limit:
        rest = Markup('<a href="{}">raw</a>').format(raw) if raw else ""
        shown += f' <span class="cut">… {len(text) - limit:,} more {rest}</span>'
    return Markup('<bdi class="text">{}</bdi>').format(Markup(shown))


def _code_points(unseen: re.Match[str]) -> str:
    """Return the code points of the first eight invisible characters, and the number of others."""
    named = " ".join(f"{ord(one):04X}" for one in unseen[0][:8])
    more = "" if len(unseen[0]) <= 8 else f" +{len(unseen[0]) - 8}"
    return f"<i>{named}{more}</i>"
