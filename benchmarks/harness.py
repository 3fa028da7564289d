"""Interleaved benchmarks: variants run in rounds, A B C A B C ..., each in its own process, compared round by round.

Interleaving keeps ratios valid when the speed of the machine drifts; separate processes isolate peak memory.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Measurement = dict[str, Any]


def build_parser(description: str | None, *, rounds: int) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark; ``rounds`` is the default number of rounds."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--output", type=Path, help="file for the table and every measurement as JSON")
    return parser


def run_interleaved(variants: Mapping[str, Sequence[str]], rounds: int) -> dict[str, list[Measurement]]:
    """Run every variant once per round; a command prints its measurement as JSON on the last line of standard output.

    ``{round}`` in a command is replaced by the number of the round, from 1.
    """
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TOKENIZERS_PARALLELISM": "true",
    }
    results: dict[str, list[Measurement]] = {name: [] for name in variants}
    for number in range(rounds):
        for name, command in variants.items():
            print(f"round {number + 1}/{rounds} {name}", file=sys.stderr, flush=True)
            numbered = [part.replace("{round}", str(number + 1)) for part in command]
            done = subprocess.run(numbered, capture_output=True, text=True, env=environment, check=False)
            if done.returncode:
                raise RuntimeError(f"{name} failed:\n{done.stderr[-4000:]}")
            results[name].append(json.loads(done.stdout.strip().splitlines()[-1]))
    return results


def run_script(variants: Iterable[str], rounds: int, **flags: Any) -> dict[str, list[Measurement]]:
    """Run the calling script as ``run_interleaved``, with ``flags`` and ``--measure NAME`` for each variant."""
    shared = [text for name, value in flags.items() for text in (f"--{name}", str(value))]
    command = [sys.executable, sys.argv[0], *shared, "--measure"]
    return run_interleaved({name: [*command, name] for name in variants}, rounds)


def compare(results: Mapping[str, list[Measurement]], figure: str, ours: str, other: str) -> str:
    """Return ``min / median / max`` of ``other`` over ``ours``, round by round: above 1 means ours is smaller."""
    ratios = [theirs[figure] / own[figure] for own, theirs in zip(results[ours], results[other], strict=True)]
    return f"{min(ratios):.2f} / {statistics.median(ratios):.2f} / {max(ratios):.2f}"


def spread(results: list[Measurement], figure: str, digits: int = 2) -> str:
    """Return ``min / median / max`` of one figure over the rounds."""
    values = [result[figure] for result in results]
    return f"{min(values):.{digits}f} / {statistics.median(values):.{digits}f} / {max(values):.{digits}f}"


def describe_machine() -> str:
    """Return CPU model, number of cores and library versions, in one line."""
    import torch

    from recipes_lib.environment import read_versions

    name = torch.cpu.get_capabilities().get("cpu_name", platform.processor())
    versions = (f"{library} {version}" for library, version in read_versions().items())
    return f"{name}, {os.cpu_count()} cores, {', '.join(versions)}"


def write_results(path: Path | None, title: str, table: Sequence[Sequence[str]], raw: Mapping[str, Any]) -> None:
    """Print a Markdown table; if ``path`` is given, also write it as JSON with all raw measurements."""
    header, *rows = table
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    print(f"\n{title}\n{describe_machine()}\n")
    print("\n".join(lines))
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        document = {"title": title, "machine": describe_machine(), "table": lines, "measurements": raw}
        path.write_text(json.dumps(document, indent=1), encoding="utf-8")
