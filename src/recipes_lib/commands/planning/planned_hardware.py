"""Planned hardware: GPUs, MFU, price, power, failures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from recipes_lib.planning.compute import compute_hours
from recipes_lib.planning.devices import Device

_LABEL_WIDTH: Final = 16
CURVE: Final = "curve"
"""Row name of a line that starts in the column of names."""

Row = tuple[str, str]
"""A row: its name, empty if it is that of the row above, and its text."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """Planned hardware and its costs.

    Attributes:
        device: The GPU.
        num_gpus: Number of GPUs.
        peak: FLOP/s of one of them, for the products of the run.
        mfu: Model FLOPs utilisation, above 0 and at most 1.
        source: Origin of the MFU.
        measured: MFU measured by ``recipes prove``, without and with compilation; ``None`` for published ones.
        failures: Cost of interruptions of all GPUs together; ``None`` to omit it.
        price: Price of a GPU hour.
        pue: Power usage effectiveness: energy of the data centre over that of the GPUs.
        grid: Grams of CO2 per kWh.
    """

    device: Device
    num_gpus: int
    peak: float
    mfu: float
    source: str
    measured: Mapping[bool, float] | None
    failures: Failures | None
    price: float | None
    pue: float
    grid: float | None

    def compute_hours(self, num_flops: float) -> float:
        """Return the hours of so many FLOPs, without failures."""
        return compute_hours(num_flops, self.num_gpus, self.peak, self.mfu)

    def describe(self) -> Iterator[Row]:
        """Yield the assumed GPU, and the origin of its MFU."""
        device = self.device
        told = f"{device.name}: {device.memory / 1e9:g} GB, {self.peak / 1e12:g} TFLOP/s"
        yield "GPU", told + (f"; taken to be {device.taken}" if device.taken else "")
        yield "share of peak", f"{self.mfu:g}: {self.source}"

    def describe_bill(self, hours: float, of: str = "") -> Iterator[Row]:
        """Yield cost, energy and CO2 of so many hours, as far as known."""
        total = hours * self.num_gpus
        if self.price is not None:
            yield "cost", f"{total * self.price:,.2f}{of}, at {self.price:g} for a GPU hour"
        if self.device.watts:
            energy = total * self.device.watts / 1000 * self.pue
            told = f"at most {energy:,.1f} kWh{of}: {self.device.watts} W a board, PUE {self.pue:g}"
            yield "energy", told + (f"; {energy * self.grid / 1000:,.1f} kg of CO2" if self.grid is not None else "")


def format_rows(rows: Iterable[Row]) -> list[str]:
    """Return a line for each row: name column and text."""
    return [text if name == CURVE else f"{name:{_LABEL_WIDTH}}{text}" for name, text in rows]


@dataclass(frozen=True, slots=True)
class Failures:
    """What interruptions cost a run; all in seconds.

    Attributes:
        mean_seconds: Mean time between failures of the whole job, which any GPU of it may end.
        save_seconds: Time that training waits for a checkpoint; of one written asynchronously, only that pause.
        restart_seconds: From a failure to the first step after it, the lost work apart.
    """

    mean_seconds: float
    save_seconds: float
    restart_seconds: float

    def compute_interval(self) -> float:
        """Return the seconds of training between two checkpoints that lose the least time.

        Source: Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps", equation 37,
        Young's ``sqrt(2 * save * mean)`` with two more terms; the mean itself where saving takes twice as long as that.
        """
        ratio = self.save_seconds / (2 * self.mean_seconds)
        if ratio >= 1:
            return self.mean_seconds
        young = math.sqrt(2 * self.save_seconds * self.mean_seconds)
        return young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - self.save_seconds

    def compute_goodput(self, interval: float) -> float:
        """Return the expected share of the time that trains, in [0, 1]: no saving, restart or work done twice.

        Args:
            interval: Seconds of training between two checkpoints, above 0.

        Source: Daly 2006, equation 20, failures being exponentially distributed and restarts able to fail too; against
        a simulation in ``tests/planning/test_failures.py``.
        """
        mean = self.mean_seconds
        exponent = (interval + self.save_seconds) / mean
        # Past here the share is 0 in float64, and `expm1` would overflow.
        if exponent + self.restart_seconds / mean > 700:
            return 0.0
        return interval / (mean * math.exp(self.restart_seconds / mean) * math.expm1(exponent))
