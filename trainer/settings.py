"""The trainer's settings: one frozen object, read once at the start."""

from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field, HttpUrl
from pydantic_settings import NoDecode, SettingsConfigDict

from store.settings import Listen, StoreSettings


def _separated(value: object) -> object:
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


Urls = Annotated[tuple[HttpUrl, ...], NoDecode, BeforeValidator(_separated)]


class TrainerSettings(StoreSettings):
    """What `pawl trainer` reads from `PAWL_*`."""

    model_config = SettingsConfigDict(
        env_prefix="PAWL_", env_file=".env", extra="ignore", frozen=True, env_ignore_empty=True
    )

    upstream_url: HttpUrl = Field(
        default=HttpUrl("http://127.0.0.1:8000/v1"), description="the model server, with its /v1"
    )
    replica_urls: Urls = Field(
        default=(),
        description="its other replicas, separated by commas: adapters are loaded on each",
    )
    adapter_dir: Path = Field(
        default=Path("var/adapters"), description="where versions are kept; the server reads it too"
    )
    recipe: str = Field(default="default", description="a TOML file, or a packaged recipe's name")
    policy: str | None = Field(
        default=None, description="the policy trained; unset: the server's base model"
    )
    model: str | None = Field(
        default=None,
        description="folder or name of the base model; unset: what the server says it serves",
    )
    trainer_listen: Listen = Field(
        default="127.0.0.1:8102", description="where the trainer's /metrics are"
    )
    poll_s: float = Field(default=1.0, gt=0, description="pause between looks at the store")
    seed: int = Field(default=0, ge=0, description="of the first adapter's weights")
