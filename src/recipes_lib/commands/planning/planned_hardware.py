"""Hardware of a plan: GPUs, MFU and its calibration by finished runs, price, power, failures."""

from __future__ import annotations

import dataclasses
import shutil
import statistics
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

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
from recipes_lib.quantities import format_figure, pluralize
from recipes_lib.report.run_files import RunFiles, read_curve, read_run

_LABEL_WIDTH: Final = 16
_LINE_WIDTH: Final = 100
_RECORDED: Final = {"stage": str, "config": dict, "provenance": dict, "hardware": dict}
UNLABELLED: Final = "curve"
"""Row name that marks a line without a name column."""

Row = tuple[str, str]
"""A row: its name, empty if it continues the row above, and its text."""


class Hardware(NamedTuple):
    """Hardware of a plan, and its costs.

    Attributes:
        device: The GPU.
        num_gpus: Number of GPUs.
        mfu: Model FLOPs utilisation, above 0 and at most 1.
        source: Origin of the MFU.
        measured: Measured MFU; ``None`` to use published values.
        price: Price of a GPU hour; ``None`` if unknown.
        pue: Power usage effectiveness: energy of the data centre divided by that of the GPUs.
        grid: Grams of CO2 per kWh; ``None`` if unknown.
    """

    device: Device
    num_gpus: int
    mfu: float
    source: str
    measured: Measured | None
    price: float | None
    pue: float
    grid: float | None

    def compute_hours(self, num_flops: float) -> float:
        """Return the hours that ``num_flops`` FLOPs take, without failures."""
        return compute_hours(num_flops, self.num_gpus, self.device.flops, self.mfu)

    def adapt_to(self, config: RecipeConfig) -> Hardware:
        """Return the hardware with the MFU of another configuration, such as one with activation checkpointing."""
        mfu, source = find_efficiency(config, self.measured)
        return self._replace(mfu=mfu, source=source)

    def describe_rate(self) -> str:
        """Return the factors of the model FLOPs per second."""
        return f"{pluralize(self.num_gpus, 'GPU')} x {self.device.flops:.3g} FLOP/s x {self.mfu:g} MFU"

    def describe(self) -> Iterator[Row]:
        """Yield rows about the GPU and the origin of its MFU."""
        device = self.device
        text = f"{device.name}: {device.memory / 1e9:g} GB, {device.flops / 1e12:.4g} TFLOP/s"
        yield "GPU", text + (f"; taken to be {device.assumed}" if device.assumed else "")
        yield "share of peak", f"{self.mfu:g}: {self.source}"

    def describe_bill(self, hours: float, of: str = "") -> Iterator[Row]:
        """Yield rows about cost, energy and CO2, as far as known.

        Args:
            hours: Duration.
            of: Text after each figure, such as `` for 1,000 iterations``.
        """
        total = hours * self.num_gpus
        if self.price is not None:
            yield "cost", f"{total * self.price:,.2f}{of}, at {self.price:g} for a GPU hour"
        if self.device.watts:
            energy = total * self.device.watts / 1000 * self.pue
            text = f"at most {format_figure(energy)} kWh{of}: {self.device.watts} W a board, PUE {self.pue:g}"
            carbon = "" if self.grid is None else f"; {format_figure(energy * self.grid / 1000)} kg of CO2"
            yield "energy", text + carbon


def format_rows(rows: Iterable[Row]) -> list[str]:
    """Return rows as lines: a column of names, and text wrapped to the terminal, at most ``_LINE_WIDTH`` characters.

    Flags stay on one line, so that they can be copied.
    """
    lines, width = list[str](), min(_LINE_WIDTH, shutil.get_terminal_size((_LINE_WIDTH, 0)).columns)
    for name, text in rows:
        line = text if name == UNLABELLED else f"{name:{_LABEL_WIDTH}}{text}"
        if name == UNLABELLED or text.startswith("--"):
            lines.append(line)
            continue
        hanging = " " * _LABEL_WIDTH
        lines += textwrap.wrap(line, width, subsequent_indent=hanging, break_long_words=False, break_on_hyphens=False)
    return lines


def print_rows(rows: Iterable[Row]) -> None:
    """Print formatted rows; if computing one of them raises, nothing is printed."""
    sys.stdout.write("".join([f"{line}\n" for line in format_rows(rows)]))


_PROVED: Final = {
    "eager": Kind(compiles=False, uses_adapter=False),
    "compiled": Kind(compiles=True, uses_adapter=False),
    "lora": Kind(compiles=False, uses_adapter=True),
}
"""Last part of the name of a check of ``recipes prove`` -> kind of run that it measures."""


def read_proof(folder: Path, device: Device) -> Measured:
    """Return the MFU that ``recipes prove`` has measured by kind, the highest of its sizes.

    Raises:
        ConfigError: The folder has no measured MFU of this GPU.
    """
    from recipes_lib.proving.results import read_rows

    def is_measured(machine: str) -> bool:
        # Small sizes (`--small`) show that the command works; their MFU is far from that of a training run.
        return ", full sizes," in machine and _is_named(device, machine.partition(",")[0])

    shares = dict[Kind, float]()
    for row in read_rows(folder, is_measured).values():
        kind, share = _PROVED.get(row.check.rpartition("-")[2]), row.figures.get("mfu")
        if kind and isinstance(share, float) and 0 < share <= 1:
            shares[kind] = max(share, shares.get(kind, 0.0))
    if not shares:
        found = f"{folder} has no throughput of {device.name!r}"
        raise ConfigError(Problem("--proof", found, "run `recipes prove` on that GPU"))
    return Measured(shares, "recipes prove")


def calibrate(folders: Sequence[Path], device: Device) -> Measured:
    """Return the median MFU of finished runs by kind, corrected for recomputation and quantization.

    Args:
        folders: Output directories of the runs.
        device: GPU of the plan.

    Raises:
        ConfigError: The configuration of a run is no longer valid.
        DataError: A record is damaged; a run used another GPU, is not finished or has no MFU in (0, 1]; or its MFU does
            not count a second model.
    """
    shares, problems = dict[Kind, list[float]](), list[Problem]()
    for folder in folders:
        run = read_run(folder)
        verify_fields(run.facts, _RECORDED, str(folder / "run.json"), remedy="name another run, or write --mfu")
        # Without the first tenth, which includes compilation and a cold cache.
        curve = [mfu for _, mfu in read_curve(run.train, "mfu")]
        curve = curve[max(len(curve) // 10, 1) :]
        name = str(run.facts["hardware"].get("device"))
        if not _is_named(device, name):
            found = f"trained on {name!r}, and the plan is for {device.name!r}"
            problems.append(Problem(str(folder), found, "name runs on the planned GPU"))
        elif run.facts.get("status") != "done" or run.facts["stage"] not in RECIPE_NAMES or not curve:
            found = "is not a finished run with MFU in two or more of its logged steps"
            problems.append(Problem(str(folder), found, "name one on a GPU whose peak is known"))
        else:
            config = _restore(run)
            share = statistics.median(curve) / find_overhead(config)[0]
            second = "reference model" if has_live_reference(config) else "base model"
            if config.recipe == "distill" or has_live_reference(config) or config.forgetting.kl_to_base:
                found = f"its MFU does not count the {'teacher' if config.recipe == 'distill' else second}"
                problems.append(Problem(str(folder), found, "name a run of one model"))
            elif not 0 < share <= 1:
                found = f"its MFU of {share:.3g}, without recomputation and quantization, is not in (0, 1]"
                problems.append(Problem(str(folder), found, "name another run, or write --mfu"))
            shares.setdefault(Kind.of(config), []).append(share)
    if problems:
        raise DataError(*problems)
    source = pluralize(len(folders), "finished run")
    return Measured({kind: statistics.median(each) for kind, each in shares.items()}, source)


def _is_named(device: Device, name: str) -> bool:
    """Return whether a GPU has this name, of which it has several: "H100" and "NVIDIA H100 80GB HBM3"."""
    named = find_device(name)
    return named is not None and dataclasses.replace(named, name=device.name, assumed=device.assumed) == device


def _restore(run: RunFiles) -> RecipeConfig:
    """Return the configuration of a recorded run, with the activation checkpointing that ``auto`` chose in it.

    Raises:
        ConfigError: The configuration is no longer valid.
    """
    record = {**run.facts, "provenance": {key: str(origin) for key, origin in run.facts["provenance"].items()}}
    text = yaml.safe_dump({**restore_keys(record)[0], "output_dir": str(run.path)})
    config = check_text(run.facts["stage"], text, run.path / "run.json")
    if config.read("activation_checkpointing") != AUTO:
        return config
    chosen = str(run.facts.get("activation_checkpointing")).partition(" (")[0]
    return config.with_training(list_keys(chosen if chosen in MODES else "none"))
