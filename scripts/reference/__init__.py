"""Generate the pages of `docs/reference/` from the code that they describe.

`make docs` (`python -m scripts.reference`) writes them, and `tests/unit/docs/test_reference.py`
fails when a page and the code differ. One module per page returns its text, as a function of the
code alone. Imports are relative, because `scripts` is a folder of programs and not a package.
"""
