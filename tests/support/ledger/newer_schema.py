"""The migrations of a newer version, which expand the schema."""

import shutil
from pathlib import Path
from typing import Final

from tests.conftest import ROOT

REVISION: Final = "0002_serves_0001"
# In every table a column that this version's queries do not know, and an index.
_EXPANDS: Final = f"""
import sqlalchemy as sa
from alembic import op

from store.schema.tables import metadata

revision, down_revision = "{REVISION}", "0001"


def upgrade() -> None:
    for name in metadata.tables:
        op.add_column(name, sa.Column("of_0002", sa.Text()))
        op.create_index(f"ix_{{name}}_of_0002", name, ["of_0002"])


def downgrade() -> None:
    for name in metadata.tables:
        op.drop_column(name, "of_0002")
"""


def newer_migrations(folder: Path) -> Path:
    """Write a package `migrations` into the folder that knows one revision more; return it."""
    package = folder / "migrations"
    shutil.copytree(ROOT / "migrations", package)
    (package / "versions" / "0002_expand.py").write_text(_EXPANDS)
    return package
