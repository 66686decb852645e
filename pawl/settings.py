"""The command line's settings, and the start-up error for unknown `PAWL_*` variables."""

import os
import re
import shlex
from collections.abc import Mapping
from difflib import get_close_matches
from io import StringIO
from pathlib import Path
from typing import Annotated, Final, Literal, TypeVar

from dotenv.parser import parse_stream
from pydantic import AfterValidator, BeforeValidator, Field, HttpUrl, SecretStr, ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import NoDecode, SettingsError

from proxy.settings import ProxySettings
from store.settings import Listen, Settings, StoreSettings, secrets_folder
from trainer.settings import Cards, ServerSettings, SourceSettings, TrainerSettings

PREFIX: Final = "PAWL_"
Kind = TypeVar("Kind", bound=Settings)


def _split_words(value: object) -> object:
    return shlex.split(value) if isinstance(value, str) else value


Words = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_words)]


class StackSettings(StoreSettings):
    """Settings of `pawl up`, `pawl demo` and the commands that open the database.

    The processes that `pawl up` and `pawl demo` start have settings of their own.
    """

    model: str | None = Field(
        default=None,
        description="folder or hub name of the base model; unset: the packaged SmolLM2",
    )
    vllm_port: int = Field(
        default=8000, ge=1, le=65535, description="port on 127.0.0.1 that vLLM listens on"
    )
    vllm_dtype: Literal["float32", "bfloat16", "auto"] | None = Field(
        default=None,
        description="number format vLLM computes in; unset: float32 on a CPU (exact), bfloat16 "
        "on a GPU, where float32 is refused",
    )
    max_model_len: int | None = Field(
        default=None,
        ge=128,
        description="longest context that vLLM serves, in tokens; unset: 2048 on a CPU, and on a "
        "GPU the model's own, as far as it fits into the memory",
    )
    serve_gpus: Cards = Field(
        default=(),
        description="GPUs that vLLM serves on, such as 0 or 0-1, as nvidia-smi numbers them; "
        "unset: the first that CUDA shows",
    )
    serve_gpu_share: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="share of a GPU's memory that vLLM takes; unset: 0.5 on a GPU that the trainer "
        "uses too, else 0.9",
    )
    vllm_args: Words = Field(
        default=(),
        description="further arguments of vLLM, quoted as in a shell; they override Pawl's own",
    )
    log_dir: Path = Field(
        default=Path("var/logs"), description="folder of logs, one file for each process"
    )


class ClientSettings(Settings):
    """Settings of the commands that are clients of a proxy."""

    api_key: SecretStr | None = Field(
        default=None,
        description="API key that `pawl rollout`, `pawl evaluate` and the controller's evaluations "
        "(scopes infer, feedback, read) and `pawl judge` (feedback) show the proxy, where it asks "
        "for one",
    )

    @property
    def key(self) -> str | None:
        return None if self.api_key is None else self.api_key.get_secret_value()

    @property
    def headers(self) -> dict[str, str]:
        """Return the `Authorization` header with the API key; empty without a key."""
        return {} if self.key is None else {"Authorization": f"Bearer {self.key}"}


class ControllerSettings(ServerSettings):
    """Settings of `pawl controller`."""

    controller_listen: Listen = Field(
        default="127.0.0.1:8103",
        description="address of the controller's /healthz, /readyz and /metrics",
    )
    controller_poll_s: float = Field(
        default=0.5,
        gt=0,
        description="pause between looks at a model server, and at the database, in seconds; a "
        "server that has all that it should is asked at every tenth look",
    )


class AdaptersSettings(SourceSettings):
    """Settings of `pawl adapters`, which fetches adapters for one model server."""

    upstream_url: HttpUrl = Field(
        default=HttpUrl("http://127.0.0.1:8000/v1"),
        description="base URL of the model server, with its /v1",
    )
    adapters_listen: Listen = Field(
        default="127.0.0.1:8104",
        description="address of `pawl adapters`, which trainer and controller have, with /v1, in "
        "place of the model server's own",
    )


class DoctorSettings(
    ClientSettings, ControllerSettings, TrainerSettings, ProxySettings, StackSettings
):
    """Settings of all processes: `pawl doctor` sends requests to their ports.

    For a process on another machine, set the address at which this machine reaches it.
    """

    @property
    def model_servers(self) -> list[str]:
        """Return the URLs of the model server's replicas, by default that of `pawl up`."""
        is_set = "upstream_url" in self.model_fields_set
        first = self.upstream_url if is_set else f"http://127.0.0.1:{self.vllm_port}/v1"
        return [str(first), *map(str, self.replica_urls)]


def _check_prefix(value: str) -> str:
    path = value.rstrip("/")
    if path and not re.fullmatch(r"(/[A-Za-z0-9._~-]+)+", path):
        raise ValueError(f"{value!r:.80} is no path: write one such as /pawl, or leave it empty")
    return path


class ConsoleSettings(DoctorSettings):
    """Settings of `pawl console`, which asks for API keys if the proxy does.

    It needs the other processes' settings because it shows the findings of `pawl doctor`.
    """

    console_listen: Listen = Field(
        default="127.0.0.1:8105", description="address of the console's pages, and of its /healthz"
    )
    console_prefix: Annotated[str, AfterValidator(_check_prefix)] = Field(
        default="",
        description="path that the console's addresses begin with, such as /pawl, where a reverse "
        "proxy has other services beside it",
    )


class UnreadSettings(Exception):
    """A `PAWL_*` variable is unknown, or a setting cannot be read or used."""


def known_variables() -> set[str]:
    """Return the names of all `PAWL_*` variables that any process reads."""
    kinds = (
        *(ProxySettings, TrainerSettings, StackSettings),
        *(ControllerSettings, AdaptersSettings, ConsoleSettings, ClientSettings),
    )
    names = {name for kind in kinds for name in kind.model_fields} - {"database_url"}
    return {PREFIX + name.upper() for name in names}


def refuse_unknown_settings(environment: Mapping[str, str] | None = None) -> None:
    """Refuse unknown `PAWL_*` names: in `environment` (default: the process's), `.env` or secrets.

    Raises:
        UnreadSettings: a variable is unknown (the message suggests the closest known name), or
            `.env` or the folder of secrets cannot be read.
    """
    given = dict(os.environ if environment is None else environment)
    try:
        lines = list(parse_stream(StringIO(Path(".env").read_text("utf-8"))))
    except FileNotFoundError:
        lines = []
    except (OSError, UnicodeDecodeError) as error:
        raise UnreadSettings(f".env cannot be read: {error}; write it as UTF-8") from error
    for line in lines:
        if line.error or (line.key is not None and line.value is None):
            # The line is not shown: it may have a secret.
            raise UnreadSettings(f".env: line {line.original.line} is not NAME=VALUE: correct it")
    given = {line.key: line.value or "" for line in lines if line.key is not None} | given
    folder = secrets_folder(given.get("PAWL_SECRETS_DIR"))
    try:
        secrets = [name.upper() for name in os.listdir(folder)] if folder else []
    except OSError as error:
        raise _unread_secret(error) from error
    known = known_variables()
    for name in sorted({*given, *secrets}):
        if name.startswith(PREFIX) and name not in known:
            near = get_close_matches(name, sorted(known), n=1)
            remedy = f"did you mean {near[0]}?" if near else f"remove {name}, or correct its name"
            raise UnreadSettings(f"{name} is set, but Pawl has no such setting: {remedy}")


def read_settings(kind: type[Kind]) -> Kind:
    """Read the settings of one process from the environment, `.env` and secrets.

    Raises:
        UnreadSettings: a `PAWL_*` variable is unknown, or a value cannot be read or used; the
            message names each such variable with the reason.
    """
    refuse_unknown_settings()
    try:
        return kind()
    except ValidationError as error:
        problems = "; ".join(_describe_problem(kind, detail) for detail in error.errors())
        raise UnreadSettings(problems) from error
    except SettingsError as error:
        raise _unread_secret(error) from error


def _unread_secret(error: Exception) -> UnreadSettings:
    return UnreadSettings(
        f"PAWL_SECRETS_DIR: a secret cannot be read: {error.__cause__ or error}; make it a text in "
        "UTF-8 that this user may read"
    )


def _describe_problem(kind: type[Settings], detail: ErrorDetails) -> str:
    field, message = str(detail["loc"][0]), detail["msg"].removeprefix("Value error, ")
    name = field if field == "DATABASE_URL" else PREFIX + field.upper()
    if detail["type"] == "value_error":
        # Messages of our own checks say what to write instead.
        return message if message.startswith(name) else f"{name}: {message}"
    # Hide a URL that may have a password.
    shown = "" if "@" in str(detail["input"]) else f" is {detail['input']!r:.80}"
    return f"{name}{shown}: {message}; it sets: {kind.model_fields[field].description}"
