"""All the variables that Pawl reads, so that one nobody reads can be refused at the start."""

import os
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Final, Literal, TypeVar

from dotenv import dotenv_values
from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from proxy.settings import ProxySettings
from store.settings import StoreSettings
from trainer.settings import TrainerSettings

PREFIX: Final = "PAWL_"
Settings = TypeVar("Settings", bound=BaseSettings)


class StackSettings(StoreSettings):
    """What `pawl up` and `pawl demo` read beside the settings of what they start."""

    model_config = SettingsConfigDict(
        env_prefix="PAWL_",
        env_file=".env",
        extra="ignore",
        frozen=True,
        env_ignore_empty=True,
    )

    model: str | None = Field(
        default=None, description="folder or name of the base model; unset: the packaged SmolLM2"
    )
    vllm_port: int = Field(default=8000, ge=1, le=65535, description="where vLLM listens")
    vllm_dtype: Literal["float32", "bfloat16", "auto"] | None = Field(
        default=None, description="unset: float32 on a CPU (exact), bfloat16 on a GPU"
    )
    max_model_len: int = Field(default=2048, ge=128, description="longest context served")
    log_dir: Path = Field(default=Path("var/logs"), description="a file a process")


class JudgeSettings(StoreSettings):
    """What `pawl judge` reads from `PAWL_*`; `pawl up` runs a judge where a command is set."""

    model_config = SettingsConfigDict(
        env_prefix="PAWL_", env_file=".env", extra="ignore", frozen=True, env_ignore_empty=True
    )

    judge_command: str | None = Field(
        default=None, description="the program that judges finished episodes, as in a shell"
    )
    judge_quiet_s: float = Field(
        default=600.0, ge=0, description="an episode is over after so long without a call"
    )
    judge_timeout_s: float = Field(default=60.0, gt=0, description="how long one judgement takes")
    judge_concurrency: int = Field(default=4, ge=1, description="judgements at once")


class UnreadSettings(Exception):
    """A setting that nothing reads, or one with a value that cannot be used."""


def known_variables() -> set[str]:
    """Every `PAWL_*` name that some process reads."""
    names: set[str] = set()
    for settings in (ProxySettings, TrainerSettings, StackSettings, JudgeSettings):
        names |= {PREFIX + name.upper() for name in settings.model_fields if name != "database_url"}
    return names


def refuse_unread(environment: Mapping[str, str] | None = None) -> None:
    """Stop at a mistyped variable, in the environment or in `.env`.

    Raises:
        UnreadSettings: it names the variable and the one that was probably meant.
    """
    given = dict(os.environ if environment is None else environment)
    given |= {name: value or "" for name, value in dotenv_values(".env").items()}
    known = known_variables()
    for name in sorted(given):
        if name.startswith(PREFIX) and name not in known:
            near = get_close_matches(name, sorted(known), n=1)
            hint = f"did you mean {near[0]}?" if near else "see `pawl --help` for those there are."
            raise UnreadSettings(f"{name} is set, but nothing reads it: {hint}")


def read_settings(kind: type[Settings]) -> Settings:
    """The settings of one process, from the environment and `.env`.

    Raises:
        UnreadSettings: a variable is unknown, or its value cannot be used.
    """
    refuse_unread()
    try:
        return kind()
    except ValidationError as error:
        problems = "; ".join(
            f"{_variable(str(detail['loc'][0]))}: {detail['msg']}" for detail in error.errors()
        )
        raise UnreadSettings(problems) from error


def _variable(field: str) -> str:
    return field if field == "DATABASE_URL" else PREFIX + field.upper()
