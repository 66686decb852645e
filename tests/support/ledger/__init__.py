"""Fill, share, search and empty the ledger's tables."""
