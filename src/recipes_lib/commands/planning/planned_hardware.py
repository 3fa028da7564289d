"""Planned hardware: GPUs, MFU, its calibration by finished runs, price, power, failures."""

from __future__ import annotations

import dataclasses
import shutil
import statistics
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml

from recipes_lib.commands.reproduce import restore_keys
from recipes_lib.config.loader import check_text
from recipes_lib.config.schema import RecipeConfig
from recipes_lib.config.table import RECIPE_NAMES
from recipes_lib.errors import ConfigError, DataError, Problem
from recipes_lib.files import verify_fields
from recipes_lib.planning.activations import AUTO, MODES, list_keys
from recipes_lib.planning.compute import compute_hours, has_live_reference
from recipes_lib.planning.devices import Device, Kind, Measured, find_device, find_efficiency, find_overhead
from recipes_lib.planning.failures import Failures
from recipes_lib.proving.results import PASSED, read_rows
from recipes_lib.report.run_files import RunFiles, read_curve, read_run

_LABEL_WIDTH: Final = 16
_LINE_WIDTH: Final = 100
_RECORDED: Final = {"stage": str, "config": dict, "provenance": dict, "hardware": dict}
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
        measured: Measured MFU; ``None`` for published ones.
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
    measured: Measured | None
    failures: Failures | None
    price: float | None
    pue: float
    grid: float | None

    def compute_hours(self, num_flops: float) -> float:
        """Return the hours of so many FLOPs, without failures."""
        return compute_hours(num_flops, self.num_gpus, self.peak, self.mfu)

    def suit(self, config: RecipeConfig) -> Hardware:
        """Return the hardware with the MFU of another run, such as one with the checkpointing that was chosen."""
        mfu, source = find_efficiency(config, self.measured)
        return dataclasses.replace(self, mfu=mfu, source=source)

    def describe(self) -> Iterator[Row]:
        """Yield the assumed GPU, and the origin of its MFU."""
        device = self.device
        told = f"{device.name}: {device.memory / 1e9:g} GB, {self.peak / 1e12:.4g} TFLOP/s"
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
    """Return the lines of each row: name column and text, wrapped; flags stay on one line, to be copied.

    A terminal narrower than ``_LINE_WIDTH`` has its own width.
    """
    lines, width = list[str](), min(_LINE_WIDTH, shutil.get_terminal_size((_LINE_WIDTH, 0)).columns)
    for name, text in rows:
        line = text if name == CURVE else f"{name:{_LABEL_WIDTH}}{text}"
        if name == CURVE or text.startswith("--"):
            lines.append(line)
            continue
        hanging = " " * _LABEL_WIDTH
        lines += textwrap.wrap(line, width, subsequent_indent=hanging, break_long_words=False, break_on_hyphens=False)
    return lines


def print_rows(rows: Iterable[Row]) -> None:
    """Print rows, formatted; nothing of them if one cannot be had."""
    sys.stdout.write("".join([f"{line}\n" for line in format_rows(rows)]))


def read_proof(folder: Path) -> Measured:
    """Return the MFU that ``recipes prove`` measured.

    Raises:
        ConfigError: It has measured none there.
    """
    rows = [row for row in read_rows(folder).values() if row.status == PASSED]
    figures = [row.figures for row in rows if row.figures.get("compiled_mfu")]
    if not figures:
        raise ConfigError(Problem("--proof", f"{folder} has no throughput of a GPU", "run `recipes prove` there"))
    names = {Kind(compiles, uses_adapter=False): name for name, compiles in (("eager", False), ("compiled", True))}
    return Measured({kind: float(figures[-1][f"{name}_mfu"]) for kind, name in names.items()}, "recipes prove")


def calibrate(folders: Sequence[Path], device: Device) -> Measured:
    """Return the median MFU of finished runs by class, without what recomputation and quantization cost each.

    Args:
        folders: Output directories.
        device: The planned GPU.

    Raises:
        ConfigError: The configuration of a run is not accepted any more.
        DataError: A record is damaged; a run had another GPU or is not finished; or its MFU is not known, or counts one
            model of several.
    """
    shares, problems = dict[Kind, list[float]](), list[Problem]()
    for folder in folders:
        run = read_run(folder)
        verify_fields(run.facts, _RECORDED, str(folder / "run.json"))
        # The first of the logged windows include compilation and an empty cache.
        curve = [mfu for _, mfu in read_curve(run.train, "mfu")]
        curve = curve[max(len(curve) // 10, 1) :]
        used = str(run.facts["hardware"].get("device"))
        if (found := find_device(used)) is None or _identify(found) != _identify(device):
            told = f"trained on {used!r}, and the plan is for {device.name!r}"
            problems.append(Problem(str(folder), told, "name runs on the planned GPU"))
        elif run.facts.get("status") != "done" or run.facts["stage"] not in RECIPE_NAMES or not curve:
            told = "is not a finished run with MFU in two or more of its logged steps"
            problems.append(Problem(str(folder), told, "name one on a GPU whose peak is known"))
        else:
            config = _restore(run)
            if config.recipe == "distill" or has_live_reference(config):
                told = f"its MFU leaves out the {'teacher' if config.recipe == 'distill' else 'reference model'}"
                problems.append(Problem(str(folder), told, "name a run of one model"))
            shares.setdefault(Kind.of(config), []).append(statistics.median(curve) / find_overhead(config)[0])
    if problems:
        raise DataError(*problems)
    told = f"{len(folders)} finished run{'s' * (len(folders) > 1)}"
    return Measured({kind: statistics.median(each) for kind, each in shares.items()}, told)


def _identify(device: Device) -> tuple[float, float, float]:
    return device.flops, device.memory, device.bandwidth


def _restore(run: RunFiles) -> RecipeConfig:
    """Return the configuration of a recorded run with the activation checkpointing that ``auto`` chose there.

    Raises:
        ConfigError: It is not accepted any more.
    """
    record = {**run.facts, "provenance": {key: str(origin) for key, origin in run.facts["provenance"].items()}}
    text = yaml.safe_dump({**restore_keys(record)[0], "output_dir": str(run.path)})
    config = check_text(run.facts["stage"], text, run.path / "run.json")
    if config.read("activation_checkpointing") != AUTO:
        return config
    chosen = str(run.facts.get("activation_checkpointing")).partition(" (")[0]
    keys = list_keys(chosen if chosen in MODES else "none")
    return config.with_training(keys)
