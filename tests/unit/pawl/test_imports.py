"""What is imported in a block is not looked through for garbage, then or later."""

import gc
import subprocess

import pytest

from pawl.processes import large_imports, run_code


def test_the_collector_rests_in_the_block_and_leaves_out_what_it_made() -> None:
    before = gc.get_freeze_count()
    with large_imports():
        assert not gc.isenabled()
        made = [object(), []]
    assert gc.isenabled()
    assert gc.get_freeze_count() > before
    assert not any(one is made for one in gc.get_objects())


def test_it_works_again_after_an_import_that_failed() -> None:
    with pytest.raises(ModuleNotFoundError), large_imports():
        import nothing_of_this_name  # noqa: F401
    assert gc.isenabled()


AT_EXIT = """
import atexit, gc
from pawl.processes import large_imports
atexit.register(lambda: print(gc.get_freeze_count()))
with large_imports():
    pass
"""


def test_nothing_is_left_out_when_the_process_ends() -> None:
    """Bindings such as triton's report what is never collected as leaked, on standard error."""
    done = subprocess.run(run_code(AT_EXIT), capture_output=True, text=True, check=True)
    assert done.stdout == "0\n"
