"""The keeper: reads what workers wrote down, stores it, watches who serves, and counts."""
