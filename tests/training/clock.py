"""A clock of the test's own."""


class Clock:
    """Gives the seconds that it is set to."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
