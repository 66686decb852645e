"""Speak Anthropic's Messages API, through chat completions or passed on as it is."""
