"""``report.html`` of a corpus: what each step removed and why, with samples that a person can judge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment

Record = Mapping[str, Any]


def write_corpus_report(folder: Path, manifest: Record, samples: Mapping[str, Sequence[Record]]) -> Path:
    """Write ``report.html`` into the folder of a corpus and return its path.

    The page needs no network and no script; everything that comes from the data is escaped.

    Args:
        folder: The corpus.
        manifest: What ``corpus.json`` holds.
        samples: Documents by ``step: reason`` where they were removed, by ``step`` where they were changed, and
            ``kept``.
    """
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["count"] = lambda number: "" if number is None else f"{number:,}"
    environment.filters["share"] = _format_share
    here = Path(__file__)
    page = environment.from_string(here.with_name("corpus.html.jinja").read_text(encoding="utf-8")).render(
        manifest=manifest,
        name=folder.resolve().name,
        style=here.with_name("page.css").read_text(encoding="utf-8"),
        start=next(iter(manifest["steps"].values())),
        removals=list_removals(manifest),
        samples=samples,
    )
    path = folder / "report.html"
    path.write_text(page, encoding="utf-8", errors="replace")
    return path


def list_removals(manifest: Record) -> list[tuple[str, str, int, int]]:
    """Return step, reason, documents and bytes of everything that was removed, in the order of the steps."""
    return [
        (step, reason, count, tally["removed_bytes"].get(reason, 0))
        for step, tally in manifest["steps"].items()
        for reason, count in sorted(tally["removed"].items(), key=lambda item: (-item[1], item[0]))
    ]


def _format_share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else ""
