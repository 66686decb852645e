"""Settings and files: each value is used, or refused by an error that names its key.

The keys are those of the files' own definitions, so a new key is tried, too.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin

import pytest
from pydantic import BaseModel, ValidationError

from pawl.scenarios.scenario import ScenarioFailed, ScenarioKeys, parse_scenario
from pawl.settings import (
    ClientSettings,
    ControllerSettings,
    StackSettings,
    UnreadSettings,
    read_settings,
    refuse_unknown_settings,
)
from proxy.errors import BadRedaction, BadUpstreams
from proxy.redaction import RuleSpec, parse_rules
from proxy.settings import ProxySettings
from proxy.upstreams.file import UpstreamSpec, parse_upstreams
from store.errors import BadPolicies
from store.policy_table import PolicySpec, parse_policies
from store.settings import StoreSettings, parse_address
from trainer.errors import RecipeError
from trainer.recipes.recipe import Recipe, load_recipe, parse_recipe
from trainer.settings import TrainerSettings

LONGEST_MESSAGE = 2000
# What stands for a key's value, as TOML.
WRONG = {
    "types": [
        *("true", "7", "1.5", '"word"', "[]", "[[1]]", '["x"]', "[1, 2]", "{}", "{x = 1}"),
        *(
            "{x = {y = [1]}}",
            "[{x = 1}]",
            "[true]",
            "1979-05-27",
            "07:32:00",
            "1979-05-27T07:32:00Z",
        ),
    ],
    "not numbers": ["nan", "inf", "-inf", "[nan, nan]", "[-inf, inf]", "{ok = nan}", '"nan"'],
    "negative": ["-1", "-1.5", "-1e300", f"-{'9' * 400}", "[-1e308, 1e308]", "[1e308, -1e308]"],
    "empty": ['""', '" "', '[""]', '{"" = ""}', '{"" = 1.0}', '"\\u0000"', '["\\u0000"]'],
    "huge": [
        *("1e300", "1_000_000_000_000", "0x7fff_ffff_ffff_ffff_ffff", "9" * 5000),
        *(f'"{"x" * 5000}"', f'"{"x" * 100_000}"', f'["{"x" * 100_000}"]'),
        *(f"{{{'x' * 1000} = 1.0}}", f"{'[' * 5000}{']' * 5000}", '"😀"'),
    ],
}


class File(NamedTuple):
    """A kind of file: how it is read, its definition, and keys that make a table whole."""

    parse: Callable[[str], object]
    error: type[Exception]
    model: type[BaseModel]
    table: str
    needed: dict[str, str]


FILES = {
    "recipe": File(lambda text: parse_recipe(text, "F.toml"), RecipeError, Recipe, "", {}),
    "policies": File(
        lambda text: parse_policies(text, "F.toml"),
        BadPolicies,
        PolicySpec,
        "policy",
        {"name": '"a"', "base": '"m"', "explore.share": "0.1", "explore.temperature": "0.7"},
    ),
    "upstreams": File(
        lambda text: parse_upstreams(text, "F.toml"),
        BadUpstreams,
        UpstreamSpec,
        "upstream",
        {"name": '"a"', "urls": '["http://x/v1"]', "models": '["m"]'},
    ),
    "upstreams of litellm": File(
        lambda text: parse_upstreams(text, "F.toml"),
        BadUpstreams,
        UpstreamSpec,
        "upstream",
        {"name": '"a"', "kind": '"litellm"', "models": '["m"]'},
    ),
    "redaction": File(
        lambda text: parse_rules(text, "F.toml"),
        BadRedaction,
        RuleSpec,
        "rule",
        {"name": '"a"', "pattern": '"x"'},
    ),
    "scenario": File(
        lambda text: parse_scenario(text, Path("F.toml")),
        ScenarioFailed,
        ScenarioKeys,
        "",
        {"title": '"t"', "about": '"a"', "model": '"m"'},
    ),
}


# What a recipe needs beside a key of its evaluation, and what each key stands in place of.
EVALUATED = {
    "publish.mode": '"evaluated"',
    "evaluation.tasks": '"t"',
    "evaluation.command": '"a"',
    "evaluation.answer": '"f"',
}
# The same beside a key of its teacher.
TAUGHT = {
    "learner": '"distill"',
    "claim.group_size": "1",
    "credit.baseline": '"none"',
    "credit.normalisation": '"none"',
    "teacher.url": '"http://h/v1"',
    "teacher.model": '"big"',
}
INSTEAD = {"evaluation.python": "evaluation.command", "evaluation.judge": "evaluation.answer"}


def keys_of(model: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the paths of all keys of a model, and of the tables within it."""
    for name, field in model.model_fields.items():
        yield (*path, name)
        annotation = field.annotation
        within = (*path, name, "a_metric") if get_origin(annotation) is dict else (*path, name)
        for kind in (annotation, *get_args(annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from keys_of(kind, within)


def text_of(file: File, key: str, value: str) -> str:
    """Return a file in which the key has this value, and what is needed beside it."""
    values = {name: given for name, given in file.needed.items() if not name.startswith(f"{key}.")}
    if "." not in key:
        values = {name: given for name, given in values.items() if "." not in name}
    if key.startswith("reward.a_metric."):
        values["reward.a_metric.range"] = "[0.0, 1.0]"
    if key.startswith("evaluation."):
        values |= EVALUATED
        values.pop(INSTEAD.get(key, ""), None)
    if key.startswith("teacher."):
        values |= TAUGHT
    if key == "field":
        del values["pattern"]
    values[key] = value
    lines = [f"{name} = {given}" for name, given in values.items()]
    return "\n".join([f"[[{file.table}]]", *lines] if file.table else lines)


CASES = [(kind, ".".join(path)) for kind, file in FILES.items() for path in keys_of(file.model)]


def message_of(file: File, text: str) -> str:
    """Return why a text is refused; empty if it is not. Any other error fails the test."""
    try:
        content = file.parse(text)
    except file.error as error:
        return str(error)
    if isinstance(content, Recipe):
        # It is recorded with each update, and PostgreSQL's JSON has no such numbers and texts.
        assert "\\u0000" not in json.dumps(content.model_dump(mode="json"), allow_nan=False)
    return ""


@pytest.mark.parametrize(("kind", "key"), CASES)
def test_wrong_value_in_a_config_file_is_used_or_refused_by_its_keys_name(
    kind: str, key: str
) -> None:
    file, refused = FILES[kind], 0
    for values in WRONG.values():
        for value in values:
            message = message_of(file, text_of(file, key, value))
            if message:
                refused += 1
                assert "F.toml" in message
                assert key.rpartition(".")[2] in message or "cannot be read" in message
                assert len(message) < LONGEST_MESSAGE
    assert refused > len(WRONG["types"]) / 2


@pytest.mark.parametrize(("kind", "key"), CASES)
def test_unknown_key_in_a_config_file_is_refused_with_the_file_named(kind: str, key: str) -> None:
    file, (holder, _, name) = FILES[kind], key.rpartition(".")
    for wrong in (f"{name}_", name.upper(), "x" * 5000, '""', '"\\u0000"'):
        path = f"{holder}.{wrong}" if holder else wrong
        message = message_of(file, text_of(file, path, "1"))
        assert "F.toml" in message
        assert len(message) < LONGEST_MESSAGE
        if wrong == f"{name}_" and "there is no table" not in message and "a_metric" not in wrong:
            assert "unknown key" in message


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"\xff\xfe", "cannot be read"),
        (b"= 1", "is not TOML"),
        (b"a = " + b"[" * 5000, "cannot be read: it nests too deep"),
        (b"a = " + b"9" * 5000, "cannot be read: a number has too many digits"),
        (
            b"learner = true",
            "learner: Input should be 'grpo', 'ppo', 'sft' or 'distill'; or leave it out for",
        ),
    ],
)
def test_file_that_is_no_toml_is_refused(tmp_path: Path, text: bytes, says: str) -> None:
    path = tmp_path / "r.toml"
    path.write_bytes(text)
    with pytest.raises(RecipeError, match=r"recipe .*r\.toml") as refused:
        load_recipe(str(path))
    assert says in str(refused.value)


@pytest.mark.parametrize("name", ["", "\0", "x" * 100_000, "nobody", "\0.toml", "/", "a/b.toml"])
def test_unknown_recipe_name_is_refused(name: str) -> None:
    with pytest.raises(RecipeError, match="recipe"):
        load_recipe(name)


SETTINGS = (ProxySettings, TrainerSettings, StackSettings, ControllerSettings, ClientSettings)


def declaring(kind: type[Any], name: str) -> type[Any]:
    """Return the class that declares a setting; those that inherit it read it in the same way."""
    return next(one for one in kind.__mro__ if name in vars(one).get("__annotations__", ()))


VARIABLES = {
    (name, declaring(kind, name)): (
        "DATABASE_URL" if name == "database_url" else f"PAWL_{name.upper()}",
        kind,
    )
    for kind in SETTINGS
    for name in kind.model_fields
}
GIVEN = [
    *("", " ", "x", "true", "[]", "[1", "{", "{}", "'", '"', "~", "/", "/dev/null", "1 2", "1_000"),
    *("nan", "inf", "-inf", "-1", "-1.5", "0", "1e5", "1e300", "9" * 400, "9" * 5000, "0x10", "²"),
    *("=", ",", ",,=", "a=b,c", "search=", "=json_error", "search=nothing", "90,acme=", "90,=7"),
    *("top_p=nan", "top_p=inf,top_k=1e300", "temperature=nan", "x" * 100_000, "１", "😀"),
    *("1:2:3", ":8100", "x:", "x:²", "x:99999", "127.0.0.1:000000099999", "[::1]:8100"),
    *("http://", "http://[", "http://[::1", "http://x:99999999/v1", "postgresql://["),
    *("postgresql://x:y@z:²/db", "http://a..b/v1"),
]


def refusal_of(kind: type[Any]) -> str:
    """Return why the environment is refused; empty if it is not."""
    try:
        read_settings(kind)
    except UnreadSettings as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("variable", "kind"), VARIABLES.values())
def test_wrong_value_of_a_setting_is_used_or_refused_by_the_settings_name(
    variable: str, kind: type[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for value in GIVEN:
        monkeypatch.setenv(variable, value)
        message = refusal_of(kind)
        assert not message or message.startswith(variable)
        assert len(message) < LONGEST_MESSAGE
    monkeypatch.setenv(f"{variable}_", "1")
    if variable != "DATABASE_URL":
        with pytest.raises(UnreadSettings, match=f"did you mean {variable}"):
            read_settings(kind)


@pytest.fixture
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("_elsewhere")
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PAWL_LISTEN=\xff\n", r"\.env cannot be read"),
        (b"PAWL_COLOUR=red\n", "PAWL_COLOUR"),
        (b"# mine\nPAWL_SEED=1\nPAWL_POLICY m\n", r"\.env: line 3 is not NAME=VALUE"),
        (b"PAWL_SEED\n", r"\.env: line 1 is not NAME=VALUE"),
    ],
)
def test_env_file_that_cannot_be_used_is_refused(content: bytes, message: str) -> None:
    Path(".env").write_bytes(content)
    with pytest.raises(UnreadSettings, match=message):
        refuse_unknown_settings({})


@pytest.mark.usefixtures("_elsewhere")
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "PAWL_WORKERS",
            "many",
            r"PAWL_WORKERS is 'many': .* valid integer.*; it sets: processes that take calls",
        ),
        ("PAWL_LISTEN", "8100", "PAWL_LISTEN: '8100' is not an address: write HOST:PORT"),
        ("PAWL_LISTEN", "host:99999", "PAWL_LISTEN"),
        ("DATABASE_URL", "mysql://x/y", "^DATABASE_URL must be a postgresql:// URL"),
        ("PAWL_UPSTREAM_URL", "not a url", "PAWL_UPSTREAM_URL"),
        ("PAWL_UPSTREAM_URL", "ftp://me:secret@x", "^PAWL_UPSTREAM_URL: (?!.*secret).*; it sets:"),
        ("PAWL_DEFAULT_TEMPERATURE", "-1", "PAWL_DEFAULT_TEMPERATURE"),
        *(
            ("PAWL_DEFAULT_SAMPLING", value, "PAWL_DEFAULT_SAMPLING")
            for value in ("top_p=2", "top_p", "temperature=0.5", "mirostat=2")
        ),
        ("PAWL_REPLICA_URLS", "http://b:8000/v1, c:8000", "PAWL_REPLICA_URLS"),
    ],
)
def test_unusable_value_of_a_setting_is_refused_with_an_explanation(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(UnreadSettings, match=message):
        read_settings(TrainerSettings if name == "PAWL_REPLICA_URLS" else ProxySettings)


@pytest.mark.usefixtures("_elsewhere")
def test_sampling_defaults_are_read_as_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_settings(ProxySettings).sampling_defaults == {"temperature": 1.0}
    monkeypatch.setenv("PAWL_DEFAULT_TEMPERATURE", "0.6")
    monkeypatch.setenv("PAWL_DEFAULT_SAMPLING", "top_p=0.95, top_k=20")
    found = read_settings(ProxySettings).sampling_defaults
    assert found == {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    # vLLM takes no 20.0 for it.
    assert isinstance(found["top_k"], int)


@pytest.mark.usefixtures("_elsewhere")
def test_settings_are_frozen_and_secrets_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql://u:hunter2@h/d")
    settings = StoreSettings()
    assert "hunter2" not in repr(settings)
    with pytest.raises(ValidationError):
        settings.data_dir = Path("x")


@pytest.fixture
def secrets(_elsewhere: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of secrets, laid out as Kubernetes does."""
    folder = tmp_path / "secrets"
    (folder / "..data").mkdir(parents=True)
    for name, text in (("DATABASE_URL", "postgresql://u:p@h/d"), ("pawl_api_key", "k")):
        (folder / "..data" / name).write_text(f"{text}\n")
        (folder / name).symlink_to(f"..data/{name}")
    monkeypatch.setenv("PAWL_SECRETS_DIR", str(folder))
    return folder


@pytest.mark.usefixtures("secrets")
def test_secrets_are_read_from_files_where_no_variable_is_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("DATABASE_URL", raising=False)
    url = read_settings(ProxySettings).database_url
    assert url is not None
    assert url.get_secret_value() == "postgresql://u:p@h/d"
    assert read_settings(ClientSettings).key == "k"
    monkeypatch.setenv("PAWL_API_KEY", "of the environment")
    assert read_settings(ClientSettings).key == "of the environment"


def test_folder_of_secrets_may_be_named_in_the_env_file(
    secrets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PAWL_SECRETS_DIR")
    Path(".env").write_text(f"PAWL_SECRETS_DIR={secrets}\n")
    assert read_settings(ClientSettings).key == "k"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("PAWL_API_KEYS", b"k", "PAWL_API_KEYS is set, .*did you mean PAWL_API_KEY"),
        ("PAWL_POLL_S", b"\xff", "PAWL_SECRETS_DIR: a secret cannot be read: .*make it a text"),
        ("PAWL_POLL_S", b"often", "PAWL_POLL_S is 'often'"),
    ],
)
def test_secret_that_cannot_be_used_is_refused_by_name(
    secrets: Path, name: str, content: bytes, message: str
) -> None:
    (secrets / name).write_bytes(content)
    with pytest.raises(UnreadSettings, match=message):
        read_settings(TrainerSettings)


@pytest.mark.parametrize(
    ("text", "read"), [("127.0.0.1:80", ("127.0.0.1", 80)), ("[::1]:80", ("::1", 80))]
)
def test_listen_address_is_read_as_host_and_port(text: str, read: tuple[str, int]) -> None:
    assert parse_address(text) == read


@pytest.mark.usefixtures("_elsewhere")
def test_replica_urls_are_separated_by_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAWL_REPLICA_URLS", "http://b:8000/v1, http://c:8000/v1")
    urls = read_settings(TrainerSettings).replica_urls
    assert [str(url) for url in urls] == ["http://b:8000/v1", "http://c:8000/v1"]
