"""Folders and counts of a corpus; mixture weights against closed forms and UniMax's algorithm."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

from recipes_lib.config.corpus_keys import CorpusConfig
from recipes_lib.corpus.corpus_manifest import Finish, compute_mixture, name_folders, remove_old_work, sum_counts
from recipes_lib.data.sources.local_files import load_files


@pytest.mark.parametrize(
    "labels",
    [
        *(["web", "gsm8k_train"], ["train", "test"], ["dev-set", "eval2", "a b/c"], ["contest", "training"]),
        *(["source1", "train"], ["train", "source0"], ["websource2", "web", "web"]),
    ],
)
def test_folder_names_are_unique_and_never_split_names(tmp_path, labels):
    names = name_folders([SimpleNamespace(label=label) for label in labels])
    assert len(set(names)) == len(names)
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "train-00000-of-00001.jsonl").write_text('{"text": "x"}\n')
    assert len(load_files(tmp_path, "corpus", "train").files) == len(names)


def test_sum_counts_keeps_uncounted_tokens_none():
    shards = [{"documents": 1, "bytes": 2, "tokens": None}, {"documents": 3, "bytes": 4, "tokens": None}]
    assert sum_counts(shards) == {"documents": 4, "bytes": 6, "tokens": None}
    assert sum_counts([{**shards[0], "tokens": 5}]) == {"documents": 1, "bytes": 2, "tokens": 5}


CONFIG = CorpusConfig(sources=[{"name": name, "weight": weight} for name, weight in zip("abc", (6, 3, 1), strict=True)])


def unimax(sizes, budget, cap):
    """Algorithm 1 of Chung et al. 2023."""
    left, shares = float(budget), {}
    order = sorted(range(len(sizes)), key=lambda at: sizes[at])
    for position, at in enumerate(order):
        shares[at] = min(left / (len(order) - position), sizes[at] * cap)
        left -= shares[at]
    total = sum(shares.values())
    return [shares[at] / total for at in range(len(sizes))]


def test_unimax_matches_algorithm_of_the_paper():
    random_ = random.Random(0)
    for _ in range(100):
        sizes = [random_.randrange(1, 10**6) for _ in range(3)]
        budget, cap = random_.randrange(1, 10**7), random_.choice((1, 2, 4))
        config = replace(CONFIG, mixture="unimax", max_epochs=cap)
        assert compute_mixture(config, sizes, budget) == pytest.approx(unimax(sizes, budget, cap))


@pytest.mark.parametrize(
    ("mixture", "keys", "budget", "sizes", "shares"),
    [
        ("weights", {}, 1000, [1000, 1000, 1000], [0.6, 0.3, 0.1]),
        # The excess of a capped source is redistributed by weight; if all are capped, it is dropped.
        ("weights", {"max_epochs": 2}, 1000, [100, 1000, 1000], [0.2, 0.6, 0.2]),
        ("weights", {}, 10**9, [100, 200, 100], [0.25, 0.5, 0.25]),
        ("temperature", {"mixture_temperature": 2.0}, 1, [900, 100, 0], [0.75, 0.25, 0]),
        ("proportional", {}, 1, [900, 100, 0], [0.9, 0.1, 0]),
    ],
)
def test_mixture_shares_match_closed_form(mixture, keys, budget, sizes, shares):
    assert compute_mixture(replace(CONFIG, mixture=mixture, **keys), sizes, budget) == pytest.approx(shares)


def test_no_source_exceeds_max_epochs():
    random_ = random.Random(1)
    for mixture in ("proportional", "weights", "temperature", "unimax"):
        for _ in range(50):
            sizes = [random_.randrange(1, 1000) for _ in range(3)]
            budget = random_.randrange(1, 4 * sum(sizes))
            config = replace(CONFIG, mixture=mixture)
            shares = compute_mixture(config, sizes, budget)
            assert sum(shares) == pytest.approx(1)
            assert all(share * budget <= 4 * size * (1 + 1e-9) for share, size in zip(shares, sizes, strict=True))


def test_token_budget_is_converted_to_bytes_without_tokenizer():
    config = replace(CONFIG, mixture="unimax", mixture_tokens=1000, max_epochs=2)
    sources = [SimpleNamespace(label=label, tasks=()) for label in "ab"]
    shards = [{"source": "a", "bytes": 100, "tokens": None}, {"source": "b", "bytes": 10_000, "tokens": None}]
    entries, epochs = Finish(sources, {"clean": ["", ""]}, "", config)._mix(shards, has_tokens=False)
    assert epochs == [2.0, 0.38]  # 4,000 bytes, of which the first source may give 200.
    assert [entry["weight"] for entry in entries] == [0.05, 0.95]


def test_old_jobs_and_files_of_killed_processes_are_removed(tmp_path):
    for name in ("clean-1", "clean-0", "compare-1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lines.npy").touch()
    (tmp_path / "clean-1" / "bands.npy.0f3c.partial").touch()
    (tmp_path / "lock").touch()
    remove_old_work(tmp_path, {"clean": ["clean-1"], "compare": "compare-1"})
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert left == ["clean-1/lines.npy", "compare-1/lines.npy", "lock"]
