"""LoRA for vLLM's CPU build: `patch` replaces vLLM's operations by those of `ops`."""
