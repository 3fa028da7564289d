"""``recipes prove``: verify numerical results, throughput and memory on this machine."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from recipes_lib.config.command_flags import CommandParser
from recipes_lib.errors import EXIT_DONE, EXIT_USER, ConfigError, Problem
from recipes_lib.files import explain_write_errors, try_lock
from recipes_lib.quantities import pluralize

if TYPE_CHECKING:
    from recipes_lib.proving.bench import Bench
    from recipes_lib.proving.checks import Check

PAGE = "results.md"
_LOCK = "lock"


def main(arguments: Sequence[str]) -> int:
    """Run the checks that have not passed yet, within the time limit; return ``EXIT_USER`` if one fails.

    A check that hangs in this process ends it by ``EXIT_STALLED``.

    Raises:
        ConfigError: There is no such check, the machine has fewer GPUs than requested, or another process writes to the
            folder.
    """
    options = CommandParser("prove").parse_args(arguments)
    import torch  # After parsing: `--help` and a wrong flag need no torch.

    from recipes_lib.proving.bench import Bench
    from recipes_lib.proving.checks import list_checks

    checks = _choose(list(list_checks()), options.only or [""])  # The empty prefix selects all.
    device, output = torch.device("cuda" if torch.cuda.is_available() else "cpu"), options.output.resolve()
    with explain_write_errors(output, "name another --output"):
        output.mkdir(parents=True, exist_ok=True)
        (output / _LOCK).touch()
    found = torch.cuda.device_count() if device.type == "cuda" else 0
    num_gpus = found if options.gpus is None else options.gpus
    if not min(found, 1) <= num_gpus <= found:
        raise ConfigError(Problem("--gpus", f"{num_gpus} are requested, and this machine has {found}", "remove it"))
    bench = Bench(output, device, is_small=options.small or device.type == "cpu", num_gpus=num_gpus)
    with (output / _LOCK).open("a", encoding="utf-8") as lock:
        if try_lock(lock) is False:
            held = "another `recipes prove` runs in it, or a process of one that was killed"
            raise ConfigError(Problem(str(output), held, "wait for it, end it, or name another --output"))
        # Inherited: the process of a check outlives a kill of this one, and would slow down what is measured next.
        os.set_inheritable(lock.fileno(), True)
        return _prove(checks, bench, options.minutes)


def _choose(listed: Sequence[Check], prefixes: Sequence[str]) -> list[Check]:
    """Return the checks whose names begin with one of the prefixes, each of which must match."""
    checks = [check for check in listed if check.name.startswith(tuple(prefixes))]
    if unknown := [prefix for prefix in prefixes if not any(check.name.startswith(prefix) for check in checks)]:
        remedy = f"write one of {', '.join(check.name for check in listed)}"
        raise ConfigError(Problem("--only", f"there is no check {' or '.join(unknown)}", remedy))
    return checks


def _prove(checks: Sequence[Check], bench: Bench, minutes: float) -> int:
    from recipes_lib.models.loading import hide_progress_bars
    from recipes_lib.proving.results import FAILED, PASSED, SMALL, add_row, format_row, read_rows, run_check, write_page
    from recipes_lib.training.guards.watchdog import WATCHDOG

    output, began = bench.folder, time.monotonic()
    hide_progress_bars()
    rows = read_rows(output, bench.describe().__eq__)
    for name, row in rows.items():
        # A check of several GPUs does not hold for more of them.
        if row.status == PASSED and row.figures.get("gpus") not in range(bench.num_gpus):
            bench.passed[name] = row.figures
    if bench.passed:
        sys.stdout.write(f"resumed: {pluralize(len(bench.passed), 'check')} passed before\n")
    if bench.is_small:
        sys.stdout.write(f"{SMALL}\n")
    # For checks in this process; those of others have limits of their own.
    with WATCHDOG.watching(output, is_main=False):
        for check in checks:
            WATCHDOG.enter(f"the check {check.name}")
            if check.name not in bench.passed:
                row = run_check(check, bench, 60 * minutes - (time.monotonic() - began))
                add_row(output, row)
                rows[check.name] = row
                if row.status == PASSED:
                    bench.passed[check.name] = row.figures
            # After each check: a rented machine may be lost before the last one.
            write_page(output / PAGE, rows.values())
            sys.stdout.write(format_row(rows[check.name]) + "\n")
            sys.stdout.flush()
    sys.stdout.write(f"page, rows and logs: {output}\n")
    return EXIT_USER if any(rows[check.name].status == FAILED for check in checks) else EXIT_DONE
