"""The disk below the spool: who holds which folder, and segments that grow."""
