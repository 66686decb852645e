"""Measure what AIR is worth on a toy task, and what easy tool calls gain by it."""
