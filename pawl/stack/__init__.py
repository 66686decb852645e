"""Run PostgreSQL, vLLM, proxy and trainer as processes of this machine."""
