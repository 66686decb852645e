"""The local stack: PostgreSQL, vLLM, proxy and trainer as processes of this machine."""
