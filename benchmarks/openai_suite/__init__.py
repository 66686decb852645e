"""Run openai-python's own test-suite, direct and through `pawl proxy`."""
