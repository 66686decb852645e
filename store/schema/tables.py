"""The whole schema: the metadata with the tables of all modules that define some."""

from typing import Final

from store.schema import base, recorded, stated, trained

# Importing a module adds its tables to the metadata.
MODULES: Final = (recorded, stated, trained)
metadata: Final = base.metadata
