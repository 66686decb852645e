"""Describe where policies are trained by one trainer, and how it went."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.stack import free_port


@dataclass(frozen=True, slots=True)
class Place:
    """Name where a trainer of one policy or more works."""

    folder: Path
    database_url: str
    names: tuple[str, ...]
    model: Path
    recipe: Path
    # None: the policy is the base model itself.
    policies: Path | None
    # Of each policy.
    updates: int

    @property
    def adapters(self) -> Path:
        """Return the folder of the versions of every policy."""
        return self.folder / "adapters"

    @property
    def log(self) -> Path:
        """Return the file that its trainers log to."""
        return self.folder / f"{'+'.join(self.names)}.log"

    def said(self) -> bytes:
        """Return the log as it is now."""
        return self.log.read_bytes() if self.log.exists() else b""

    def progress(self) -> float:
        """Return the share of the updates that exist as versions."""
        made = [1 for name in self.names for _ in (self.adapters / name).glob("[0-9]*")]
        return len(made) / (self.updates * len(self.names))

    def env(self, upstream_port: int) -> dict[str, str]:
        """Return the settings of its trainers; each of them listens on the same port."""
        of_policies = {} if self.policies is None else {"PAWL_POLICIES": str(self.policies)}
        if len(self.names) == 1:
            of_policies["PAWL_POLICY"] = self.names[0]
        return of_policies | {
            "DATABASE_URL": self.database_url,
            "PAWL_UPSTREAM_URL": f"http://127.0.0.1:{upstream_port}/v1",
            "PAWL_ADAPTER_DIR": str(self.adapters),
            "PAWL_RECIPE": str(self.recipe),
            "PAWL_MODEL": str(self.model),
            "PAWL_TRAINER_LISTEN": f"127.0.0.1:{free_port()}",
            "PAWL_POLL_S": "0.05",
            # Every version stays published: nothing that a kill left may be unloaded unseen.
            "PAWL_ADAPTER_SLOTS": "1000000",
        }


@dataclass(slots=True)
class Lives:
    """Count how a run went."""

    killed: Counter[str] = field(default_factory=Counter)
    # Kills after the last episode was spent: they find a trainer without work.
    idle: int = 0
    # Lives that ended with another status than they were to.
    by_themselves: list[str] = field(default_factory=list)
    # From SIGTERM to the end, of those that were asked.
    stopped_after: list[float] = field(default_factory=list)
    seconds: float = 0.0
