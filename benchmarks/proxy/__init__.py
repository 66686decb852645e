"""`python -m benchmarks.proxy`: what Pawl costs, beside nginx, LiteLLM and Agent Lightning."""
