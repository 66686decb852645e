"""Measure what Pawl costs, beside nginx, LiteLLM and Agent Lightning."""
