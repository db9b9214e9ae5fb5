"""A clock that work moves."""


class Watch:
    """A clock that work moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now
