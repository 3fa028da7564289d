"""Every stage under every launch file that a CPU can stand in for, against one process: ``docs/results.md``'s table.

A cell is the largest difference of a loss, a gradient norm, a held-out figure or a weight over three steps. Below stand
runs that are broken on purpose, which must be far away.

python -m tests.distributed.matrix FOLDER [--cells NAME ...]
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tests.distributed import sharding
from tests.distributed.cells import (
    CELLS,
    FULL_PRECISION,
    SLOW_CELLS,
    build_jobs,
    measure_gaps,
    measure_weight_gap,
    write_inputs,
)

from recipes_lib.errors import EXIT_DONE


class Layout(NamedTuple):
    """How processes share a run.

    Attributes:
        file: Launch file.
        num_processes: Over all machines.
        options: Of the launcher, behind the file.
        data_size: Those of them, or groups that share tensors or rows, that take rows of their own.
        num_machines: Each with a launcher of its own.
    """

    file: str
    num_processes: int
    options: Sequence[str]
    data_size: int
    num_machines: int = 1


def cut_tensors(data_size: int, num_parts: int) -> Layout:
    """The layout of ``data_size`` groups that cut each tensor into ``num_parts``."""
    sizes = (f"--parallelism_config_dp_shard_size={data_size}", f"--parallelism_config_tp_size={num_parts}")
    return Layout("fsdp2_tp", data_size * num_parts, (*FULL_PRECISION, *sizes), data_size, num_machines=data_size)


def share_rows(data_size: int, num_parts: int) -> Layout:
    """The layout of ``data_size`` groups whose processes share each row, its tokens cut into ``num_parts``."""
    sizes = (f"--parallelism_config_dp_shard_size={data_size}", f"--parallelism_config_cp_size={num_parts}")
    return Layout("fsdp2_cp", data_size * num_parts, (*FULL_PRECISION, *sizes), data_size)


def share_rows_by_heads(data_size: int, num_parts: int) -> Layout:
    """As ``share_rows``, the processes of a group attending with some of the heads each, sharded by DeepSpeed."""
    sizes = (f"--parallelism_config_dp_shard_size={data_size}", f"--parallelism_config_sp_size={num_parts}")
    return Layout("zero3_sp", data_size * num_parts, (*FULL_PRECISION, *sizes), data_size, num_machines=data_size)


LAYOUTS: Final[Mapping[str, Layout]] = {
    "DDP, 2": Layout("cpu_ddp", 2, (), 2),
    "FSDP2, 2": Layout("fsdp2", 2, FULL_PRECISION, 2),
    "TP, 2": cut_tensors(1, 2),
    "CP, 2": share_rows(1, 2),
    "FSDP2, 4": Layout("fsdp2", 4, FULL_PRECISION, 4),
    "FSDP2 x TP, 2 x 2": cut_tensors(2, 2),
    "FSDP2 x CP, 2 x 2": share_rows(2, 2),
    "HSDP, 2 x 2": Layout("hsdp", 4, (*FULL_PRECISION, "--parallelism_config_dp_shard_size=2"), 4, num_machines=2),
    **{f"ZeRO-{stage}, 2": Layout(f"zero{stage}", 2, FULL_PRECISION, 2) for stage in (1, 2, 3)},
    "ZeRO-3 x SP, 2 x 2": share_rows_by_heads(2, 2),
}
ALL_CELLS: Final = CELLS | SLOW_CELLS
RESUMED: Final = "gone on from the layout before"
"""The row of weights at the end of the first cell, from its checkpoint in the layout to the left."""
CONTROLS: Final = ("mean of means", "forgotten sync", "shifted shard")
"""Faults of ``sharding.break_something``, each in the first cell under DDP."""


def is_of_deepspeed(layout: str) -> bool:
    """Whether DeepSpeed shards it; its checkpoints no other engine reads."""
    return LAYOUTS[layout].file.startswith("zero")


def runs_in(cell: str, layout: str) -> bool:
    """Whether a cell is not refused in a layout.

    Groups train one model, and where tensors are cut, by AdamW. DeepSpeed knows no muon and no live reference that is
    another model, and samples from no shards.
    """
    stage, _, keys = ALL_CELLS[cell]
    file = LAYOUTS[layout].file
    if file in ("fsdp2_tp", "fsdp2_cp", "zero3_sp") and stage not in ("sft", "pretrain"):
        return False
    if is_of_deepspeed(layout):
        has_copy = stage == "dpo" and "precompute_ref_log_probs" in keys
        return not (has_copy or "optim" in keys or (file == "zero3" and "lmbda" in keys))
    return file != "fsdp2_tp" or "optim" not in keys


def measure(folder: Path, cells: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return the largest difference from one process: cell -> layout, and fault -> the layout it is in.

    It is infinite where the checks of the start or the guards have stopped a run.

    Args:
        folder: Where runs go; made if it is not there.
        cells: Of ``ALL_CELLS``; the first is the one that faults are in, and that goes on in the next layout: of those
            that run in every one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_inputs(folder)
    chosen, first = {name: ALL_CELLS[name] for name in cells}, cells[0]
    alone = folder / "one process"
    sharding.run_jobs(build_jobs(folder, chosen, 1), alone)
    table: dict[str, dict[str, float]] = {name: {} for name in (*cells, RESUMED, *CONTROLS)}
    before: Path | None = None
    for layout, (file, num_processes, options, data_size, num_machines) in LAYOUTS.items():
        here = {name: cell for name, cell in chosen.items() if runs_in(name, layout)}
        jobs = build_jobs(folder, here, data_size)
        if before is None:
            jobs |= {fault: {**jobs[first], "fault": fault} for fault in CONTROLS}
        elif not is_of_deepspeed(layout):
            jobs[RESUMED] = {**jobs[first], "copy_of": before / first, "step": 2}
        counts = {"num_processes": num_processes, "num_machines": num_machines}
        ended = sharding.run_jobs(jobs, folder / layout, file, *options, **counts)
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
    """Return the table in Markdown; a layout that a row was not run in is left empty."""
    lines = [f"| run | {' | '.join(LAYOUTS)} |", f"|---|{'---|' * len(LAYOUTS)}"]
    for name, gaps in table.items():
        lines.append(f"| {name} | {' | '.join(_format(gaps.get(layout)) for layout in LAYOUTS)} |")
    return "\n".join(lines)


def _format(gap: float | None) -> str:
    if gap is None:
        return ""
    return "stopped by its own checks" if gap == math.inf else f"{gap:.0e}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cells", nargs="+", choices=ALL_CELLS, default=list(ALL_CELLS))
    options = parser.parse_args()
    sys.stdout.write(format_table(measure(options.folder, options.cells)) + "\n")


if __name__ == "__main__":
    main()
