"""Write the page of settings: every environment variable that Pawl reads."""

from typing import Final, NamedTuple

from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

from pawl.settings import PREFIX, ClientSettings, JudgeSettings, StackSettings, StewardSettings
from proxy.settings import ProxySettings
from store.settings import StoreSettings
from trainer.settings import ServerSettings, TrainerSettings

from .fields import default_of, meaning_of, type_of
from .markdown import code, page, paragraph, table, table_with_notes

INTRODUCTION: Final = """
Pawl is configured by environment variables and by a file `.env` in the working directory; the
environment wins. Each process reads its variables once, when it starts. An empty value counts as
unset. An unknown `PAWL_*` variable, or a value that cannot be used, is a startup error; the
message names the variable and, for an unknown one, the closest name.
"""
TYPES: Final = """
Types: `HOST:PORT` brackets an IPv6 host (`[::1]:8100`). Names that end in `_S` are seconds, in
`_MB` MiB (2^20 bytes), in `_KB` KiB (2^10 bytes). Relative paths start at the working directory.
"""
ADDRESS: Final = "HOST:PORT"
# Fields that hold several values, by how they are written in one variable.
LISTS: Final = {
    "replica_urls": "comma-separated URLs",
    "default_sampling": "comma-separated NAME=NUMBER",
    "keep_days": "DAYS and TENANT=DAYS, comma-separated",
}


class Section(NamedTuple):
    """Describe one settings class: its section's title, and the commands that read it."""

    kind: type[BaseSettings]
    title: str
    readers: str


# The commands that run a whole stack.
STACKS: Final = "`pawl up`, `pawl demo`, `pawl example`"
SECTIONS: Final = (
    Section(StoreSettings, "Database", "every command that uses the store"),
    Section(ProxySettings, "Proxy", f"`pawl proxy`, {STACKS}, `pawl spool`"),
    Section(TrainerSettings, "Trainer", f"`pawl trainer`, {STACKS}"),
    Section(StewardSettings, "Steward", f"`pawl steward`, {STACKS}"),
    Section(StackSettings, "Local stack", STACKS),
    Section(JudgeSettings, "Judge", "`pawl judge`, `pawl up`"),
    Section(ClientSettings, "Clients", "`pawl rollout`, `pawl judge`"),
)
# What the tables do not show, by the title of the section.
NOTES: Final = {
    "Database": """
`pawl demo` and `pawl example` always use an embedded PostgreSQL of their own, below their folder.
""",
    "Proxy": """
`pawl judge` reads two of them: `PAWL_UPSTREAM_URL`, the default of its `--base-url`, and
`PAWL_LISTEN`, where it posts feedback. `pawl spool` reads `PAWL_SPOOL_DIR`, `PAWL_TOOL_RESULTS`
and `PAWL_MAX_REPLY_MB`. `pawl up` starts a vLLM only if `PAWL_UPSTREAM_URL` is unset.
""",
    "Steward": """
It also reads `PAWL_UPSTREAM_URL` and `PAWL_REPLICA_URLS`, the replicas that it looks at, and
`PAWL_ADAPTER_SLOTS`.
""",
    "Local stack": """
`pawl up`, `pawl demo` and `pawl example` pass their environment on to the processes that they
start. The last two replace the database, the upstream, all folders, the recipe, the policies, the
model and the seed by their own.
""",
    "Judge": """
The options of `pawl judge` win over these variables. `pawl up` runs a judge if
`PAWL_JUDGE_COMMAND` is set. `pawl judge --model` sends the key in `OPENAI_API_KEY`, if that is set.
""",
}


def settings_page() -> str:
    """Return `settings.md`."""
    return page(
        "Settings",
        paragraph(INTRODUCTION),
        paragraph(TYPES),
        _overview(),
        *(_section(section) for section in SECTIONS),
    )


def variable(name: str) -> str:
    """Return the environment variable of a settings field."""
    return "DATABASE_URL" if name == "database_url" else PREFIX + name.upper()


def own_fields(kind: type[BaseSettings]) -> dict[str, FieldInfo]:
    """Return the fields of a settings class without those that another section has."""
    shared = () if kind is StoreSettings else tuple(StoreSettings.model_fields)
    if kind is StewardSettings:
        shared = tuple(ServerSettings.model_fields)
    return {name: field for name, field in kind.model_fields.items() if name not in shared}


def _overview() -> str:
    rows = [
        (f"[{section.title}](#{section.title.lower().replace(' ', '-')})", section.readers)
        for section in SECTIONS
    ]
    return table(("section", "read by"), rows)


def _section(section: Section) -> str:
    rows = [
        (code(variable(name)), _default(field), _type(name, field), meaning_of(field))
        for name, field in own_fields(section.kind).items()
    ]
    blocks = [
        f"## {section.title}",
        paragraph(f"Read by {section.readers}."),
        table_with_notes(("variable", "default", "type, limits", "meaning"), rows),
        paragraph(NOTES.get(section.title, "")),
    ]
    return "\n\n".join(block for block in blocks if block)


def _type(name: str, field: FieldInfo) -> str:
    if name.endswith("listen"):
        return ADDRESS
    return LISTS.get(name) or type_of(field)


def _default(field: FieldInfo) -> str:
    """Return the default as it would stand in the environment: without quotes."""
    if field.default in ((), {}, None) or not _plain(field.default):
        return "unset"
    return default_of(field).replace('"', "")


def _plain(value: object) -> bool:
    return isinstance(value, str | int | float | bool) or not hasattr(value, "__struct_fields__")
