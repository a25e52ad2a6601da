"""JSON pointers (RFC 6901). Pure."""


def escaped(name: str) -> str:
    """A member's name as a part of a pointer."""
    return name.replace("~", "~0").replace("/", "~1")
