"""The episodes of updates: selection, claims, expiry and damage; and policy versions."""
