"""Tell how each tool execution ended, by headers and by tool results (pure)."""
