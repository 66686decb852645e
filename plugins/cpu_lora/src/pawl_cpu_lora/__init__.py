"""LoRA for vLLM's CPU build: `ops` has the operations, `patch` replaces vLLM's by them."""
