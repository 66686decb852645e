"""Define the settings that proxy and trainer share: the database, and the format of addresses."""

import re
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import urlsplit, urlunsplit

from pydantic import AfterValidator, AliasChoices, Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from store.errors import StoreError

# PostgreSQL's integers, and numbers of bytes, have this limit or a larger one.
MOST: Final = 2**31 - 1


# Addresses are here because proxy and trainer both listen on some, and share `store` only.
def _host_and_port(value: str) -> str:
    host, _, port = value.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or int(port[:6]) > 65535:
        raise ValueError(
            f"{value!r:.80} is not an address: write HOST:PORT, such as 127.0.0.1:8100"
        )
    return value


# Here for the same reason: the file that both read.
PoliciesFile = Annotated[
    Path | None,
    Field(
        description="TOML file that names the policies: what each answers, its base model, and "
        "whether it is trained; unset: every model is a policy"
    ),
]
Listen = Annotated[str, AfterValidator(_host_and_port)]


def address(listen: str) -> tuple[str, int]:
    """Return `HOST:PORT` as a pair; the brackets of an IPv6 host are removed."""
    host, _, port = listen.rpartition(":")
    return host.strip("[]"), int(port)


def without_login(url: str) -> str:
    """Return a URL without the name and password that it may hold, to tell it to anybody."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


BACKENDS: Final = ("postgresql", "postgres")
# As far as SQLAlchemy's own parser (`sqlalchemy.engine.url`) may refuse what it reads: its import
# would delay the start of every command.
_PARTS: Final = re.compile(
    r"(?P<name>[\w+]+)://([^:/]*(:[^@]*)?@)?(\[[^/?]+\]|[^/:?]+)?(:(?P<port>[^/?]*))?"
)


def check_url(database_url: str) -> None:
    """Check that SQLAlchemy can read `database_url`, and that it names a PostgreSQL.

    Raises:
        StoreError: it is not a `postgresql://` URL, or its port is not a number.
    """
    parts = _PARTS.match(database_url)
    if parts is None:
        raise StoreError("DATABASE_URL must be a postgresql:// URL")
    backend = parts["name"].partition("+")[0]
    if backend not in BACKENDS:
        raise StoreError(f"DATABASE_URL must be a postgresql:// URL, not {backend}://")
    if parts["port"] is not None:
        with suppress(ValueError):
            int(parts["port"])
            return
        raise StoreError("DATABASE_URL must have a number as its port")


class Settings(BaseSettings):
    """Read settings from `PAWL_*` environment variables, or `.env`."""

    model_config = SettingsConfigDict(
        env_prefix="PAWL_",
        env_file=".env",
        extra="ignore",
        frozen=True,
        env_ignore_empty=True,
        allow_inf_nan=False,
    )

    @field_validator("*", mode="after")
    @classmethod
    def _has_a_usual_size(cls, value: Any) -> Any:
        if isinstance(value, int) and value > MOST:
            raise ValueError(f"the number is too large; use one up to {MOST}")
        return value


class StoreSettings(Settings):
    """Name the database: `DATABASE_URL`, or the embedded PostgreSQL in `PAWL_DATA_DIR` if unset."""

    database_url: SecretStr | None = Field(
        default=None,
        validation_alias=AliasChoices("DATABASE_URL", "database_url"),
        description="postgresql:// URL of the database; unset: use the embedded PostgreSQL",
    )
    data_dir: Path = Field(default=Path("var"), description="folder of the embedded PostgreSQL")

    @field_validator("database_url")
    @classmethod
    def _is_postgresql(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None:
            try:
                check_url(value.get_secret_value())
            except StoreError as error:
                raise ValueError(str(error)) from error
        return value
