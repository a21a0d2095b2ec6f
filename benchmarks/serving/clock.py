"""The clock of a run: real time, or real time without the stretches in which nothing runs."""

import time


class RunClock:
    """Seconds since it was made. Give it to the engine as well, so that both agree on what has passed."""

    def __init__(self, *, skip_idle: bool = False) -> None:
        """Args:
        skip_idle: jump over time that is to pass, in place of sleeping. Time in which something runs is
            never skipped, so what is measured stays real.
        """
        self._skip_idle = skip_idle
        self._origin_s = time.perf_counter()
        self.skipped_s = 0.0
        """Time that was jumped over."""

    def __call__(self) -> float:
        """The time."""
        return time.perf_counter() - self._origin_s + self.skipped_s

    def pass_until(self, time_s: float) -> None:
        """Let the time come; nothing may be running."""
        left_s = time_s - self()
        if left_s <= 0:
            return
        if self._skip_idle:
            self.skipped_s += left_s
        else:
            time.sleep(left_s)
