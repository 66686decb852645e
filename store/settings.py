"""Define the settings that proxy and trainer share: the database, and the format of addresses."""

import os
import re
from pathlib import Path
from typing import Annotated, Any, Final, Literal
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit, urlunsplit

from pydantic import (
    AfterValidator,
    AliasChoices,
    BeforeValidator,
    Field,
    SecretStr,
    field_validator,
)
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SecretsSettingsSource,
    SettingsConfigDict,
)

from store.errors import StoreError

# PostgreSQL's integers, and numbers of bytes, have this limit or a larger one.
MAX_INT32: Final = 2**31 - 1


# Addresses are here because proxy and trainer both listen on some, and share `store` only.
def _host_and_port(value: str) -> str:
    host, _, port = value.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or int(port[:6]) > 65535:
        raise ValueError(
            f"{value!r:.80} is not an address: write HOST:PORT, such as 127.0.0.1:8100"
        )
    return value


# The file of policies is here for the same reason: both read it.
PoliciesFile = Annotated[
    Path | None,
    Field(
        description="TOML file that names the policies: what each answers, its base model, and "
        "whether it is trained; unset: every model is a policy"
    ),
]
Listen = Annotated[str, AfterValidator(_host_and_port)]


def split_commas(value: object) -> object:
    """Return the parts of a comma-separated text; another value stays as it is."""
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(split_commas)]
HostNames = Annotated[Names, AfterValidator(lambda names: tuple(map(str.lower, names)))]


def parse_address(listen: str) -> tuple[str, int]:
    """Return host and port of `HOST:PORT`; the brackets of an IPv6 host are removed."""
    host, _, port = listen.rpartition(":")
    return host.strip("[]"), int(port)


def without_login(url: str) -> str:
    """Return a URL without its user name and password, so that it can be shown."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


# A password may hold a slash, as base64 does, although libpq wants it quoted.
_URL: Final = re.compile(
    r"(?P<name>\w+)(\+\w+)?://"
    r"((?P<user>[^:/?]*)(:(?P<password>(?![0-9]*[,/?])[^@]*))?@)?"
    r"(?P<host>[^/?]*)(/(?P<dbname>[^?]*))?(\?(?P<query>.*))?",
    re.DOTALL,
)
_HOST: Final = re.compile(
    # A part of a name has at most 63 characters (RFC 1035).
    r"(?P<host>/.*|\[[0-9a-fA-F:.]+\]|[\w-]{1,63}(\.[\w-]{1,63})*\.?)(:(?P<port>[^:]*))?",
    re.ASCII | re.DOTALL,
)
# The parameters of libpq that the driver understands, or sends to the server.
_PARAMETERS: Final = {
    *("host", "port", "dbname", "user", "password", "passfile", "application_name", "options"),
    *("sslmode", "sslrootcert", "sslcert", "sslkey", "sslpassword", "sslcrl"),
    *("target_session_attrs", "connect_timeout"),
}
_VALUES: Final = {
    "sslmode": ("disable", "allow", "prefer", "require", "verify-ca", "verify-full"),
    # Pawl writes, so a standby is of no use.
    "target_session_attrs": ("any", "primary", "read-write"),
}


def read_url(database_url: str) -> tuple[list[str], int | None]:
    """Return a DSN for each host of `database_url`, and its `connect_timeout` (s), if it has one.

    Raises:
        StoreError: it is not a `postgresql://` URL, or a part of it is wrong or not supported.
    """
    # The driver has a parser, too: its import would delay the start of every command.
    parts = _URL.fullmatch(database_url)
    if parts is None or parts["name"] not in ("postgresql", "postgres"):
        other = f", not {parts['name']}://" if parts else ""
        raise StoreError(f"DATABASE_URL must be a postgresql:// URL{other}")
    try:
        query = dict(parse_qsl(parts["query"] or "", strict_parsing=bool(parts["query"])))
    except ValueError as error:
        raise StoreError("DATABASE_URL must have NAME=VALUE after its question mark") from error
    _check_parameters(query)
    named = {
        name: unquote(parts[name]) for name in ("user", "password", "dbname", "host") if parts[name]
    }
    parameters = {"application_name": "pawl", **named, **query}
    hosts = parameters.pop("host", "").split(",")
    ports = parameters.pop("port", "").split(",")
    if len(ports) not in (1, len(hosts)):
        raise StoreError("DATABASE_URL must have one port, or as many as hosts")
    timeout = parameters.pop("connect_timeout", None)
    # SQLAlchemy hides a password in this place when it prints the engine.
    login = ":".join(quote(parameters.pop(name, ""), safe="") for name in ("user", "password"))
    dsns = [
        f"postgresql://{login}@?{urlencode(_host_parameters(host, port) | parameters)}"
        for host, port in zip(hosts, ports * len(hosts), strict=False)
    ]
    return dsns, None if timeout is None else int(timeout)


def _check_parameters(query: dict[str, str]) -> None:
    """Raise StoreError, which names the parameter, if one is not supported or has a wrong value."""
    for name, value in query.items():
        if name not in _PARAMETERS:
            raise StoreError(
                f"DATABASE_URL has the parameter {name:.40}, which Pawl does not support: remove it"
            )
        if value not in _VALUES.get(name, (value,)):
            raise StoreError(f"DATABASE_URL must have as {name} one of: {', '.join(_VALUES[name])}")
        if name in ("sslrootcert", "sslcert", "sslkey", "sslcrl") and not os.access(value, os.R_OK):
            system = "; the system's are often in /etc/ssl/certs/ca-certificates.crt"
            raise StoreError(
                f"DATABASE_URL has a file as {name} that cannot be read: {value}"
                f"{system if name == 'sslrootcert' else ''}"
            )
        if name == "connect_timeout" and not re.fullmatch("[1-9][0-9]{0,4}", value):
            raise StoreError("DATABASE_URL must have a number of seconds as connect_timeout")
    if query.get("sslmode", "").startswith("verify") and "sslrootcert" not in query:
        raise StoreError(f"DATABASE_URL must have sslrootcert=FILE with sslmode={query['sslmode']}")


def _host_parameters(host: str, port: str) -> dict[str, str]:
    """Return the DSN's parameters for `host`, which is `HOST[:PORT]`; `port` is its default port.

    Raises:
        StoreError: `host` or the port is malformed.
    """
    parts = _HOST.fullmatch(host)
    # Without a host the driver looks for the server's socket.
    if host and parts is None:
        raise StoreError("DATABASE_URL must have HOST, HOST:PORT or several, with commas")
    port = (parts and parts["port"]) or port
    if port and not (re.fullmatch("[0-9]{1,5}", port) and 0 < int(port) < 65536):
        raise StoreError("DATABASE_URL must have a number from 1 to 65535 as its port")
    return {**({"host": parts["host"]} if parts else {}), **({"port": port} if port else {})}


# Where Docker mounts secrets.
SECRETS: Final = Path("/run/secrets")


def _is_folder(path: Path) -> Path:
    # Unlike pathlib's, it raises nothing, whatever the name.
    if not os.path.isdir(path):
        raise ValueError(
            f"{str(path)!r:.80} is no folder that this user can see: make it, or unset it"
        )
    return path


def secrets_folder(named: Path | str | None) -> Path | None:
    """Return the folder `named` (None: Docker's folder of secrets), or None if there is none."""
    folder = Path(named or SECRETS)
    return folder if os.path.isdir(folder) else None


class _SecretFiles(SecretsSettingsSource):
    """Read settings from files in the folder of secrets, which earlier sources may name."""

    def __call__(self) -> dict[str, Any]:
        self.secrets_dir = secrets_folder(self.current_state.get("secrets_dir"))
        return super().__call__()


class Settings(BaseSettings):
    """Settings from `PAWL_*` environment variables, `.env`, or secret files named like them."""

    model_config = SettingsConfigDict(
        env_prefix="PAWL_",
        env_file=".env",
        extra="ignore",
        frozen=True,
        env_ignore_empty=True,
        allow_inf_nan=False,
    )

    secrets_dir: Annotated[Path, AfterValidator(_is_folder)] | None = Field(
        default=None,
        description="folder with one file per variable, named like the variable, as Docker and "
        "Kubernetes mount secrets; unset: /run/secrets, if it exists",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info",
        description="least level of the lines that are logged; `debug` has a line for each call "
        "and feedback",
    )
    allowed_hosts: HostNames = Field(
        default=(
            *(".localhost", "host.docker.internal", "host.containers.internal"),
            *(".svc", ".svc.cluster.local"),
        ),
        description="host names with a dot that requests without an API key may be addressed to, "
        ".example.com for all names below it; and HOST:PORT of web pages that may send such "
        "requests; IP addresses and names without a dot need no entry",
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return the sources of settings; an earlier source overrides later ones."""
        return init_settings, env_settings, dotenv_settings, _SecretFiles(settings_cls)

    @field_validator("*", mode="after")
    @classmethod
    def _is_in_range(cls, value: Any) -> Any:
        if isinstance(value, int) and value > MAX_INT32:
            raise ValueError(f"the number is too large; use one up to {MAX_INT32}")
        return value


class StoreSettings(Settings):
    """Settings of the database: `DATABASE_URL`, or else embedded PostgreSQL in `PAWL_DATA_DIR`."""

    database_url: SecretStr | None = Field(
        default=None,
        validation_alias=AliasChoices("DATABASE_URL", "database_url"),
        description="postgresql:// URL of the database; it may have several hosts, and libpq's "
        "parameters, such as `sslmode`; unset: use the embedded PostgreSQL",
    )
    data_dir: Path = Field(default=Path("var"), description="folder of the embedded PostgreSQL")

    @field_validator("database_url")
    @classmethod
    def _is_postgresql(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None:
            try:
                read_url(value.get_secret_value())
            except StoreError as error:
                raise ValueError(str(error)) from error
        return value
