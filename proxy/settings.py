"""Define the proxy's settings: one frozen object, read once when the process starts."""

from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BeforeValidator, Field, HttpUrl, InstanceOf
from pydantic_settings import NoDecode

from proxy.tool_events import ResultReaders, parse_readers
from store.records import EVAL_TASKS
from store.settings import Listen, PoliciesFile, StoreSettings
from store.values.sampling import parse_server_defaults

# About a hundred years.
MOST_DAYS: Final = 36_500
# Who may call while no key was ever made.
Access = Literal["loopback", "keys", "anyone"]


def _readers(value: object) -> object:
    return parse_readers(value) if isinstance(value, str) else value


def _defaults(value: object) -> object:
    if not isinstance(value, str):
        return value
    pairs = [pair.partition("=") for pair in value.split(",")]
    named = {name.strip(): number.strip() for name, _, number in pairs}
    if "temperature" in named:
        raise ValueError("temperature has a variable of its own: PAWL_DEFAULT_TEMPERATURE")
    return parse_server_defaults(named)


class ProxySettings(StoreSettings):
    """Hold the settings of `pawl proxy`, from `PAWL_*` environment variables or `.env`."""

    upstream_url: HttpUrl = Field(
        default=HttpUrl("http://127.0.0.1:8000/v1"),
        description="URL of the model server, up to and including /v1",
    )
    upstreams: Path | None = Field(
        default=None,
        description="TOML file that names several upstreams and their models; unset: upstream_url "
        "is the only one",
    )
    policies: PoliciesFile = None
    listen: Listen = Field(
        default="127.0.0.1:8100", description="address of the data port: calls and feedback"
    )
    admin_listen: Listen = Field(
        default="127.0.0.1:8101", description="address of the admin port: health and metrics"
    )
    access: Access = Field(
        default="loopback",
        description="who may call the proxy's ports, and see the console, while no API key was "
        "ever made: callers on `loopback`, only callers with a key (`keys`), or `anyone`",
    )
    spool_dir: Path = Field(
        default=Path("var/spool"), description="directory where records wait on disk"
    )
    default_temperature: float = Field(
        default=1.0,
        ge=0,
        description="temperature that the upstream samples with if a request names none",
    )
    default_sampling: Annotated[dict[str, int | float], NoDecode, BeforeValidator(_defaults)] = (
        Field(
            default={},
            description="other settings that the upstream samples with if a request does not name "
            "them, such as top_p=0.95,top_k=20",
        )
    )
    tool_parser: str | None = Field(
        default=None,
        description="the upstream's parser of tool calls, as vLLM's --tool-call-parser has it; it "
        "determines the grammar of strict tools and forced calls",
    )
    eval_tasks: str = Field(
        default=EVAL_TASKS,
        description="beginning of the names of tasks whose episodes are evaluation, and never "
        "trained on",
    )
    allow_model_delete: bool = Field(
        default=False,
        description="whether DELETE /v1/models/{id} is forwarded to the upstream",
    )
    workers: int = Field(default=1, ge=1, le=64, description="processes that take calls")
    silence_s: float = Field(
        default=600.0,
        gt=0,
        description="how long the upstream may stay silent before a call fails, in seconds",
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
        description="how long `pawl proxy` may take to end after SIGTERM, in seconds; calls under "
        "way get 60 % of it, their records the rest",
    )
    drain_delay_s: float = Field(
        default=0.0,
        ge=0,
        description="how long `pawl proxy` goes on taking calls after SIGTERM, before "
        "PAWL_STOP_GRACE_S begins, in seconds, while /readyz and the data port's /healthz answer "
        "503: as long as load balancers take to notice",
    )
    max_body_mb: int = Field(default=256, ge=1, description="largest request body, in MiB")
    max_feedback_kb: int = Field(
        default=2048, ge=1, description="largest body of /feedback, in KiB"
    )
    in_flight_mb: int = Field(
        default=192,
        ge=1,
        description="memory of one worker for requests and replies in flight, in MiB; when it is "
        "full, new requests are answered with 503. A non-streamed reply, or an event of a stream, "
        "larger than a seventh of it is passed on and not stored",
    )
    max_reply_mb: int = Field(
        default=256,
        ge=1,
        description="longest reply that is stored, in MiB; a longer one is passed on",
    )
    tool_results: Annotated[InstanceOf[ResultReaders], NoDecode, BeforeValidator(_readers)] = Field(
        default=ResultReaders(),
        description="how each tool's results are read, such as search=json_error,shell=exit_code",
    )
    redaction: Path | None = Field(
        default=None,
        description="TOML file of redaction rules, which keep secrets out of stored calls and "
        "feedback, by pattern and by field; unset: they are stored as they are",
    )
    keep_days: int | None = Field(
        default=None,
        ge=1,
        le=MOST_DAYS,
        description="how many days records are kept, such as 90: older episodes and calls are "
        "removed, trained or not; unset: records are kept",
    )
    keep_pending_days: int = Field(
        default=30,
        ge=1,
        le=MOST_DAYS,
        description="how many days feedback waits for its target to come; of each tenant the "
        "newest 100,000 such statements wait",
    )

    otel: bool = Field(
        default=False,
        description="whether each recorded call is sent as a span to an OpenTelemetry collector, "
        "which the OTEL_EXPORTER_OTLP_* variables name; needs the extra `otel`",
    )

    @property
    def sampling_defaults(self) -> dict[str, int | float]:
        """Return the upstream's default sampling settings."""
        return {"temperature": self.default_temperature, **self.default_sampling}

    @property
    def calls_end_s(self) -> float:
        """Return the seconds after SIGTERM at which calls that still run are broken off."""
        return 0.6 * self.stop_grace_s

    @property
    def workers_end_s(self) -> float:
        """Return the seconds after SIGTERM at which a worker that still runs is killed."""
        return 0.75 * self.stop_grace_s

    @property
    def ingester_ends_s(self) -> float:
        """Return the seconds that the ingester may take to end once the workers have ended."""
        return self.stop_grace_s - self.workers_end_s

    @property
    def last_drain_s(self) -> float:
        """Return the seconds that the ingester may spend draining the spool before it closes."""
        return 0.6 * self.ingester_ends_s

    @property
    def spans_end_s(self) -> float:
        """Return the seconds that the ingester may spend on sending the last spans."""
        return 0.2 * self.ingester_ends_s
