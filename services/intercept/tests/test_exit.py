"""What the end of a run leaves to the operating system."""

import weakref

import torch
from wooly.python_private import skip_at_exit
from wooly.torch_private import remove_kernels


class Thing:
    """Something with a finalizer."""


def test_skip_at_exit_skips_the_finalizers_of_one_function():
    done, things = [], [Thing(), Thing()]

    def remove():
        done.append("removed")

    skipped, kept = weakref.finalize(things[0], remove), weakref.finalize(things[1], done.append, "other")
    skip_at_exit(remove)
    assert (skipped.atexit, kept.atexit) == (False, True)
    things.clear()
    assert sorted(done) == ["other", "removed"]  # the finalizers still do their work when their objects end


def test_kernels_of_a_library_are_removed_by_the_finalizer_that_a_run_skips():
    library = torch.library.Library("wooly_test_exit", "FRAGMENT")
    finalizers = [f for f in list(weakref.finalize._registry) if (alive := f.peek()) and alive[0] is library]
    assert [f.peek()[1] for f in finalizers] == [remove_kernels]
