"""Have a candidate answer recorded calls before any user meets it, beside what serves."""
