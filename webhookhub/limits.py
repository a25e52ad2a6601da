"""What a process that lives long and makes many objects settles at its start."""

import gc
import resource


def raise_descriptor_limit() -> None:
    """Takes as many file descriptors as the system lets us have; 1,024 is what most give at first.

    A request in flight takes two, an idle connection of a caller or to a receiver one.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def relieve_collector() -> None:
    """Lets Python's collector look at few objects, and seldom: hot paths make many and no cycles."""
    gc.unfreeze()  # what is left of work before in this process would stay for ever
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
