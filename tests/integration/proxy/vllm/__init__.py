"""What is recorded of a request, beside what the installed vLLM makes of it."""
