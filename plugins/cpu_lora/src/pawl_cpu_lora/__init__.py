"""Compute LoRA in vLLM's CPU build: `ops` computes, `patch` puts it in vLLM's place."""
