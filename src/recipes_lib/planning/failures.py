"""Machine failures: optimal save interval, and the share of time left for training (goodput)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

GPU_HOURS_BETWEEN_FAILURES: Final = 54 * 24 * 16_384 / 419
"""Source: Dubey et al. 2024 (Llama 3), section 3.3.4: 419 unexpected interruptions in 54 days on 16,384 H100."""


@dataclass(frozen=True, slots=True)
class Failures:
    """Failure model of a run, in seconds.

    Attributes:
        mean_seconds: Mean time between failures of the whole job, which stops if any of its GPUs fails.
        save_seconds: Time that training waits for a checkpoint; if it is written asynchronously, only the pause.
        restart_seconds: Time from a failure to the first step after it, without recomputing lost steps.
    """

    mean_seconds: float
    save_seconds: float
    restart_seconds: float

    def compute_interval(self) -> float:
        """Return the optimal interval between checkpoints, in seconds of training.

        Source: Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps", equation 37:
        Young's ``sqrt(2 * save * mean)`` with two more terms; the mean itself if saving takes more than twice as long.
        """
        ratio = self.save_seconds / (2 * self.mean_seconds)
        if ratio >= 1:
            return self.mean_seconds
        young = math.sqrt(2 * self.save_seconds * self.mean_seconds)
        return young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - self.save_seconds

    def compute_goodput(self, interval: float) -> float:
        """Return the goodput: the expected share of time, in [0, 1], without saving, restarts and lost steps.

        Args:
            interval: Seconds of training between two checkpoints, above 0.

        Source: Daly 2006, equation 20: failures are exponentially distributed, and also happen during restarts;
        compared with a simulation in ``tests/planning/test_failures.py``.
        """
        mean = self.mean_seconds
        exponent = (interval + self.save_seconds) / mean
        # The goodput is 0 in float64, and `expm1` would overflow.
        if exponent + self.restart_seconds / mean > 700:
            return 0.0
        return interval / (mean * math.exp(self.restart_seconds / mean) * math.expm1(exponent))
