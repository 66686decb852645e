"""Write records to disk before their replies end, in segments that stay readable if damaged."""
