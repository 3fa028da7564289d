"""Planned hardware: GPUs, MFU, price, power, failures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from recipes_lib.planning.compute import compute_hours
from recipes_lib.planning.devices import Device
from recipes_lib.planning.failures import Failures

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
