"""Counters of several processes in memory that they share, and no disk can be in the way of."""
