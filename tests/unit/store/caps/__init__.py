"""Test what no API key and no task may have more of."""
