"""Pictures of the documentation: benchmark bars and forgetting from ``docs/results.md``, screenshots of a demo.

    python benchmarks/pictures.py            # docs/images/benchmarks.svg and forgetting.svg
    python benchmarks/pictures.py --demo demo  # also a screenshot of its overview, by headless Chromium

Drawn from the committed tables, so pictures and tables cannot differ; ``tests/test_pictures.py`` verifies it.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple
from xml.sax.saxutils import escape

ROOT: Final = Path(__file__).parents[1]
RESULTS: Final = ROOT / "docs" / "results.md"
IMAGES: Final = ROOT / "docs" / "images"
SCREENSHOTS: Final = {"overview": "index.html"}
"""Picture -> page of the demo."""
_WIDTH, _LEFT, _ROW = 760, 330, 34


class Bar(NamedTuple):
    """Speed relative to a peer: minimum, median and maximum over the rounds.

    Attributes:
        label: What is compared.
        low: Minimum.
        median: Median.
        high: Maximum.
    """

    label: str
    low: float
    median: float
    high: float


class Place(NamedTuple):
    """Location of a ratio in ``docs/results.md``: section, start of the row, and column."""

    section: str
    row: str
    column: str


BARS: Final[Mapping[str, Place]] = {
    "DPO, 512-token prompts, vs TRL": Place("Pairs", "DPO, TRL, stored reference", "ours / this"),
    "SFT vs TRL, script defaults": Place("Training", "TRL, script defaults", "ours / this"),
    "SFT vs TRL, tuned by hand": Place("Training", "TRL tuned by hand", "ours / this"),
    "LoRA vs TRL + PEFT, tuned by hand": Place("Adapters", "PEFT and TRL, tuned by hand", "ours / this"),
    "reward model vs TRL": Place("Pairs", "reward model, TRL", "ours / this"),
    "pretraining vs Trainer, bf16": Place("Pretraining", "Trainer, bf16", "ours / this"),
    "preparing chats vs TRL": Place("Preparation", "TRL", "this / ours"),
    "one step, 131k vocabulary, vs TRL": Place("One step at a vocabulary of 131,072", "TRL, fp32", "time / ours"),
}
"""Label -> location; ratios above 1 mean that this repository is faster."""


def read_bar(text: str, label: str, place: Place) -> Bar:
    """Find a ratio in the text of ``docs/results.md``.

    Raises:
        KeyError: There is no such section, row or column.
    """
    cells = _read_cells(text, place.section)
    header = next((line for line in cells if place.column in line), None)
    rows = [line for line in cells if any(cell.startswith(place.row) for cell in line[:2])]
    if header is None or not rows:
        raise KeyError(f"{place} is not in {RESULTS.name}")
    low, median, high = (float(number) for number in rows[0][header.index(place.column)].split(" / "))
    return Bar(label, low, median, high)


def _read_cells(text: str, section: str) -> list[list[str]]:
    """Return the rows of all tables in a section, including header and separator rows."""
    body = re.split(r"(?m)^## ", text.partition(f"\n## {section}\n")[2])[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in body.splitlines() if line.startswith("|")]


def draw(bars: Sequence[Bar], caption: Sequence[str]) -> str:
    """Return an SVG of horizontal bars with whiskers from minimum to maximum, legible on light and dark pages."""
    height = _ROW * len(bars) + 100
    scale = (_WIDTH - _LEFT - 70) / max(bar.high for bar in bars)
    one = _LEFT + scale
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-8 0 {_WIDTH + 8} {height}" role="img" '
        f'font-family="system-ui, Segoe UI, Roboto, Helvetica, Arial, sans-serif" font-size="14">',
        "<title>Speed of this repository relative to its peers</title>",
        "<style>text{fill:#1c2024}.muted{fill:#60666d;font-size:12px}.bar{fill:#2563c9}.rule{stroke:#60666d}"
        "@media(prefers-color-scheme:dark){text{fill:#e8eaed}.muted{fill:#9aa1a9}.bar{fill:#7fb0ff}"
        ".rule{stroke:#9aa1a9}}</style>",
        '<text x="0" y="18" font-weight="600">times as fast as the peer</text>',
        f'<line class="rule" x1="{one:.1f}" y1="28" x2="{one:.1f}" y2="{height - 60}" stroke-dasharray="3 3"/>',
        f'<text class="muted" x="{one:.1f}" y="22" text-anchor="middle">equal</text>',
    ]
    for number, bar in enumerate(bars):
        y = 34 + number * _ROW
        low, end, high = (_LEFT + scale * value for value in (bar.low, bar.median, bar.high))
        lines += [
            f'<text x="{_LEFT - 12}" y="{y + 17}" text-anchor="end">{escape(bar.label)}</text>',
            f'<rect class="bar" x="{_LEFT}" y="{y + 3}" width="{end - _LEFT:.1f}" height="19" rx="3"/>',
            f'<line class="rule" x1="{low:.1f}" y1="{y + 12.5}" x2="{high:.1f}" y2="{y + 12.5}"/>',
            f'<text x="{high + 8:.1f}" y="{y + 17}" font-weight="600">{bar.median:.2f}×</text>',
        ]
    for number, line in enumerate(caption):
        lines.append(f'<text class="muted" x="0" y="{height - 28 + 17 * number}">{escape(line)}</text>')
    lines.append("</svg>")
    return "\n".join(lines) + "\n"


def draw_benchmarks(text: str) -> str:
    """Return the SVG of the benchmark bars, from the text of ``docs/results.md``.

    Raises:
        KeyError: The text names no machine, or lacks a ratio.
    """
    found = re.search(r"Machine of this page[^:]*: ([^;]+);", text)
    if found is None:
        raise KeyError(f"{RESULTS.name} names no machine")
    caption = [
        f"Measured on a CPU: {' '.join(found[1].split())}.",
        "Median of interleaved rounds; whiskers: minimum and maximum (docs/results.md).",
    ]
    bars = [read_bar(text, label, place) for label, place in BARS.items()]
    return draw(sorted(bars, key=lambda bar: -bar.median), caption)


class Point(NamedTuple):
    """A method of the forgetting table: gain and loss, each as minimum, median and maximum over the seeds."""

    label: str
    gained: tuple[float, float, float]
    lost: tuple[float, float, float]


def read_points(text: str) -> list[Point]:
    """Return the rows of the forgetting table.

    Raises:
        KeyError: There is no such table.
    """
    points = [
        Point(label.replace("`", ""), *(tuple(float(one) for one in cell.split(" / ")) for cell in (gained, lost)))  # type: ignore[arg-type]
        for label, gained, lost in (row for row in _read_cells(text, "Forgetting") if len(row) == 3)
        if gained.count(" / ") == lost.count(" / ") == 2 and gained[0].isdigit()
    ]
    if not points:
        raise KeyError(f"{RESULTS.name} has no table of forgetting")
    return points


def draw_forgetting(text: str) -> str:
    """Return a scatter plot of gains and losses with whiskers, from the text of ``docs/results.md``."""
    points, width, height, left, top, bottom = read_points(text), 760, 420, 60, 40, 370
    ends = [
        (min(one[0] for one in axis), max(one[2] for one in axis))
        for axis in zip(*(p[1:] for p in points), strict=True)
    ]
    (low_y, high_y), (low_x, high_x) = ((low - (high - low) / 12, high + (high - low) / 12) for low, high in ends)

    def place(lost: float, gained: float) -> tuple[float, float]:
        across = (lost - low_x) / (high_x - low_x) * (width - left - 210)
        return left + across, bottom - (gained - low_y) / (high_y - low_y) * (bottom - top)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-8 0 {width + 8} {height}" role="img" '
        'font-family="system-ui, Segoe UI, Roboto, Helvetica, Arial, sans-serif" font-size="13">',
        "<title>What a fine-tuning gains and loses, by method</title>",
        "<style>text{fill:#1c2024}.muted{fill:#60666d;font-size:12px}.dot{fill:#2563c9}.rule{stroke:#60666d}"
        ".leader{stroke:#60666d;stroke-width:.5;stroke-dasharray:2 3}"
        "@media(prefers-color-scheme:dark){text{fill:#e8eaed}.muted{fill:#9aa1a9}.dot{fill:#7fb0ff}"
        ".rule,.leader{stroke:#9aa1a9}}</style>",
        '<text x="0" y="18" font-weight="600">gained on the new data, bits per byte</text>',
        f'<line class="rule" x1="{left}" y1="{top}" x2="{left}" y2="{bottom}"/>',
        f'<line class="rule" x1="{left}" y1="{bottom}" x2="{width - 190}" y2="{bottom}"/>',
        f'<text x="{width - 190}" y="{bottom + 36}" font-weight="600" text-anchor="end">lost on the old data</text>',
    ]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        lost, gained = low_x + share * (high_x - low_x), low_y + share * (high_y - low_y)
        x, y = place(lost, gained)
        lines += [
            f'<text class="muted" x="{x:.1f}" y="{bottom + 17}" text-anchor="middle">{lost:.2f}</text>',
            f'<text class="muted" x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{gained:.2f}</text>',
        ]
    # Points may overlap: labels are in a column, ordered as the points, each with a leader line.
    at = top - 17.0
    for label, gained, lost in sorted(points, key=lambda point: -point.gained[1]):
        x, y = place(lost[1], gained[1])
        (x1, y1), (x2, y2) = place(lost[0], gained[0]), place(lost[2], gained[2])
        at = max(at + 17, y)
        lines += [
            f'<line class="leader" x1="{x:.1f}" y1="{y:.1f}" x2="{width - 186}" y2="{at:.1f}"/>',
            f'<line class="rule" x1="{x1:.1f}" y1="{y:.1f}" x2="{x2:.1f}" y2="{y:.1f}"/>',
            f'<line class="rule" x1="{x:.1f}" y1="{y1:.1f}" x2="{x:.1f}" y2="{y2:.1f}"/>',
            f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="4.5"/>',
            f'<text x="{width - 180}" y="{at + 4:.1f}">{escape(label)}</text>',
        ]
    lines.append("</svg>")
    return "\n".join(lines) + "\n"


def take_screenshots(demo: Path, folder: Path, *, width: int = 1280, height: int = 1165) -> None:
    """Take screenshots of pages of a finished demo.

    Raises:
        SystemExit: There is no Chromium, or the demo has not finished.
    """
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    missing = [page for page in SCREENSHOTS.values() if not (demo / page).is_file()]
    if browser is None or missing:
        sys.exit(f"{demo} has no {missing[0]}: run make demo" if missing else "no Chromium found")
    for name, page in SCREENSHOTS.items():
        picture = folder / f"{name}.png"
        command = [browser, "--headless", "--no-sandbox", "--hide-scrollbars", f"--window-size={width},{height}"]
        subprocess.run(
            [*command, f"--screenshot={picture}", (demo / page).resolve().as_uri()], check=True, capture_output=True
        )


def main() -> None:
    """Draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", type=Path, help="folder of a finished demo, of which pages are photographed")
    options = parser.parse_args()
    IMAGES.mkdir(exist_ok=True)
    text = RESULTS.read_text(encoding="utf-8")
    for name, drawing in (("benchmarks", draw_benchmarks(text)), ("forgetting", draw_forgetting(text))):
        (IMAGES / f"{name}.svg").write_text(drawing, encoding="utf-8")
    if options.demo is not None:
        take_screenshots(options.demo, IMAGES)


if __name__ == "__main__":
    main()
