"""Collect the tables of the whole schema in one metadata."""

from typing import Final

from store.schema import base, claimable, keys, recorded, stated, trained

# Importing a module adds its tables to the metadata.
MODULES: Final = (recorded, claimable, stated, trained, keys)
metadata: Final = base.metadata
