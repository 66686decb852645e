"""docker-compose.yml and the images: valid by the Compose schema, pinned, and what Pawl reads.

The schema is the specification's own, as `check-jsonschema` carries it.
"""

import json
import re
import shlex
from collections.abc import Mapping
from importlib.metadata import distribution
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import unquote, urlsplit

import jsonschema
import pytest

from pawl.settings import (
    ConsoleSettings,
    ControllerSettings,
    known_variables,
    refuse_unknown_settings,
)
from pawl.stack import vllm
from pawl.stack.compose import GRAFANA, write_secrets, write_vllm_config
from pawl.stack.compose import main as setup
from pawl.stack.vllm import VllmOptions, vllm_command, vllm_environment
from proxy.settings import ProxySettings
from store import __version__
from store.settings import SECRETS, Settings, parse_address
from tests.support.yaml_text import parse_yaml
from trainer.recipes.recipe import load_recipe
from trainer.settings import TrainerSettings

ROOT: Final = Path(__file__).parents[3]
COMPOSE: Final = ROOT / "docker-compose.yml"
ENV_EXAMPLE: Final = ROOT / ".env.example"
DOCKERFILES: Final = ("Dockerfile.proxy", "Dockerfile.trainer")
PUBLISHED: Final = {"proxy", "console", "grafana"}
# What setup gives to those that need it, and what they must not see of it.
PASSWORDS: Final = ("POSTGRES_PASSWORD", "GRAFANA_ADMIN_PASSWORD")
# Each profile, with the services that it adds to those that are always there.
PROFILES: Final = {
    "gpu": {"vllm", "trainer"},
    "cpu": {"vllm-cpu", "trainer-cpu"},
    "watch": {"prometheus", "alertmanager", "grafana"},
}
# What ports, volumes and grace periods of the file rest on.
FIXED: Final = {
    *("PAWL_LISTEN", "PAWL_ADMIN_LISTEN", "PAWL_TRAINER_LISTEN", "PAWL_CONTROLLER_LISTEN"),
    *("PAWL_SPOOL_DIR", "PAWL_ADAPTER_DIR", "PAWL_STOP_GRACE_S", "PAWL_SECRETS_DIR"),
}
Kind = TypeVar("Kind", bound=Settings)
# As Triton's own for a GPU's driver, it needs the headers of Python and of libc.
C_MODULE: Final = """
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlfcn.h>
static PyObject *six(PyObject *self, PyObject *none) { return PyLong_FromLong(6); }
static PyMethodDef methods[] = {{"six", six, METH_NOARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "sixes", NULL, -1, methods};
PyMODINIT_FUNC PyInit_sixes(void) { return PyModule_Create(&definition); }
"""
VARIABLE: Final = re.compile(r"\$\{(?P<name>\w+)(?P<kind>:[-?+])?(?P<rest>[^}]*)\}")


def interpolated(text: str, given: Mapping[str, str]) -> str:
    """The text with `${NAME:-default}`, `:?message` and `:+other` filled in as Compose does."""

    def fill(match: re.Match[str]) -> str:
        name, kind = match["name"], match["kind"]
        if kind == ":+":
            return match["rest"] if given.get(name) else ""
        if given.get(name):
            return given[name]
        assert kind == ":-", f"{name}: {match['rest'] or 'it has neither a default nor a message'}"
        return match["rest"]

    return VARIABLE.sub(fill, text)


def compose(**given: str) -> dict[str, Any]:
    """The file as Compose would read it."""
    text = interpolated(COMPOSE.read_text(), given)
    loaded: dict[str, Any] = parse_yaml(text)
    return loaded


def schema() -> dict[str, Any]:
    """The Compose specification's schema."""
    path = "check_jsonschema/builtin_schemas/vendor/compose-spec.json"
    text = Path(str(distribution("check-jsonschema").locate_file(path))).read_text()
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def service(name: str) -> dict[str, Any]:
    """One service."""
    found: dict[str, Any] = compose()["services"][name]
    if isinstance(found.get("command"), str):
        found["command"] = shlex.split(found["command"])
    return found


SERVICES: Final = sorted(compose()["services"])


def instructions(dockerfile: str) -> list[tuple[str, str]]:
    """A Dockerfile as (instruction, rest), lines joined, comments left out."""
    lines = [x for x in (ROOT / dockerfile).read_text().splitlines() if not x.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    pairs = [line.partition(" ") for line in joined.splitlines() if line]
    return [(name, rest.strip()) for name, _, rest in pairs]


def last_stage(dockerfile: str) -> list[tuple[str, str]]:
    """The instructions of the stage that becomes the image."""
    found = instructions(dockerfile)
    start = max(index for index, (name, _) in enumerate(found) if name == "FROM")
    return found[start:]


def image_environment(dockerfile: str) -> dict[str, str]:
    """What ENV of the image sets."""
    words = [
        word for name, rest in last_stage(dockerfile) if name == "ENV" for word in shlex.split(rest)
    ]
    return dict(word.split("=", 1) for word in words)


def environment(name: str) -> dict[str, str]:
    """A service's variables: the image's own where it is built here, and the file's."""
    found = service(name)
    built = image_environment(found["build"]["dockerfile"]) if "build" in found else {}
    return built | {key: value or "" for key, value in found.get("environment", {}).items()}


def options(command: list[str]) -> dict[str, str | None]:
    """A command's options, written as `--name value` or `--name=value`."""
    words = [part for word in command for part in word.split("=", 1)]
    found: dict[str, str | None] = {}
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            found[word] = None if following.startswith("--") else following
    return found


def mounts(name: str) -> dict[str, tuple[str, str]]:
    """A service's mounts: source → target, mode."""
    parts = [(*volume.split(":"), "rw")[:3] for volume in service(name).get("volumes", [])]
    return {source: (target, mode) for source, target, mode in parts}


def settings_in(
    monkeypatch: pytest.MonkeyPatch, kind: type[Kind], variables: Mapping[str, str]
) -> Kind:
    """A process's settings in this environment."""
    with monkeypatch.context() as inside:
        for key, value in variables.items():
            inside.setenv(key, value)
        return kind()


def test_the_file_is_valid_by_the_compose_schema() -> None:
    validator = jsonschema.Draft202012Validator(schema())
    errors = [f"{list(e.absolute_path)}: {e.message}" for e in validator.iter_errors(compose())]
    assert errors == []


@pytest.mark.parametrize("profile", PROFILES)
def test_each_compose_profile_has_a_model_server_and_a_trainer_or_the_monitoring(
    profile: str,
) -> None:
    found = {name for name in SERVICES if service(name).get("profiles") == [profile]}
    assert found == PROFILES[profile]
    # Compose starts no service that needs another profile's, unless it is said to do without.
    for name in set(SERVICES) - found:
        for needed, how in service(name).get("depends_on", {}).items():
            assert needed not in found or how.get("required") is False or profile == "watch"


def test_compose_without_a_profile_has_no_model_server_trainer_or_monitoring() -> None:
    found = {name for name in SERVICES if "profiles" not in service(name)}
    assert found == {"setup", "postgres", "proxy", "controller", "console"}
    assert ENV_EXAMPLE.read_text().count("\nCOMPOSE_PROFILES=gpu,watch\n") == 1


def test_passwords_are_in_files_mounted_only_into_services_that_need_them() -> None:
    for name in SERVICES:
        shown = {
            found
            for one, found in service(name).get("environment", {}).items()
            if found and one in PASSWORDS
        }
        assert shown == set()
    readers = {name for name in SERVICES if "secrets" in mounts(name)}
    assert readers == {
        *("setup", "postgres", "proxy", "controller", "console", "trainer", "trainer-cpu")
    }
    assert {mounts(name)["secrets"] for name in readers - {"setup"}} == {(str(SECRETS), "ro")}
    for name in readers - {"setup"}:
        assert {one["condition"] for one in awaited(name)["setup"]} == {
            "service_completed_successfully"
        }
    assert environment("postgres")["POSTGRES_PASSWORD_FILE"] == f"{SECRETS}/POSTGRES_PASSWORD"
    # Grafana sees nothing of the database; its volume begins with a folder of the image.
    assert mounts("setup")["grafana-password"] == (str(GRAFANA), "rw")
    assert mounts("grafana")["grafana-password"] == (str(SECRETS), "ro")
    assert f" {GRAFANA} " in (ROOT / "Dockerfile.proxy").read_text()
    grafana = environment("grafana")["GF_SECURITY_ADMIN_PASSWORD__FILE"]
    assert grafana == f"{SECRETS}/GRAFANA_ADMIN_PASSWORD"


@pytest.mark.parametrize("name", SERVICES)
def test_images_are_pinned_to_a_version(name: str) -> None:
    _, _, tag = service(name)["image"].partition(":")
    assert re.search(r"\d+\.\d+", tag), f"{name}: {tag!r}"


def test_image_tag_variable_sets_the_tag_of_all_pawl_images() -> None:
    services = compose(IMAGE_TAG="next")["services"].values()
    ours = {found["image"] for found in services if "build" in found}
    assert ours == {"pawl-proxy:next", "pawl-trainer:next", "pawl-cpu:next"}
    assert f"\n#IMAGE_TAG={__version__}\n" in ENV_EXAMPLE.read_text()


def test_postgres_is_not_started_if_the_user_sets_a_database_url() -> None:
    def scale(**given: str) -> int:
        extended = compose(**given)["services"]["postgres"]["extends"]
        others = parse_yaml((ROOT / extended["file"]).read_text())["services"]
        found: int = others[extended["service"]]["scale"]
        return found

    assert scale() == scale(DATABASE_URL="") == 1
    assert scale(DATABASE_URL="postgresql://elsewhere/pawl") == 0


def test_memory_of_all_that_a_profile_starts_fits_24_gib() -> None:
    units = {"m": 2**20, "g": 2**30}
    limits = {name: service(name)["mem_limit"] for name in SERVICES}
    sizes = {name: int(limit[:-1]) * units[limit[-1]] for name, limit in limits.items()}
    # It has ended before the others start.
    del sizes["setup"]
    always = sizes.keys() - {name for names in PROFILES.values() for name in names}
    for profile in ("gpu", "cpu"):
        started = {*always, *PROFILES[profile], *PROFILES["watch"]}
        assert sum(sizes[name] for name in started) <= 24 * 2**30
    for match in VARIABLE.finditer(COMPOSE.read_text()):
        if match["name"].endswith("_MEMORY"):
            assert f"\n#{match['name']}={match['rest']}\n" in ENV_EXAMPLE.read_text()


@pytest.mark.parametrize("name", SERVICES)
def test_no_compose_service_runs_as_root_or_can_become_root(name: str) -> None:
    user = service(name)["user"].partition(":")[0]
    assert user not in ("", "0", "root")
    assert "no-new-privileges:true" in service(name)["security_opt"]
    assert not service(name).get("privileged")


@pytest.mark.parametrize("name", ["proxy", "trainer"])
def test_our_images_and_services_have_the_same_user(name: str) -> None:
    users = [rest for word, rest in last_stage(f"Dockerfile.{name}") if word == "USER"]
    assert users == [service(name)["user"]]


@pytest.mark.parametrize("name", SERVICES)
def test_each_service_has_a_health_check(name: str) -> None:
    found = service(name)
    if "build" in found:
        checks = [x for x in last_stage(found["build"]["dockerfile"]) if x[0] == "HEALTHCHECK"]
        assert len(checks) == 1
    else:
        assert found["healthcheck"]["test"][0] == "CMD"


def awaited(name: str) -> dict[str, list[dict[str, Any]]]:
    """What a service waits for before it starts, by itself or because what it waits for does."""
    found: dict[str, list[dict[str, Any]]] = {}
    for needed, how in service(name).get("depends_on", {}).items():
        found.setdefault(needed, []).append(how)
        for other, conditions in awaited(needed).items():
            found.setdefault(other, []).extend(conditions)
    return found


def test_proxy_does_not_wait_for_a_healthy_postgres_and_no_service_for_the_trainer() -> None:
    # Serving never waits for the database, and nothing at all waits for the trainer.
    assert service("proxy")["depends_on"]["postgres"] == {"condition": "service_started"}
    assert service("trainer")["depends_on"]["postgres"] == {"condition": "service_healthy"}
    for name in SERVICES:
        assert not {"trainer", "trainer-cpu"} & set(service(name).get("depends_on", {}))


def test_the_controller_is_the_proxys_image_with_another_command() -> None:
    # Nothing of torch is in it, and it needs no spool. It checks adapters that the server reads.
    assert service("controller")["image"] == service("proxy")["image"]
    assert service("controller")["build"] == service("proxy")["build"]
    assert service("controller")["command"] == ["controller"]
    assert mounts("controller")["adapters"] == ("/var/lib/pawl/adapters", "ro")
    assert "spool" not in mounts("controller")
    [line] = service("controller")["healthcheck"]["test"][3:]
    assert "8103" in line


def test_only_services_for_people_and_agents_publish_ports_by_default_on_loopback() -> None:
    published = {name: service(name)["ports"] for name in SERVICES if service(name).get("ports")}
    assert set(published) == PUBLISHED
    assert all(port.startswith("127.0.0.1:") for ports in published.values() for port in ports)
    assert published["proxy"] == ["127.0.0.1:8100:8100"]
    reached = compose(BIND="0.0.0.0", PROXY_PORT="80", CONSOLE_PORT="81")["services"]
    assert reached["proxy"]["ports"] == ["0.0.0.0:80:8100"]
    # Without a key it shows everybody everything.
    assert reached["console"]["ports"] == ["127.0.0.1:81:8105"]


def test_all_named_volumes_and_networks_are_declared_and_used() -> None:
    used = {x for name in SERVICES for x in mounts(name) if not x.startswith(".")}
    assert used == set(compose()["volumes"])
    networks = {x for name in SERVICES for x in service(name).get("networks", ())}
    assert networks == set(compose()["networks"])


def test_files_mounted_from_the_repository_are_read_only() -> None:
    here = [(x, m) for name in SERVICES for x, m in mounts(name).items() if x.startswith(".")]
    assert here
    for source, (_, mode) in here:
        assert (ROOT / source).exists(), source
        assert mode == "ro", source


@pytest.mark.parametrize("kind", ["", "-cpu"])
def test_vllm_reads_adapters_where_the_trainer_writes_them(kind: str) -> None:
    vllm, trainer = f"vllm{kind}", f"trainer{kind}"
    written, _ = mounts(trainer)["adapters"]
    assert mounts(vllm)["adapters"] == (written, "ro")
    assert environment(trainer)["PAWL_ADAPTER_DIR"] == written
    assert service(vllm)["user"].split(":")[0] == service(trainer)["user"].split(":")[0]


@pytest.mark.parametrize("name", ["vllm-cpu", "trainer-cpu"])
def test_cpu_services_have_the_network_aliases_of_the_gpu_services(name: str) -> None:
    """Others reach them by the GPU services' names."""
    plain = name.removesuffix("-cpu")
    assert all(one["aliases"] == [plain] for one in service(name)["networks"].values())
    assert set(service(name)["networks"]) == set(service(plain)["networks"])


def test_the_spool_is_on_a_volume() -> None:
    assert mounts("proxy")["spool"] == (environment("proxy")["PAWL_SPOOL_DIR"], "rw")


def test_the_proxy_has_ended_before_docker_kills_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAWL_STOP_GRACE_S", environment("proxy")["PAWL_STOP_GRACE_S"])
    grace_s = ProxySettings().stop_grace_s
    assert grace_s < float(service("proxy")["stop_grace_period"].removesuffix("s"))


def test_postgres_18_keeps_its_data_on_the_volume() -> None:
    assert service("postgres")["image"].startswith("postgres:18.")
    assert mounts("postgres")["database"] == ("/var/lib/postgresql", "rw")


@pytest.mark.parametrize("name", SERVICES)
def test_pawl_reads_every_environment_variable_that_compose_sets(name: str) -> None:
    refuse_unknown_settings(environment(name))


def test_env_example_offers_exactly_the_variables_that_compose_and_pawl_read() -> None:
    asked = {match["name"] for match in VARIABLE.finditer(COMPOSE.read_text())}
    asked |= {"HF_TOKEN", "DATABASE_URL", "COMPOSE_PROFILES", "PAWL_POLICIES"}
    offered = set(re.findall(r"^#?(\w+)=", ENV_EXAMPLE.read_text(), flags=re.MULTILINE))
    assert offered == asked
    assert {name for name in offered if name.startswith("PAWL_")} <= known_variables()


@pytest.mark.parametrize(
    ("name", "kind"),
    [("proxy", ProxySettings), ("trainer", TrainerSettings), ("controller", ControllerSettings)],
)
def test_each_setting_of_the_env_file_reaches_the_service_that_reads_it(
    name: str, kind: type[Settings]
) -> None:
    settings = {f"PAWL_{field.upper()}" for field in kind.model_fields} - {"PAWL_DATABASE_URL"}
    written = {variable: f"the user's {variable}" for variable in {*settings, *PASSWORDS}}
    found = compose(**written)["services"][name]
    assert found["env_file"] == [{"path": ".env", "required": False}]
    reached = written | found["environment"]
    # Compose's own server has the policy's name, and the trainer asks it.
    fixed = FIXED | ({"PAWL_POLICY"} if name == "trainer" else set())
    assert {one for one in settings if reached[one] != written[one]} == fixed & settings
    assert {reached[password] for password in PASSWORDS} == {""}


def test_settings_in_compose_are_valid_and_agree_between_services(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    write_secrets(tmp_path, tmp_path, {"POSTGRES_PASSWORD": "p@ss/w:rd"})

    def read(kind: type[Kind], name: str) -> Kind:
        assert environment(name)["PAWL_SECRETS_DIR"] == str(SECRETS)
        told = environment(name) | {"PAWL_SECRETS_DIR": str(tmp_path)}
        return settings_in(monkeypatch, kind, told)

    proxy, trainer = read(ProxySettings, "proxy"), read(TrainerSettings, "trainer")
    controller = read(ControllerSettings, "controller")
    console = read(ConsoleSettings, "console")
    assert parse_address(proxy.listen) == ("0.0.0.0", 8100)
    assert proxy.database_url is not None
    assert proxy.upstream_url == trainer.upstream_url
    assert trainer.database_url == proxy.database_url
    assert controller.database_url == proxy.database_url
    assert controller.server_urls == trainer.server_urls
    assert parse_address(controller.controller_listen) == ("0.0.0.0", 8103)
    assert parse_address(console.console_listen) == ("0.0.0.0", 8105)
    assert console.database_url == proxy.database_url
    assert trainer.model == service("vllm")["command"][0]
    # With a file of policies all of them, and else what the server serves.
    assert trainer.policy is None


def test_generated_passwords_stay_until_the_user_sets_other_passwords(tmp_path: Path) -> None:
    def now() -> list[str]:
        return [(tmp_path / name).read_text() for name in PASSWORDS]

    write_secrets(tmp_path, tmp_path, {"POSTGRES_PASSWORD": ""})
    made = now()
    assert len(set(made)) == 2
    assert all(len(password) >= 32 for password in made)
    write_secrets(tmp_path, tmp_path, {})
    assert now() == made
    write_secrets(
        tmp_path, tmp_path, {"POSTGRES_PASSWORD": made[0], "GRAFANA_ADMIN_PASSWORD": "other"}
    )
    assert now() == [made[0], "other"]


def test_changed_database_password_is_refused_after_the_first_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_secrets(tmp_path, tmp_path, {"POSTGRES_PASSWORD": "p@ss/w:rd"})
    before = {file.name: file.read_text() for file in tmp_path.iterdir()}
    with pytest.raises(SystemExit, match="2"):
        write_secrets(
            tmp_path, tmp_path, {"POSTGRES_PASSWORD": "new", "GRAFANA_ADMIN_PASSWORD": "new"}
        )
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    for way in ("take it out of .env", "ALTER ROLE pawl", f"{SECRETS}/POSTGRES_PASSWORD"):
        assert way in said
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == before
    url = (tmp_path / "DATABASE_URL").read_text()
    assert unquote(urlsplit(url).password or "") == "p@ss/w:rd"


def test_vllm_serves_the_highest_rank_of_the_recipes(tmp_path: Path) -> None:
    recipe = tmp_path / "wide.toml"
    default = (ROOT / "trainer" / "recipes" / "default.toml").read_text()
    recipe.write_text(default.replace("rank = 16", "rank = 24"))
    policies = tmp_path / "policies.toml"
    policies.write_text(
        "".join(
            f'[[policy]]\nname = "{name}"\nbase = "m"\nrecipe = "{recipe}"\nagents = ["{name}"]\n'
            for name, recipe in {"one": "default", "two": recipe}.items()
        )
    )
    for settings in (TrainerSettings(recipe=str(recipe)), TrainerSettings(policies=policies)):
        write_vllm_config(tmp_path, settings)
        assert parse_yaml((tmp_path / "vllm.yaml").read_text()) == {"max-lora-rank": 32}


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("PAWL_RECIPE", "config/mine.toml", "config/mine.toml"),
        ("PAWL_POLICIES", "config/policies.toml", "config/policies.toml"),
        ("PAWL_RECIPY", "default", "PAWL_RECIPE"),
    ],
)
def test_compose_setup_refuses_settings_that_the_services_could_not_use(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    variable: str,
    value: str,
    reason: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PAWL_ADAPTER_DIR", str(tmp_path))
    monkeypatch.setenv(variable, value)
    with pytest.raises(SystemExit, match="2"):
        setup()
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert reason in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["setup", "proxy", "controller", "trainer", "trainer-cpu"])
def test_config_folder_is_mounted_below_the_working_directory_of_each_pawl_service(
    name: str,
) -> None:
    assert mounts(name)["./config"] == ("/var/lib/pawl/config", "ro")
    dockerfile = service(name)["build"]["dockerfile"]
    # So that a path in .env means the same beside .env and in the container.
    assert [rest for word, rest in last_stage(dockerfile) if word == "WORKDIR"] == ["/var/lib/pawl"]


@pytest.mark.parametrize("name", ["vllm", "vllm-cpu"])
def test_compose_and_the_local_stack_start_vllm_with_the_same_options(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    monkeypatch.setattr(vllm, "has_gpu", lambda: name == "vllm")
    # Both have a GPU or both have none, where that is what the recipe's "auto" is.
    assert load_recipe("default").dtype == "auto"
    wanted = options(
        vllm_command(
            VllmOptions(
                model="m",
                served_name="m",
                port=8000,
                dtype=None,
                max_model_len=None,
                max_lora_rank=16,
            )
        )
    )
    # The model is the first word of `vllm serve`.
    own = {"--model", "--served-model-name", "--host", "-m"}
    command = service(name)["command"]
    config = Path(command[command.index("--config") + 1])
    write_vllm_config(tmp_path, settings_in(monkeypatch, TrainerSettings, {}))
    assert str(config.parent) == environment("setup")["PAWL_ADAPTER_DIR"]
    written = parse_yaml((tmp_path / config.name).read_text())
    given = options(command) | {f"--{key}": str(value) for key, value in written.items()}
    assert {one: given.get(one, "left out") for one in wanted.keys() - own} == {
        one: wanted[one] for one in wanted.keys() - own
    }
    started = environment(name)
    assert started["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "True"
    ours = vllm_environment(cores=1)
    assert {one: started[one] for one in ours if one in started and one.startswith("VLLM")} == {
        one: ours[one] for one in ours if one in started and one.startswith("VLLM")
    }


@pytest.mark.parametrize("name", ["vllm", "trainer"])
def test_compose_reserves_all_gpus_for_vllm_and_trainer(name: str) -> None:
    [device] = service(name)["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}


def test_gpus_and_arguments_of_a_user_reach_vllm_and_the_trainer() -> None:
    given = {"PAWL_SERVE_GPUS": "0,1", "PAWL_TRAIN_GPUS": "2,3", "PAWL_SERVE_GPU_SHARE": "0.9"}
    arguments = "--tensor-parallel-size 2 --hf-overrides '{\"a b\": 1}'"
    services = compose(**given, PAWL_VLLM_ARGS=arguments)["services"]
    assert services["vllm"]["environment"]["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert services["trainer"]["environment"]["PAWL_TRAIN_GPUS"] == "2,3"
    command = shlex.split(services["vllm"]["command"])
    assert "--gpu-memory-utilization=0.9" in command
    assert command[-4:] == ["--tensor-parallel-size", "2", "--hf-overrides", '{"a b": 1}']


def test_compose_gives_the_proxy_and_vllm_the_same_tool_parser() -> None:
    services = compose(PAWL_TOOL_PARSER="qwen3_json")["services"]
    assert services["proxy"]["environment"]["PAWL_TOOL_PARSER"] == "qwen3_json"
    for name in ("vllm", "vllm-cpu"):
        assert options(shlex.split(services[name]["command"]))["--tool-call-parser"] == "qwen3_json"


def test_prometheus_targets_are_the_metrics_ports_of_the_compose_services() -> None:
    config = parse_yaml((ROOT / "dashboards" / "prometheus.yml").read_text())
    targets = {
        target
        for job in config["scrape_configs"]
        for group in job["static_configs"]
        for target in group["targets"]
    }
    ports = {
        "proxy": parse_address(environment("proxy")["PAWL_ADMIN_LISTEN"])[1],
        "trainer": parse_address(environment("trainer")["PAWL_TRAINER_LISTEN"])[1],
        "controller": parse_address(environment("controller")["PAWL_CONTROLLER_LISTEN"])[1],
        "vllm": int(options(service("vllm")["command"])["--port"] or ""),
    }
    assert targets == {f"{name}:{port}" for name, port in ports.items()}
    assert all("watch" in service(name)["networks"] for name in [*ports, "prometheus"])


def test_prometheus_reads_its_metrics_key_from_the_proxys_key_volume() -> None:
    config = parse_yaml((ROOT / "dashboards" / "prometheus.yml").read_text())
    [file] = [
        job["authorization"]["credentials_file"]
        for job in config["scrape_configs"]
        if "authorization" in job
    ]
    kept, _ = mounts("proxy")["keys"]
    seen, mode = mounts("prometheus")["keys"]
    assert (file, mode) == (f"{seen}/metrics", "ro")
    # The volume begins with the image's file: without one, Prometheus scrapes nothing.
    assert f"/dev/null {kept}/metrics" in (ROOT / "Dockerfile.proxy").read_text()


# The images


@pytest.mark.parametrize("dockerfile", DOCKERFILES)
def test_each_dockerfile_has_a_single_pinned_base_image(dockerfile: str) -> None:
    stages = [rest.split() for name, rest in instructions(dockerfile) if name == "FROM"]
    ours = {words[-1] for words in stages if "AS" in words} | {"scratch"}
    bases = {words[0] for words in stages} - ours
    assert len(bases) == 1
    assert all(re.fullmatch(r"python:3\.11\.\d+-slim-\w+", base) for base in bases)


@pytest.mark.parametrize("dockerfile", DOCKERFILES)
def test_files_that_dockerfiles_copy_exist_and_are_not_docker_ignored(dockerfile: str) -> None:
    ignore = (ROOT / ".dockerignore").read_text().split()
    allowed = {line.removeprefix("!") for line in ignore if line.startswith("!")}
    assert "*" in ignore
    for name, rest in instructions(dockerfile):
        if name != "COPY" or rest.startswith("--from"):
            continue
        for source in rest.replace("$LOCK", "trainer-cpu").split()[:-1]:
            assert (ROOT / source).exists(), source
            assert {source, source.partition("/")[0]} & allowed, source


def test_trainer_image_has_the_compiler_and_headers_that_triton_needs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    packages = {"gcc", "libc6-dev"}
    installed = " ".join(rest for name, rest in last_stage("Dockerfile.trainer") if name == "RUN")
    assert packages <= set(installed.replace(";", " ").split())
    # The base image has Python's headers. Nothing else is found by this: a compiler, and headers.
    monkeypatch.setenv("CC", "gcc")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compile_module = pytest.importorskip("triton.runtime.build").compile_module_from_src
    assert compile_module(C_MODULE, "sixes").six() == 6


@pytest.mark.parametrize("dockerfile", DOCKERFILES)
def test_any_user_of_group_0_has_the_folder_permissions_of_the_images_own_user(
    dockerfile: str,
) -> None:
    steps = [rest for name, rest in last_stage(dockerfile) if name == "RUN" and "install" in rest]
    words = [shlex.split(one) for step in steps for one in step.split("&&")]
    made = [options(line) for line in words if line[0] == "install"]
    assert made
    assert all(one["--group"] == "root" for one in made)
    modes = [one["--mode"] or "" for one in made]
    assert all(mode[1] == mode[2] for mode in modes)
    # What it works in is entered even without that group: a `.env` is looked for there.
    [work] = [line for line in words if line[0] == "install" and "/var/lib/pawl" in line]
    assert int((options(work)["--mode"] or "0")[3]) & 1


@pytest.mark.parametrize("dockerfile", DOCKERFILES)
def test_pawls_images_are_labelled_with_title_licence_and_version(dockerfile: str) -> None:
    [labels] = [rest for name, rest in last_stage(dockerfile) if name == "LABEL"]
    prefix = "org.opencontainers.image."
    said = dict(word.removeprefix(prefix).split("=", 1) for word in shlex.split(labels))
    assert {"title", "description", "licenses"} < said.keys()
    assert said["version"] == __version__
    found = {one["image"] for one in map(service, SERVICES) if dockerfile in str(one.get("build"))}
    assert f"{said['title']}:{said['version']}" in found
    assert {image.partition(":")[2] for image in found} == {said["version"]}


@pytest.mark.parametrize("lock", ["proxy", "litellm", "trainer"])
def test_each_package_of_an_image_is_locked_with_hashes(lock: str) -> None:
    text = (ROOT / "requirements" / f"{lock}.txt").read_text().replace("\\\n", " ")
    assert [line for line in text.splitlines() if "--hash=sha256:" not in line] == []


def test_cpu_images_lock_contains_the_proxys_lock_and_is_within_the_developers_lock() -> None:
    proxy, image, ours = (
        set(re.findall(r"^\S+==\S+", (ROOT / "requirements" / name).read_text(), re.MULTILINE))
        for name in ("proxy.txt", "trainer-cpu.txt", "cpu.txt")
    )
    assert proxy <= image <= ours


def test_proxy_and_trainer_images_copy_the_same_files_except_for_the_lora_plugin() -> None:
    def copied(role: str) -> list[str]:
        steps = [rest for name, rest in instructions(f"Dockerfile.{role}") if name == "COPY"]
        return [rest for rest in steps if not rest.startswith(("--from", "requirements/"))]

    plugin = "plugins/cpu_lora plugins/cpu_lora"
    assert copied("proxy") == [rest for rest in copied("trainer") if rest != plugin]


@pytest.mark.parametrize("dockerfile", DOCKERFILES)
def test_each_docker_build_step_that_installs_packages_mounts_pips_configuration(
    dockerfile: str,
) -> None:
    steps = [rest for name, rest in instructions(dockerfile) if name == "RUN"]
    command = re.compile(r"\bpip (--python \S+ )?(install|wheel)\b")
    installing = [rest for rest in steps if command.search(rest)]
    fetching = [rest for rest in installing if "--no-index" not in rest]
    assert len(fetching) == 3
    for step in fetching:
        assert "--mount=type=secret,id=pip,target=/etc/pip.conf" in step
        assert "--mount=type=secret,id=ca" in step


def test_each_third_party_image_but_the_gpu_vllm_has_a_stand_in() -> None:
    targets = {
        words[-1]
        for name, rest in instructions("scripts/stand_ins.Dockerfile")
        if name == "FROM" and "AS" in (words := rest.split())
    }
    others = {service(name)["image"] for name in SERVICES if "build" not in service(name)}
    names = {image.partition(":")[0].rpartition("/")[2] for image in others}
    # A GPU's vLLM has none: where there is a GPU, there is a registry.
    assert names - {"vllm-openai"} <= targets
