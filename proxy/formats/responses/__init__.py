"""Speak OpenAI's Responses API."""
