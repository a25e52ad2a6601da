"""What the operating system allows a process."""

import resource


def raise_descriptor_limit() -> None:
    """Takes as many file descriptors as the system lets us have; 1,024 is what most give at first.

    A request in flight takes two, an idle connection of a caller or to a receiver one.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
