"""Tool executions: how each tool ended, by headers and by tool results (pure)."""
