"""Say whether a bad adapter is kept from users, and a good one let through: real trials."""
