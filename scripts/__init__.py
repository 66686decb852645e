"""Scripts for contributors: installation, and the reference pages (`scripts.reference`)."""
