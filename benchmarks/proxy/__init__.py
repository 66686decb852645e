"""Measure `pawl proxy` beside its peers, or beside another checkout of itself."""
