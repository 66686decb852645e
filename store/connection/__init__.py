"""Connections to PostgreSQL, and what their errors mean."""
