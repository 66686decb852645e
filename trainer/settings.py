"""Define the trainer's settings: one frozen object, read once at start-up."""

import re
from pathlib import Path
from typing import Annotated, Final

from pydantic import AfterValidator, BeforeValidator, Field, HttpUrl, SecretStr
from pydantic_settings import NoDecode

from store.settings import Listen, Names, PoliciesFile, Settings, StoreSettings, split_commas

# Adapter slots of a server that reports none: those that `pawl up` and Compose give their vLLM.
USUAL_SLOTS: Final = 8


def _to_numbers(value: object) -> object:
    """Return the numbers of a list such as "0,2-4"; parts that are no numbers stay text."""
    cards: list[object] = []
    for part in value.split(",") if isinstance(value, str) else ():
        ends = re.fullmatch(r"\s*(\d{1,4})-(\d{1,4})\s*", part)
        numbers = range(int(ends[1]), int(ends[2]) + 1) if ends else ()
        cards += numbers or [part.strip()]
    return cards or value


Urls = Annotated[tuple[HttpUrl, ...], NoDecode, BeforeValidator(split_commas)]
Cards = Annotated[tuple[Annotated[int, Field(ge=0)], ...], NoDecode, BeforeValidator(_to_numbers)]


def _check_url(value: str) -> str:
    if not re.match(r"[a-z][a-z0-9+.-]*://.", value):
        raise ValueError(
            "it is no URL: write http://HOST:PORT/adapters, with the address of the trainer's"
            " PAWL_TRAINER_LISTEN, or a folder of an object store, such as s3://BUCKET/FOLDER"
        )
    return value.rstrip("/")


class SourceSettings(Settings):
    """Settings: the folder of versions' files, and the source for processes on other machines."""

    adapter_dir: Path = Field(
        default=Path("var/adapters"),
        description="folder of policy versions, which controller and model servers see under one "
        "path; with PAWL_ADAPTER_SOURCE each process has one of its own",
    )
    adapter_source: Annotated[str, AfterValidator(_check_url)] | None = Field(
        default=None,
        description="URL from which processes that cannot see the trainer's folder fetch versions: "
        "http://TRAINER:8102/adapters, which the trainer then serves, or a folder of an "
        "object store (s3://, gs:// and so on), to which it uploads",
    )
    adapter_disk_gb: float = Field(
        default=20.0,
        gt=0,
        description="most disk space for fetched versions, in GB; the least recently used are "
        "removed, except those that the model server has loaded",
    )


class ServerSettings(StoreSettings, SourceSettings):
    """Settings: the model server's replicas, into which trainer and controller load adapters."""

    upstream_url: HttpUrl = Field(
        default=HttpUrl("http://127.0.0.1:8000/v1"),
        description="base URL of the model server, with its /v1",
    )
    replica_urls: Urls = Field(
        default=(),
        description="base URLs of its other replicas, comma-separated; each loads every adapter",
    )

    adapter_slots: int | None = Field(
        default=None,
        ge=1,
        description="adapters that the model server computes with at once, of all policies (vLLM's "
        "--max-loras, with which Pawl starts its own); while as many have traffic or episodes "
        "under way, no update begins; unset: as the server's /metrics says, else 8",
    )

    @property
    def server_urls(self) -> list[str]:
        """Return the base URLs of all replicas of the model server."""
        return [str(url) for url in (self.upstream_url, *self.replica_urls)]


class TrainerSettings(ServerSettings):
    """Hold the settings that `pawl trainer` reads from `PAWL_*`."""

    recipe: str = Field(
        default="default", description="path of a TOML file, or the name of a packaged recipe"
    )
    policies: PoliciesFile = None
    policy: str | None = Field(
        default=None,
        description="name of the policy to train, or several of PAWL_POLICIES, comma-separated; "
        "unset: all trained policies of that file, or without it the model server's base model",
    )
    model: str | None = Field(
        default=None,
        description="folder or name of the base model; unset: as the model server reports it",
    )
    trainer_listen: Listen = Field(
        default="127.0.0.1:8102",
        description="address of the trainer's /metrics, and of /adapters where PAWL_ADAPTER_SOURCE "
        "is http://",
    )
    poll_s: float = Field(
        default=1.0, gt=0, description="pause between checks of the store, in seconds"
    )
    teacher_api_key: SecretStr | None = Field(
        default=None, description="key for the teacher of the learner distill, if its server asks"
    )
    trackers: Names = Field(
        default=(),
        description="experiment trackers to show updates and evaluations in, comma-separated: "
        "tensorboard, trackio, wandb, mlflow, or another of accelerate's; none by default",
    )
    seed: int = Field(default=0, ge=0, description="random seed of the first adapter's weights")
    train_gpus: Cards = Field(
        default=(),
        description="GPUs to train on, such as 1-3 or 0,2-3, as nvidia-smi numbers them; with "
        "several, `accelerate launch` starts a process for each; unset: the first that CUDA shows",
    )

    @property
    def scratch(self) -> Path:
        """Return the folder for TRL's temporary files."""
        return self.adapter_dir / ".scratch"

    @property
    def tracking_dir(self) -> Path:
        """Return the folder into which experiment trackers write their files."""
        return self.data_dir / "tracking"
