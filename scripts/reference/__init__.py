"""Generate the pages of `docs/reference/` from the code that they describe.

`make docs` (`python -m scripts.reference`) writes them; `tests/unit/test_reference.py` fails when a page and
the code differ. Each module returns the text of one page, as a function of the code alone.
"""
