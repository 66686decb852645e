"""List the reference pages by file name."""

from pathlib import Path
from typing import Final

from .cli import cli_page
from .database import database_page
from .http.openapi import openapi_text
from .http.page import http_page
from .metrics import metrics_page
from .modules import modules_page
from .recipe import recipe_page
from .settings import settings_page

FOLDER: Final = Path(__file__).parents[2] / "docs" / "reference"
COMMAND: Final = "make docs"


def pages() -> dict[str, str]:
    """Return the text of each page, by its file name in `docs/reference/`."""
    return {
        "cli.md": cli_page(),
        "database.md": database_page(),
        "http.md": http_page(),
        "metrics.md": metrics_page(),
        "modules.md": modules_page(),
        "openapi.json": openapi_text(),
        "recipe.md": recipe_page(),
        "settings.md": settings_page(),
    }
