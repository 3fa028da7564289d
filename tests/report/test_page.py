"""HTML page of a run: self-contained, escaped, bounded in size, for complete and damaged runs."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tests.forked import run_python
from tests.rows import write_rows

from recipes_lib.errors import DataError
from recipes_lib.report.page import _choose_figures, _describe_extent, build_report, find_problems
from recipes_lib.report.run_files import RunFiles

HOSTILE = (
    "</pre><script>alert('x')</script><img src=http://example.org/x.png onerror=alert(1)> {{ 7 * 7 }} & 山 🦊 \x07"
)
VOID = {"meta", "link", "img", "br", "hr", "input"}


class Page(HTMLParser):
    """Collects elements, attributes and text; asserts that elements are closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


SAMPLE = {"step": 60, "prompt": "Why?", "completion": "c", "reference": "Because.", "stopped": True, "num_tokens": 3}


def write_run(folder: Path, num_steps: int = 60) -> None:
    events: list[dict[str, Any]] = [{"kind": "eval", "step": 0, "eval_loss": 5.0, "eval_own_metric": 0.125}]
    for n in range(1, num_steps + 1):
        events.append(
            {"kind": "train", "step": n, "epoch": n / 30, "loss": 5 / n, "grad_norm": 1.0, "learning_rate": 1e-4,
             "num_target_tokens": 100 * n, "num_tokens": 200 * n, "target_tokens_per_second": 500.0, "mfu": 0.4,
             "memory_bytes": 2**30, "seconds": 2.0 * n}
        )  # fmt: skip
    events.append({"kind": "eval", "step": num_steps, "eval_loss": 2.0, "eval_own_metric": 0.875})
    samples = [
        {**SAMPLE, "step": 0, "completion": "why why", "stopped": False, "num_tokens": 9},
        {**SAMPLE, "completion": "Because!", "num_tokens": 4},
    ]
    facts = {
        "stage": "sft",
        "status": "done",
        "command": ["sft.py", "--config", "my file.yaml"],
        "config": {"seed": 42, "learning_rate": 1e-4, "metrics": None},
        "provenance": {"seed": "default", "learning_rate": "sft.yaml:7"},
        "hardware": {"device": "a GPU"},
        "planned": {"memory_bytes": 3 * 2**29, "step_seconds": 0.5},
        "measured": {"memory_bytes": 2**30, "step_seconds": 0.6},
        "git_commit": "0123abc",
    }
    folder.mkdir(exist_ok=True)
    write_rows(folder / "metrics.jsonl", events)
    write_rows(folder / "samples.jsonl", samples)
    (folder / "run.json").write_text(json.dumps(facts))


def read_page(folder: Path) -> Page:
    return Page(build_report(folder).read_text(encoding="utf-8"))


def test_page_shows_metrics_samples_and_facts(tmp_path: Path) -> None:
    write_run(tmp_path / "my-run")

    page = read_page(tmp_path / "my-run")

    for words in (
        "my-run", "60 optimizer steps, 2 epochs, 2 min 0 s of training", "Held-out loss", "5 at step 0", "own metric",
        "0.875", "6k", "of 12k tokens seen", "40% of the peak FLOPs", "1.07 GB", "why why", "Because!", "Because.",
        "cut off at 9 tokens", "stopped after 4 tokens", "Before training", "After training, step 60",
        "sft.py --config 'my file.yaml'", "hardware · device", "a GPU", "0123abc", "sft.yaml:7", "Configuration (3)",
        "1.61 / 1.07 GB of memory, 0.5 / 0.6 s a step",
    ):  # fmt: skip
        assert words in page.text, words
    labels = [value for name, value in page.attributes if name == "aria-label" and value and "at step" in value]
    assert len(labels) == page.elements.count("figure") == 5
    assert page.text.index("why why") < page.text.index("Because!")
    # Explicit values precede defaults.
    assert page.text.index("learning_rate") < page.text.index("seed")
    assert sorted(path.stem for path in (tmp_path / "my-run" / "report").iterdir()) == [
        "grad_norm", "heldout_loss", "learning_rate", "loss", "throughput",
    ]  # fmt: skip


def test_page_is_self_contained(tmp_path: Path) -> None:
    write_run(tmp_path)

    html = build_report(tmp_path).read_text()

    page = Page(html)
    assert not {"link", "iframe", "object", "img"} & set(page.elements)
    assert page.elements.count("script") == 1
    assert not re.search(r"fetch|XMLHttp|import|eval|innerHTML", html.split("<script>")[1])
    addresses = [value for name, value in page.attributes if name in {"src", "href", "xlink:href", "action"}]
    assert all(value and value.startswith("#") for value in addresses)
    assert "@import" not in html
    assert not re.search(r"url\((?!#)", html)
    assert "default-src 'none'" in html
    assert len(html.encode()) < 10**6


@pytest.mark.usefixtures("figures")
def test_samples_and_facts_are_escaped(tmp_path: Path) -> None:
    write_run(tmp_path)
    write_rows(tmp_path / "samples.jsonl", [SAMPLE | dict.fromkeys(("prompt", "completion", "reference"), HOSTILE)])
    facts = {
        "stage": HOSTILE, "status": HOSTILE, HOSTILE: HOSTILE, "config": {HOSTILE: HOSTILE},
        "provenance": {HOSTILE: HOSTILE}, "deep": {"er": [HOSTILE]},
    }  # fmt: skip
    (tmp_path / "run.json").write_text(json.dumps(facts))

    page = read_page(tmp_path)

    assert "img" not in page.elements
    assert page.elements.count("script") == 1
    assert page.text.count(HOSTILE) >= 6


@pytest.mark.usefixtures("figures")
def test_samples_with_largest_reward_changes_are_shown(tmp_path: Path) -> None:
    write_run(tmp_path)
    samples = [
        {**SAMPLE, "step": step, "prompt": f"p{n}?", "reward": None if n == 20 else float(n * step)}
        for step in (0, 60)
        for n in range(21)
    ]
    write_rows(tmp_path / "samples.jsonl", samples)
    text = read_page(tmp_path).text
    assert [text.find(f"p{n}?") >= 0 for n in range(21)] == [n < 6 or 14 <= n < 20 for n in range(21)]
    assert text.index("p19?") < text.index("p14?") < text.index("p5?") < text.index("p0?")
    assert "reward 1140 (+1.14e+03)" in text
    assert "stopped after 3 tokens" in text
    assert "the largest gain of reward first" in text
    assert "at the same random numbers" in text


@pytest.mark.usefixtures("figures")
def test_samples_are_sorted_by_change(tmp_path: Path) -> None:
    def order(answers: dict[str, tuple[Any, Any]], key: str) -> list[str]:
        """Return the prompts in page order, given first and last values of ``key``."""
        write_run(tmp_path)
        rows = [
            {**SAMPLE, "step": step, "prompt": prompt, key: value}
            for prompt, values in answers.items()
            for step, value in zip((0, 60), values, strict=True)
        ]
        write_rows(tmp_path / "samples.jsonl", rows)
        text = read_page(tmp_path).text
        return sorted(answers, key=text.index)

    gains = {"lost?": (5.0, 4.0), "gained?": (-3.0, -1.0), "same?": (9.0, 9.0)}
    assert order(gains, "reward") == ["gained?", "same?", "lost?"]
    words = {"equal?": ("a b c", "a b c"), "other?": ("a b c", "x y"), "half?": ("a b", "a d")}
    assert order(words, "completion") == ["other?", "half?", "equal?"]


def test_page_size_is_bounded_for_large_run(tmp_path: Path) -> None:
    write_run(tmp_path, num_steps=5000)
    samples = [
        {"step": step, "prompt": f"{n} " + "p" * 50_000, "completion": "山" * 50_000, "reference": "r" * 50_000}
        for step in (0, 5000)
        for n in range(40)
    ]
    write_rows(tmp_path / "samples.jsonl", samples)
    facts = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps(facts | {"blob": "x" * 10**6}))

    path = build_report(tmp_path)

    assert path.stat().st_size < 10**6
    assert "characters more" in path.read_text()


@pytest.mark.usefixtures("figures")
@pytest.mark.parametrize("missing", ["metrics.jsonl", "samples.jsonl", "run.json"])
def test_missing_file_is_tolerated(tmp_path: Path, missing: str) -> None:
    write_run(tmp_path)
    (tmp_path / missing).unlink()

    page = read_page(tmp_path)

    assert "h1" in page.elements


@pytest.mark.parametrize(
    "events",
    [
        [{"kind": "train", "step": 1, "loss": 2.0}],
        [{"kind": "train", "step": 1, "loss": "nan", "grad_norm": "inf", "learning_rate": None, "mfu": None}],
        [{"kind": "eval", "step": 0, "eval_loss": "inf", "eval_perplexity": "inf"}],
        [{"kind": "train", "step": 1, "loss": 0.0, "learning_rate": 0.0, "target_tokens_per_second": 0.0}],
        [{"kind": "train", "step": n, "loss": 2.0, "grad_norm": 0.0} for n in range(40)],
        [{"kind": "train", "step": 1, "loss": 10**400, "epoch": 10**400, "seconds": "nan"}],
        [{"kind": "train", "step": n, "loss": (-1) ** n * 1e308, "learning_rate": 1e308} for n in range(1, 40)],
        [{"kind": "eval", "step": n, "eval_$\\frac{_loss": 1.0, "eval_\ud800\x00_loss": 2.0} for n in (0, 1)],
        [],
    ],
)
def test_extreme_events_make_a_page(tmp_path: Path, events: list[dict[str, Any]]) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events) + '{"torn')

    page = read_page(tmp_path)

    assert "1 line was truncated" in page.text


@pytest.mark.usefixtures("figures")
def test_huge_steps_and_rewards_make_a_page(tmp_path: Path) -> None:
    write_rows(
        tmp_path / "metrics.jsonl", [{"kind": "train", "step": step, "loss": 1.0} for step in (1, 2**60, 10**400)]
    )
    write_rows(tmp_path / "samples.jsonl", [SAMPLE | {"step": n, "reward": 10**400 - n} for n in (0, 1)])
    assert "2 lines were truncated or invalid" in read_page(tmp_path).text


@pytest.mark.usefixtures("figures")
def test_malformed_facts_make_a_page(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "step": 1}')
    for facts in (
        {"config": ["a"], "provenance": 3},
        {"config": {"a": 1}},
        {"command": "text"},
        {"command": [1, None]},
        {"rollbacks": None},
        {"rollbacks": []},
        {"rollbacks": "text"},
        {"rollbacks": [{"step": 3, "cause": "loss", "back_to": 2, "steps": [3]}]},
    ):
        (tmp_path / "run.json").write_text(json.dumps(facts))
        assert ("rollbacks" in read_page(tmp_path).text) == bool(facts.get("rollbacks"))


@pytest.mark.usefixtures("figures")
@pytest.mark.parametrize("last", ["nan", "inf"])
def test_key_figures_end_with_the_last_value_also_if_it_is_not_finite(tmp_path: Path, last: str) -> None:
    events = [
        {"kind": kind, "step": step, name: value}
        for kind, name in (("train", "loss"), ("eval", "eval_own_metric"))
        for step, value in ((1, 0.5), (2, 0.25), (3, last))
    ]
    write_rows(tmp_path / "metrics.jsonl", events)
    text = read_page(tmp_path).text
    for label in ("Training loss", "own metric"):
        assert f"{label}{last}0.5 at step 1" in text


@pytest.mark.usefixtures("figures")
@pytest.mark.parametrize(("mfu", "words"), [(0.42, "42% of the peak FLOPs"), (12.3, "median")])
def test_mfu_above_one_is_not_shown(tmp_path: Path, mfu: float, words: str) -> None:
    """The measured peak of a CPU can be too low while other programs run."""
    event = {"kind": "train", "step": 1, "loss": 2.0, "target_tokens_per_second": 500.0, "mfu": mfu}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(event) + "\n")
    text = read_page(tmp_path).text
    assert words in text
    assert "1230%" not in text


def test_directory_without_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="output_dir of a run"):
        build_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


BEST = {"load_best_model_at_end": True}
ROLLBACK = {"step": 27, "cause": "loss 5.2", "back_to": 25, "skipped": [50, 58], "steps": [26, 29]}


def build_run(**changes: Any) -> RunFiles:
    fields: dict[str, Any] = {
        "name": "run",
        "facts": {"status": "done"},
        "train": [{"step": step, "loss": 5 / step, "grad_norm": 1.0} for step in range(1, 21)],
        "evaluations": [{"step": 10 * n, "eval_loss": 3.0 - n, "eval_stop_rate": n / 2} for n in range(3)],
        "samples": [],
        "num_torn_lines": 0,
    }
    return RunFiles(**fields | changes)


def build_losses(*losses: Any) -> list[dict[str, Any]]:
    return [{"step": 10 * n, "eval_loss": loss} for n, loss in enumerate(losses)]


def spike_at(*steps: int) -> list[dict[str, Any]]:
    return [{"step": step, "grad_norm": 50.0 if step in steps else 1.0} for step in range(1, 41)]


@pytest.mark.parametrize(
    ("event", "model", "extent"),
    [
        ({}, None, "No training step was logged."),
        ({"step": 1, "epoch": 1.0, "seconds": 90.0}, None, "1 optimizer step, 1 epoch, 1 min 30 s of training"),
        ({"step": 1200, "epoch": 0.5}, "org/model", "1,200 optimizer steps, 0.5 epochs, from org/model"),
    ],
)
def test_extent_of_a_run(event: dict[str, Any], model: str | None, extent: str) -> None:
    run = build_run(train=[event] if event else [], facts={"config": {"model_name_or_path": model}})
    assert _describe_extent(run) == extent


@pytest.mark.parametrize(
    ("metric", "labels"),
    [
        ("learning_rate", ["Training loss"]),
        ("objective/score", []),
        ("on_policy/divergence", ["Divergence on its answers"]),
    ],
)
def test_figures_are_metrics_and_no_surrogate_or_mixed_loss(metric: str, labels: list[str]) -> None:
    run = build_run(train=[{"step": 1, "loss": 1.0, metric: 1.0}])
    assert [figure.label for figure in _choose_figures(run)] == ["Held-out loss", "Samples that stop", *labels]


def test_healthy_run_has_no_problems() -> None:
    assert find_problems(build_run()) == []
    assert find_problems(build_run(facts={"status": "done", "config": BEST}, best={"best_step": 20})) == []
    # Chosen answers that were less likely than under another reference from the beginning.
    facts = {"status": "done", "config": {"ref_model_name_or_path": "a better model"}}
    assert find_problems(build_run(facts=facts, train=[{"step": 1, "logps/chosen_shift": -0.6}])) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"facts": {"status": "diverged"}}, "“diverged”"),
        ({"facts": {"rollbacks": [ROLLBACK]}}, "rolled back to step 25 and skipped the rows of steps 26 to 29"),
        ({"train": []}, "No training step"),
        ({"facts": {"status": "done", "config": BEST}}, "found no checkpoint of a step whose evaluation is finite"),
        ({"train": [{"step": 3, "loss": "nan"}, {"step": 4, "loss": 1.0}]}, "loss was not finite at step 3."),
        ({"train": [{"step": n, "grad_norm": "inf"} for n in range(7)]}, "at steps 0, 1, 2 and 4 more"),
        ({"evaluations": build_losses(3.0, 2.0, 2.5)}, "lowest at step 10 (2) and rose to 2.5 by step 20"),
        ({"evaluations": build_losses(-1.0, -2.0, -1.9)}, "lowest at step 10 (-2) and rose to -1.9 by step 20"),
        ({"evaluations": build_losses(2.0, 2.5, 3.0)}, "made the held-out loss worse"),
        ({"evaluations": build_losses(3.0, "nan", 2.0)}, "held-out loss was not finite at step 10"),
        ({"evaluations": [{"step": n, "eval_stop_rate": 0.0} for n in (0, 10)]}, "No sample ended with a stop token"),
        ({"train": spike_at(30)}, "ten times its median at step 30"),
        ({"train": [{"step": n, "logps/chosen_shift": -0.1 * n} for n in range(7)]}, "lost 0.60 nats per token"),
        ({"num_torn_lines": 1}, "1 line was truncated"),
        ({"num_torn_lines": 2}, "2 lines were truncated"),
    ],
)
def test_problem_is_detected_alone(changes: dict[str, Any], words: str) -> None:
    (problem,) = find_problems(build_run(**changes))

    assert words in problem


def test_early_and_short_run_gradient_spikes_are_ignored() -> None:
    assert find_problems(build_run(train=spike_at(1, 2, 3))) == []
    assert find_problems(build_run(train=spike_at(30)[25:33])) == []


@pytest.mark.parametrize("losses", [(3.0, 2.0, 2.01), (1.0, -2.0, -1.99), (-1.0, -1.5, -2.0)])
def test_small_rise_of_held_out_loss_is_ignored(losses: tuple[float, ...]) -> None:
    assert find_problems(build_run(evaluations=build_losses(*losses))) == []


def test_pages_do_not_import_torch() -> None:
    """``recipes report`` and ``recipes runs`` begin at once."""
    modules = ", ".join(f"recipes_lib.report.{name}" for name in ("page", "overview", "run_comparison"))
    code = f"import sys, {modules}\nassert 'torch' not in sys.modules"
    run_python(code)
