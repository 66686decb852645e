"""The serving role's processes: kept up, small, and the same when compiled."""
