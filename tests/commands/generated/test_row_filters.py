"""Filters of generated rows against brute force, and selection by grade and diversity."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from recipes_lib.commands.generated import row_filters
from recipes_lib.commands.generated.row_filters import NearDuplicates, build_checks, choose_rows, find_agreeing
from recipes_lib.config.synthesis_keys import SynthesisConfig
from recipes_lib.errors import ConfigError


def jaccard(one: str, other: str) -> float:
    first, second = ({tuple(text.split()[at : at + 3]) for at in range(len(text.split()) - 2)} for text in (one, other))
    return len(first & second) / len(first | second)


def test_near_duplicates_equal_brute_force_jaccard() -> None:
    """Texts of 30 words with 0 to 6 changed, so that similarities lie on both sides of the threshold."""
    drawn = random.Random(0)
    words = [f"w{n}" for n in range(400)]
    texts = []
    for _ in range(40):
        base = drawn.sample(words, 30)
        for num_changes in (0, 1, 3, 6):
            changed = list(base)
            for at in drawn.sample(range(30), num_changes):
                changed[at] = drawn.choice(words)
            texts.append(" ".join(changed))
    drawn.shuffle(texts)
    seen, kept = NearDuplicates(0.6), list[str]()
    for text in texts:
        repeats = any(jaccard(text, one) >= 0.6 for one in kept)
        assert seen.add(text) == repeats
        if not repeats:
            kept.append(text)
    assert 40 < len(kept) < 160


def test_short_texts_are_compared_by_words() -> None:
    seen = NearDuplicates(0.7)
    assert [seen.add(text) for text in ("Add 1", "add  1!", "Add 2", "", "")] == [False, True, False, False, True]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("I'm sorry, but I can't help with that.", "refusal"),
        ("I apologize, but I can't help with that.", "refusal"),
        ("  **I’m sorry, but as an AI language model I cannot.**", "refusal"),
        ("Unfortunately, I am unable to assist you.", "refusal"),
        ("As an AI language model, I have no opinion.", "refusal"),
        ("I cannot help laughing when I read it.", None),
        ("Dear Anna, I'm sorry that I missed your call.", None),
        ("She said: I can't help you.", None),
        ("I can help with that: take two.", None),
        *(("one", "too short"), ("one two", None)),
        *(("a " * 20, None), ("a " * 21, "too long")),
    ],
)
def test_checks_of_single_answers(text: str, reason: str | None) -> None:
    checks = build_checks(SynthesisConfig(min_words=2, max_words=20))
    assert next(filter(None, (check(text) for check in checks)), None) == reason


def test_long_answers_and_refusals_can_be_kept() -> None:
    checks = build_checks(SynthesisConfig(drop_refusals=False))
    assert [check("As an AI language model, I have no opinion. " * 100) for check in checks] == [None]


def test_language_check() -> None:
    *_, check = build_checks(SynthesisConfig(languages=["en"]))
    assert check("The quick brown fox jumps over the lazy dog and sleeps in the sun.") is None
    assert check("Der schnelle braune Fuchs springt über den faulen Hund und schläft in der Sonne.") == "language"


def test_refusals_path_replaces_shipped_patterns(tmp_path) -> None:
    (tmp_path / "r.txt").write_text("nope\n\nno[,.]\n")
    _, check = build_checks(SynthesisConfig(refusals_path=str(tmp_path / "r.txt")))
    assert [check(text) for text in ("Nope!", "No, thanks", "I'm sorry, but I can't.")] == ["refusal", "refusal", None]
    (tmp_path / "r.txt").write_text("fine\n(\n")
    with pytest.raises(ConfigError, match=r"r\.txt:2: is not a regular expression"):
        build_checks(SynthesisConfig(refusals_path=str(tmp_path / "r.txt")))
    with pytest.raises(ConfigError, match="cannot be read"):
        build_checks(SynthesisConfig(refusals_path=str(tmp_path)))


@pytest.mark.parametrize(
    ("texts", "places"),
    [
        (["so 4", "4.0", "It is 5.", "#### 4"], [0, 1, 3]),
        (["Reason.\nYes!", "Other.\n yes", "no"], [0, 1]),
        (["a"], [0]),
        (["b", "a"], [0]),
    ],
)
def test_find_agreeing_compares_final_results(texts: list[str], places: list[int]) -> None:
    assert find_agreeing(texts) == places


def test_choose_rows_trades_score_for_diversity() -> None:
    texts = [" ".join(f"topic{n // 3}word{k}" for k in range(12)) for n in range(9)]
    scores = [9.0, 9.0, 9.0, 5.0, 5.0, 5.0, 1.0, 1.0, None]
    assert choose_rows(texts, scores, 3, 0.0) == [0, 1, 2]
    chosen = choose_rows(texts, scores, 3, 0.5)
    assert [at // 3 for at in chosen] == [0, 1, 2], "one of each topic"
    assert choose_rows(texts, scores, 99, 0.5) == list(range(9))
    assert choose_rows([], [], 3, 0.5) == []
    assert choose_rows(["a", "b"], [None, None], 1, 0.5) == [0]


@pytest.mark.parametrize("diversity", [0.0, 0.3, 1.0])
def test_choose_rows_equals_exhaustive_greedy_search(diversity: float) -> None:
    """Each step compares all signatures, of texts that share a beginning, and with tied scores."""
    drawn = np.random.default_rng(1)
    texts = [f"write a text about {' '.join(f'w{n}' for n in drawn.integers(0, 12, 9))}" for _ in range(120)]
    scores = [None if score == 0 else float(score) for score in drawn.integers(0, 6, 120)]
    known = np.array([-1.0 if score is None else score for score in scores])
    quality = np.searchsorted(np.unique(known), known) / (len(np.unique(known)) - 1)
    signatures = np.stack([row_filters.MinHash(128, 1, 0).compute_keys(row_filters._shingle(text)) for text in texts])
    similarity, left, expected = np.zeros(120), np.ones(120, bool), list[int]()
    for _ in range(60):
        objective = (1 - diversity) * quality - diversity * similarity
        best = int(np.argmax(np.where(left, objective, -np.inf)))
        expected.append(best)
        left[best] = False
        similarity = np.maximum(similarity, (signatures == signatures[best]).mean(axis=1))
    assert choose_rows(texts, scores, 60, diversity) == sorted(expected)


def test_choose_rows_with_full_diversity_covers_clusters() -> None:
    """Each of ten clusters is chosen once before any is chosen twice."""
    drawn = np.random.default_rng(0)
    clusters = [" ".join(f"c{n}w{k}" for k in range(20)) for n in range(10)]
    texts = [f"{cluster} extra{copy}" for cluster in clusters for copy in range(5)]
    order = drawn.permutation(50)
    chosen = choose_rows([texts[at] for at in order], [float(one) for one in drawn.random(50)], 10, 1.0)
    chosen_clusters = sorted(int(order[at]) // 5 for at in chosen)
    assert all(one < other for one, other in pairwise(chosen_clusters))
