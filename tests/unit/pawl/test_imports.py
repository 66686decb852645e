"""What is imported in a block is not looked through for garbage, then or later."""

import gc

import pytest

from pawl.imports import large_imports


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
