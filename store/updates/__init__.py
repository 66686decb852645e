"""Select, claim, expire and set aside the episodes of updates, and keep policy versions."""
