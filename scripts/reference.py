"""Generate the reference pages from the code: `python -m scripts.reference`.

Commands come from typer, settings and recipe keys from pydantic's JSON schemas, and metrics from
their definitions. `tests/unit/docs/test_reference.py` compares the pages with the code. The lists
of the settings that each process reads are written for the Helm chart, too.
"""

import json
import warnings
from collections.abc import Iterable, Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import typer
import typer.cli
from prometheus_client.metrics import MetricWrapperBase
from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, PydanticJsonSchemaWarning
from pydantic_settings import BaseSettings

import controller.metrics
import proxy.metrics
import store.metrics
import trainer.metrics
from pawl.cli import app
from pawl.settings import (
    AdaptersSettings,
    ClientSettings,
    ConsoleSettings,
    ControllerSettings,
    StackSettings,
)
from proxy.settings import ProxySettings
from store.settings import StoreSettings
from trainer.recipes.recipe import Recipe
from trainer.settings import TrainerSettings

ROOT: Final = Path(__file__).parents[1]
FOLDER: Final = ROOT / "docs" / "reference"
CHART_SETTINGS: Final = ROOT / "deploy" / "chart" / "files" / "settings.json"
GENERATED: Final = "<!-- Generated from the code by `make docs`; do not edit by hand. -->"
SETTINGS: Final[dict[str, type[BaseSettings]]] = {
    "Database": StoreSettings,
    "Proxy": ProxySettings,
    "Trainer": TrainerSettings,
    "Controller": ControllerSettings,
    "Adapters": AdaptersSettings,
    "Console": ConsoleSettings,
    "Local stack": StackSettings,
    "Clients": ClientSettings,
}
METRICS: Final[dict[str, ModuleType]] = {
    "Every process": store.metrics,
    "Proxy": proxy.metrics,
    "Trainer": trainer.metrics,
    "Controller": controller.metrics,
}
ABOUT_SETTINGS: Final = """
Pawl is configured by environment variables and by a file `.env` in the working directory; the
environment wins. What neither has may be a file of the variable's name in `PAWL_SECRETS_DIR`. Each
process reads its variables once, when it starts. An empty value counts as unset. An unknown
`PAWL_*` variable, or a value that cannot be used, is a startup error that names the variable. Names
that end in `_S` are seconds, in `_MB` MiB, in `_KB` KiB. Relative paths start at the working
directory. An address is `HOST:PORT`, with an IPv6 host in brackets. A variable that several
processes read is listed once. `pawl up`, `pawl demo` and `pawl example` pass their environment on
to the processes that they start; the last two replace database, upstream, folders, recipe,
policies, model and seed by their own.
"""
ABOUT_RECIPES: Final = """
A recipe says how a policy learns: a TOML file with the keys below. `PAWL_RECIPE` names a file or a
packaged recipe. An unknown key, a value outside its limits, or keys that contradict each other are
an error at the trainer's start that names the key. `pawl credit --recipe` takes the same names.
"""
ABOUT_METRICS: Final = """
Each process serves its metrics at `/metrics`: the proxy on `PAWL_ADMIN_LISTEN` (summed over its
processes), the trainer on `PAWL_TRAINER_LISTEN`, the controller on `PAWL_CONTROLLER_LISTEN`. A
histogram `NAME` has the series `NAME_bucket`, `NAME_sum` and `NAME_count`.

Each record ends in exactly one place: `pawl_records_total` = `pawl_records_stored_total` +
`pawl_records_spooled` + `pawl_records_dead_lettered_total` + `pawl_records_dropped_total` +
`pawl_records_deleted_total`.
"""


class Schema(GenerateJsonSchema):
    """Generates JSON schemas; a value that a validator parses from text has the type string."""

    def handle_invalid_for_json_schema(self, schema: Any, error_info: str) -> dict[str, Any]:
        """Return the schema of a string, instead of raising an error."""
        return {"type": "string"}


def main() -> None:
    """Write each file whose text has changed, and print its name."""
    written = {FOLDER / name: text for name, text in pages().items()}
    for path, text in {**written, CHART_SETTINGS: chart_settings()}.items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(f"written: {path.relative_to(ROOT)}")


def pages() -> dict[str, str]:
    """Return the text of each page by its file name in `docs/reference/`."""
    return {
        "cli.md": _page("Command line", _commands()),
        "metrics.md": _page("Metrics", ABOUT_METRICS, *_metrics()),
        "recipe.md": _page("Recipe", ABOUT_RECIPES, *_recipe()),
        "settings.md": _page("Settings", ABOUT_SETTINGS, *_settings()),
    }


def chart_settings() -> str:
    """Return JSON with the variables that each role of the Helm chart reads."""
    roles = ("Proxy", "Trainer", "Controller", "Adapters", "Console")
    # The database's URL comes from a Secret.
    read = {
        role.lower(): sorted(map(variable, SETTINGS[role].model_fields.keys() - {"database_url"}))
        for role in roles
    }
    return json.dumps(read, indent=2) + "\n"


def _page(title: str, *blocks: str) -> str:
    return "\n\n".join([f"# {title}", GENERATED, *(block.strip() for block in blocks)]) + "\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    cells = ([" ".join(cell.split()).replace("|", "\\|") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def _commands() -> str:
    command = typer.main.get_command(app)
    context = typer.Context(command)
    text = typer.cli.get_docs_for_click(obj=command, ctx=context, name="pawl")
    return text.partition("\n")[2]


def _settings() -> Iterator[str]:
    seen: set[str] = set()
    for title, kind in SETTINGS.items():
        properties = _schema(kind)["properties"]
        new = {name: schema for name, schema in properties.items() if name not in seen}
        seen |= new.keys()
        rows = [(f"`{variable(name)}`", *_describe_field(schema)) for name, schema in new.items()]
        if not rows:
            continue
        yield f"## {title}\n\n{_docstring(kind)}"
        yield _table(("variable", "type, limits", "default", "meaning"), rows)


def variable(name: str) -> str:
    """Return the environment variable of a settings field."""
    return name if name == "DATABASE_URL" else f"PAWL_{name.upper()}"


def _recipe() -> Iterator[str]:
    schema = _schema(Recipe)
    tables = {}
    for name, part in schema["properties"].items():
        # An optional table has the type "table or null".
        table = part["anyOf"][0] if "anyOf" in part else part
        each = table.get("additionalProperties", table)
        if isinstance(each, dict) and "$ref" in each:
            title = f"{name}.METRIC" if each is not table else name
            tables[title] = schema["$defs"][each["$ref"].rpartition("/")[2]]
    top = {k: v for k, v in schema["properties"].items() if k not in tables and "$ref" not in v}
    top = {name: part for name, part in top.items() if f"{name}.METRIC" not in tables}
    yield "## Packaged recipes\n\n" + "\n".join(
        f"- [`{name}`](../../trainer/recipes/{name}.toml): {text}"
        for name, text in _packaged_recipes()
    )
    yield "## Top level\n\n" + _keys(top)
    for title, part in tables.items():
        yield f"## `[{title}]`\n\n{part['description']}\n\n{_keys(part['properties'])}"


def _keys(properties: dict[str, Any]) -> str:
    rows = [(f"`{name}`", *_describe_field(schema)) for name, schema in properties.items()]
    return _table(("key", "type, limits", "default", "meaning"), rows)


def _packaged_recipes() -> Iterator[tuple[str, str]]:
    """Yield name and first sentence of each packaged recipe."""
    recipes = [one for one in files("trainer.recipes").iterdir() if one.name.endswith(".toml")]
    for recipe in sorted(recipes, key=lambda one: one.name):
        comment = recipe.read_text().partition("\n\n")[0].replace("\n# ", " ").removeprefix("# ")
        yield recipe.name.removesuffix(".toml"), comment.partition("\n")[0].partition(". ")[0]


def _schema(model: type[BaseModel]) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PydanticJsonSchemaWarning)
        return model.model_json_schema(schema_generator=Schema)


def _describe_field(schema: dict[str, Any]) -> tuple[str, str, str]:
    """Return type, default and meaning of a field.

    Raises:
        KeyError: the field has no description.
    """
    default = schema.get("default")
    if "default" not in schema:
        shown = ""
    elif default in (None, {}, [], ""):
        shown = "unset"
    else:
        shown = f"`{_toml(default)}`"
    meaning = schema["description"]
    first_word = meaning.partition(" ")[0]
    if first_word.isalpha():
        meaning = meaning[0].upper() + meaning[1:]
    return _type(schema), shown, meaning


def _type(schema: dict[str, Any]) -> str:
    if "enum" in schema:
        return ", ".join(f"`{one}`" for one in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if "anyOf" in schema:
        types = [_type(one) for one in schema["anyOf"] if one.get("type") != "null"]
        return " or ".join(dict.fromkeys(types))
    if schema["type"] == "array":
        items = schema.get("items") or schema["prefixItems"][0]
        return f"list of {_type(items)}"
    if schema["type"] == "object":
        return f"table of {_type(schema['additionalProperties'])}"
    names = {"uri": "URL", "path": "path", "password": "secret"}
    name = names.get(schema.get("format", ""), schema["type"])
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    limits = [f"{sign} {schema[key]}" for key, sign in signs.items() if key in schema]
    return ", ".join([name, *limits])


def _toml(value: object) -> str:
    match value:
        case bool():
            return str(value).lower()
        case float() if 0 < abs(value) < 1e-3:
            return f"{value:g}"
        case dict():
            return "{ " + ", ".join(f"{key} = {_toml(one)}" for key, one in value.items()) + " }"
        case list():
            return f"[{', '.join(map(_toml, value))}]"
    return str(value)


def _docstring(kind: type) -> str:
    return " ".join((kind.__doc__ or "").split())


def _metrics() -> Iterator[str]:
    for title, module in METRICS.items():
        rows = []
        for metric in metrics_of(module):
            family = next(iter(metric.describe()))
            labels = ", ".join(f"`{label}`" for label in metric._labelnames)
            rows.append((f"`{name_of(metric)}`", family.type, labels, family.documentation))
        yield f"## {title}\n\n" + _table(("metric", "type", "labels", "meaning"), rows)


def metrics_of(module: ModuleType) -> Iterator[MetricWrapperBase]:
    """Yield a module's metrics in the order of their definition, also those in dicts."""
    for value in vars(module).values():
        for metric in value.values() if isinstance(value, dict) else [value]:
            if isinstance(metric, MetricWrapperBase):
                yield metric


def name_of(metric: MetricWrapperBase) -> str:
    """Return a metric's name as queries write it: a counter's ends in `_total`."""
    family = next(iter(metric.describe()))
    return f"{family.name}_total" if family.type == "counter" else family.name


if __name__ == "__main__":
    main()
