"""Measure on a toy task how much AIR helps, and whether it rewards easy tool calls too much."""
