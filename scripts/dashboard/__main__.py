"""Write the dashboard: `make docs`, or `python -m scripts.dashboard`."""

from .model import FILE, dashboard_text
from .panels import ROWS


def main() -> None:
    """Write the dashboard's file if it has changed, and print its name."""
    text = dashboard_text(ROWS)
    if not FILE.exists() or FILE.read_text() != text:
        FILE.write_text(text)
        print(f"written: dashboards/grafana/dashboards/{FILE.name}")


if __name__ == "__main__":
    main()
