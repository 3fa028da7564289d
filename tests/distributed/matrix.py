"""Every recipe in every layout that runs on CPUs, compared with one process: the table of ``docs/results.md``.

A cell is the largest difference of a loss, a gradient norm, an evaluation metric or a weight over three steps. The last
rows are deliberately broken runs, whose differences must be large.

python -m tests.distributed.matrix FOLDER [--cells NAME ...] [--layouts NAME ...]
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.distributed import sharding
from tests.distributed.cells import (
    CELLS,
    FULL_PRECISION,
    FURTHER_CELLS,
    build_jobs,
    measure_gaps,
    measure_weight_gap,
    resume,
    write_inputs,
)
from tests.forked import ROOT, find_free_port

from recipes_lib.config.loader import load_config
from recipes_lib.errors import EXIT_DONE, ConfigError
from recipes_lib.training.layouts.compatibility import verify_combination
from recipes_lib.training.layouts.launch_environment import Launch, name_variables, read_launch, read_launch_file


class Layout(NamedTuple):
    """Layout of a launch.

    Attributes:
        file: Name of the launch file.
        num_processes: World size over all machines.
        data_size: Number of data-parallel ranks.
        sizes: Sizes in ``parallelism_config`` that differ from those of the file.
        num_machines: Number of machines, each with its own launcher.
    """

    file: str
    num_processes: int
    data_size: int
    sizes: Mapping[str, int] = {}
    num_machines: int = 1

    def read(self) -> Launch:
        """Return the launch as the main process reads it, in full precision."""
        document = read_launch_file(ROOT / "accelerate_configs" / f"{self.file}.yaml")
        document |= {"mixed_precision": "no"}
        document["parallelism_config"] = (document.get("parallelism_config") or {}) | self._name_sizes()
        return read_launch(name_variables(document, self.num_processes))

    def run(
        self, jobs: Mapping[str, sharding.Job], output_dir: Path, variables: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Run recipes in this layout, in full precision, in forked processes with the environment of the launcher."""
        options, size = self._list_options(), self.num_processes
        return sharding.run_jobs(jobs, output_dir, self.file, *options, num_processes=size, variables=variables)

    def launch_jobs(self, jobs: Mapping[str, sharding.Job], output_dir: Path) -> dict[str, Any]:
        """Run recipes like ``run``, but with ``accelerate launch``, once per machine."""
        return sharding.read_end(output_dir, self.launch(*sharding.prepare_jobs(jobs, output_dir)))

    def launch(self, module: str, *arguments: str) -> str:
        """Run a module with ``accelerate launch``, assert that all processes succeed, and return their output."""
        command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
        command += ["--config_file", str(ROOT / "accelerate_configs" / f"{self.file}.yaml")]
        command += ["--num_processes", str(self.num_processes), "--num_machines", str(self.num_machines)]
        # All machines must know the port in advance.
        command += ["--main_process_ip", "127.0.0.1"] if self.num_machines > 1 else []
        command += ["--main_process_port", str(find_free_port() if self.num_machines > 1 else 0)]
        command += self._list_options()
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": ROOT}
        machines = [
            subprocess.Popen([*command, "--machine_rank", str(rank), "-m", module, *arguments], **pipes)
            for rank in range(self.num_machines)
        ]
        try:
            with ThreadPoolExecutor(self.num_machines) as pool:
                outputs = list(pool.map(lambda machine: machine.communicate(timeout=900)[0], machines))
        finally:
            for machine in machines:
                # A launcher that still runs ends its processes.
                machine.terminate()
        assert not any(machine.returncode for machine in machines), "\n".join(output[-8000:] for output in outputs)
        return "".join(outputs)

    def _list_options(self) -> list[str]:
        return [*FULL_PRECISION, *(f"--{name}={size}" for name, size in self._name_sizes().items())]

    def _name_sizes(self) -> dict[str, int]:
        return {f"parallelism_config_{name}_size": size for name, size in self.sizes.items()}


def share(file: str, kind: str, data_size: int, num_machines: int = 1) -> Layout:
    """Return the layout of ``data_size`` groups of two ranks with ``kind`` parallelism: ``tp``, ``cp`` or ``sp``."""
    return Layout(file, 2 * data_size, data_size, {"dp_shard": data_size, kind: 2}, num_machines)


LAYOUTS: Final[Mapping[str, Layout]] = {
    "DDP, 2": Layout("cpu_ddp", 2, 2),
    "FSDP2, 2": Layout("fsdp2", 2, 2),
    "TP, 2": share("fsdp2_tp", "tp", 1),
    "CP, 2": share("fsdp2_cp", "cp", 1),
    "FSDP2, 4": Layout("fsdp2", 4, 4),
    "FSDP2 x TP, 2 x 2": share("fsdp2_tp", "tp", 2, num_machines=2),
    "FSDP2 x CP, 2 x 2": share("fsdp2_cp", "cp", 2),
    "HSDP, 2 x 2": Layout("hsdp", 4, 4, {"dp_shard": 2}, num_machines=2),
    "FSDP2 offload, 2": Layout("fsdp2_offload", 2, 2),
    **{f"ZeRO-{level}, 2": Layout(f"zero{level}", 2, 2) for level in (1, 2, 3)},
    "ZeRO-3 offload, 2": Layout("zero3_offload", 2, 2),
    "ZeRO-3 x SP, 2 x 2": share("zero3_sp", "sp", 2, num_machines=2),
}
ALL_CELLS: Final = CELLS | FURTHER_CELLS
RESUMED: Final = "resumed from the layout before"
"""Row of the first cell resumed from its checkpoint in the previous layout (difference of the weights)."""
CONTROLS: Final = ("mean of means", "forgotten sync", "shifted shard")
"""Faults of ``sharding.inject``, each in the first cell under DDP."""


def is_of_deepspeed(layout: str) -> bool:
    """Return whether DeepSpeed shards the model; other engines cannot read its checkpoints."""
    return LAYOUTS[layout].file.startswith("zero")


def find_reason(cell: str, layout: str) -> str | None:
    """Return why a cell is incompatible with a layout; ``None`` if it runs."""
    job = build_jobs(Path("inputs"), {cell: ALL_CELLS[cell]}, 1)[cell]
    # Nothing is loaded: paths are replaced by a Hub id.
    keys = {name: "owner/name" if isinstance(value, Path) else value for name, value in job["keys"].items()}
    config = load_config(job["stage"], [f"--{name}={value}" for name, value in keys.items()] + ["--output_dir=out"])
    try:
        verify_combination(config, LAYOUTS[layout].read())
    except ConfigError as error:
        return error.problems[0].found.rpartition(": ")[2]
    return None


def list_cells(layout: str) -> dict[str, Any]:
    """Return the cells that run in a layout."""
    return {name: cell for name, cell in ALL_CELLS.items() if find_reason(name, layout) is None}


def measure(folder: Path, cells: Sequence[str], layouts: Sequence[str] = ()) -> dict[str, dict[str, float]]:
    """Return the largest difference from one process: cell or fault -> layout -> difference.

    It is infinite if a check or a guard has stopped the run.

    Args:
        folder: Output folder, created if missing.
        cells: Keys of ``ALL_CELLS``. The first must run in every layout: it is resumed across layouts, with faults.
        layouts: Keys of ``LAYOUTS``; empty for all.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_inputs(folder)
    chosen, first = {name: ALL_CELLS[name] for name in cells}, cells[0]
    alone = folder / "one process"
    sharding.run_jobs(build_jobs(folder, chosen, 1), alone)
    table: dict[str, dict[str, float]] = {name: {} for name in (*cells, RESUMED, *CONTROLS)}
    before: Path | None = None
    for layout, how in LAYOUTS.items():
        if layouts and layout not in layouts:
            continue
        here = {name: cell for name, cell in list_cells(layout).items() if name in chosen}
        jobs = build_jobs(folder, here, how.data_size)
        if layout == next(iter(LAYOUTS)):  # Faults are injected under DDP.
            jobs |= {fault: {**jobs[first], "fault": fault} for fault in CONTROLS}
        elif before is not None and not is_of_deepspeed(layout):
            jobs[RESUMED] = resume(jobs[first], before / first)
        ended = how.launch_jobs(jobs, folder / layout)
        for name in jobs:
            one, several = alone / (name if name in cells else first), folder / layout / name
            if ended["codes"][name] != EXIT_DONE:
                table[name][layout] = math.inf
            elif name == RESUMED:
                table[name][layout] = measure_weight_gap(one, several)
            else:
                table[name][layout] = max(measure_gaps(one, several).values())
        before = folder / layout
    return table


def format_table(table: Mapping[str, Mapping[str, float]]) -> str:
    """Return the table in Markdown, followed by the reasons of incompatible cells."""
    letters: dict[str, str] = {}
    lines = [f"| run | {' | '.join(LAYOUTS)} |", f"|---|{'---|' * len(LAYOUTS)}"]
    for name, gaps in table.items():
        cells = []
        for layout in LAYOUTS:
            reason = find_reason(name, layout) if name in ALL_CELLS else None
            # A cell that is compatible but was not measured is empty.
            letter = letters.setdefault(reason, "abcdefghijklmnop"[len(letters)]) if reason else ""
            cells.append(_format(gaps[layout]) if layout in gaps else letter)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"- {letter}: {reason}" for reason, letter in letters.items())])


def _format(gap: float) -> str:
    return "stopped by a check" if gap == math.inf else f"{gap:.0e}"


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cells", nargs="+", choices=ALL_CELLS, default=list(ALL_CELLS))
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=[])
    options = parser.parse_args()
    sys.stdout.write(format_table(measure(options.folder, options.cells, options.layouts)) + "\n")


if __name__ == "__main__":
    main()
