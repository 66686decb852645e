"""Which database: the one setting that both processes share."""

from pathlib import Path

from pydantic import AliasChoices, Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from store.engine import async_url


class StoreSettings(BaseSettings):
    """`DATABASE_URL`, or the embedded PostgreSQL in `PAWL_DATA_DIR` where it is unset."""

    model_config = SettingsConfigDict(
        env_prefix="PAWL_", env_file=".env", extra="ignore", frozen=True, env_ignore_empty=True
    )

    database_url: SecretStr | None = Field(
        default=None,
        validation_alias=AliasChoices("DATABASE_URL", "database_url"),
        description="PostgreSQL to store in; unset: the embedded one",
    )
    data_dir: Path = Field(default=Path("var"), description="where the embedded PostgreSQL lives")

    @field_validator("database_url")
    @classmethod
    def _is_postgresql(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None:
            try:
                async_url(value.get_secret_value())
            except Exception as error:  # the URL parser's own errors vary
                raise ValueError(str(error)) from error
        return value
