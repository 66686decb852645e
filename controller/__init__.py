"""Keep each replica's adapters loaded, and judge versions that a gate decides about."""
