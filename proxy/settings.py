"""The proxy's settings: one frozen object, read once at the start."""

from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field, HttpUrl, InstanceOf
from pydantic_settings import NoDecode, SettingsConfigDict

from proxy.result_readers import ResultReaders, parse_readers
from store.settings import Listen, StoreSettings


def _readers(value: object) -> object:
    return parse_readers(value) if isinstance(value, str) else value


class ProxySettings(StoreSettings):
    """What `pawl proxy` reads from `PAWL_*`."""

    model_config = SettingsConfigDict(
        env_prefix="PAWL_", env_file=".env", extra="ignore", frozen=True, env_ignore_empty=True
    )

    upstream_url: HttpUrl = Field(
        default=HttpUrl("http://127.0.0.1:8000/v1"), description="the model server, with its /v1"
    )
    upstreams: Path | None = Field(
        default=None,
        description="a TOML file of several upstreams by model; unset: the one of upstream_url",
    )
    listen: Listen = Field(default="127.0.0.1:8100", description="data port: calls and feedback")
    admin_listen: Listen = Field(default="127.0.0.1:8101", description="health and metrics")
    spool_dir: Path = Field(default=Path("var/spool"), description="where records wait on disk")
    default_temperature: float = Field(
        default=1.0,
        ge=0,
        description="what the upstream samples with where a request names no temperature",
    )
    allow_model_delete: bool = Field(
        default=False,
        description="whether DELETE /v1/models/{id} is passed on to the upstream",
    )
    workers: int = Field(default=1, ge=1, le=64, description="processes that take calls")
    silence_s: float = Field(
        default=600.0,
        gt=0,
        description="how long the upstream may say nothing before a call is given up, in seconds",
    )
    head_s: float = Field(
        default=60.0,
        gt=0,
        description="how long a client may take for a request's head, in seconds",
    )
    body_s: float = Field(
        default=300.0,
        gt=0,
        description="how long a client may take for each 16 KiB of a request's body, in seconds",
    )
    write_s: float = Field(
        default=300.0,
        gt=0,
        description="how long a client may take to read 16 KiB of a waiting reply, in seconds",
    )
    stop_grace_s: float = Field(
        default=28.0,
        gt=0,
        description="how long all of `pawl proxy` may take to end after SIGTERM, in seconds; calls "
        "under way get 60 % of it, their records the rest",
    )
    max_body_mb: int = Field(default=256, ge=1, description="largest request body taken, in MiB")
    max_feedback_kb: int = Field(
        default=2048, ge=1, description="largest body of /feedback taken, in KiB"
    )
    in_flight_mb: int = Field(
        default=192,
        ge=1,
        description="memory of one worker for bodies and replies in flight, in MiB; past it new "
        "requests are answered with 503",
    )
    max_reply_mb: int = Field(
        default=256,
        ge=1,
        description="largest recorded reply in one piece, and the most of a stream that is stored, "
        "in MiB",
    )
    segment_mb: int = Field(default=8, ge=1, description="size at which a spool segment is closed")
    tool_results: Annotated[InstanceOf[ResultReaders], NoDecode, BeforeValidator(_readers)] = Field(
        default=ResultReaders(),
        description="how tools' results are read, tool by tool: search=json_error,shell=exit_code",
    )
    drain_batch: int = Field(default=256, ge=1, description="records stored in one transaction")

    @property
    def calls_end_s(self) -> float:
        """After SIGTERM, when calls that are still under way are broken off."""
        return 0.6 * self.stop_grace_s

    @property
    def workers_end_s(self) -> float:
        """When a worker that is still there is killed: it had time to write its records down."""
        return 0.75 * self.stop_grace_s

    @property
    def keeper_ends_s(self) -> float:
        """How long the keeper may take after the workers; it stores for a part of that."""
        return self.stop_grace_s - self.workers_end_s

    @property
    def last_drain_s(self) -> float:
        """How long the keeper stores what is left before it closes."""
        return 0.6 * self.keeper_ends_s
