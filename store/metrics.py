"""Define the metric that every process has, whichever it is."""

from typing import Final

from prometheus_client import Gauge

from store import __version__

BUILD: Final = Gauge(
    "pawl_build_info",
    "1, with the version of Pawl that runs.",
    ["version"],
    multiprocess_mode="livemostrecent",
)


def count_build() -> None:
    """Show this process's version in its metrics."""
    BUILD.labels(__version__).set(1)
