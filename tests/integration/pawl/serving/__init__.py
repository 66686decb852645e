"""The serving role's processes: kept up, and small."""
