"""Exact and near duplicates, and repeated lines, against brute force."""

import gc
import random
import resource
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.corpus.texts import jaccard, keep_first, make_text, vary

from recipes_lib.config.corpus_keys import CorpusConfig
from recipes_lib.corpus import duplicates
from recipes_lib.corpus.duplicates import (
    EXACT,
    KEPT,
    NEAR,
    Hashes,
    HashFolder,
    HashTable,
    count_compared_bytes,
    find_duplicates,
    find_repeated_lines,
    hash_lines,
    split_lines,
)
from recipes_lib.errors import explain_refusal

CONFIG = CorpusConfig(repeated_lines="apply")


def build_table(folder, texts, config=CONFIG, num_tasks=1, label="a"):
    folder.mkdir(exist_ok=True)
    for rank, chunk in enumerate(np.array_split(np.arange(len(texts)), num_tasks)):
        hashes = Hashes(config)
        for at in chunk:
            hashes.add(texts[at])
        hashes.write(folder, rank)
    return HashTable([HashFolder(folder, num_tasks, label)])


def plant(seed=0, num=120):
    """Return texts with exact copies and variants of similarity 0.5 to 0.97, shuffled."""
    random_ = random.Random(seed)
    texts = [make_text(random_, random_.randrange(60, 200)) for _ in range(num)]
    copies = [texts[at] for at in random_.sample(range(num), 15)]
    variants = [vary(random_, random_.choice(texts), random_.choice((1, 2, 3, 5, 8))) for _ in range(80)]
    planted = [*texts, *copies, *variants]
    random_.shuffle(planted)
    return planted


@pytest.fixture(scope="module")
def planted():
    return plant()


def test_shingles_are_sorted_instead_of_hashed(tmp_path, planted, monkeypatch):
    table, unique = build_table(tmp_path, planted), np.unique
    expected = table.read_shingles(3)

    def sort(values, **flags):
        assert flags, "without a flag, numpy hashes, which takes fifty times as long"
        return unique(values, **flags)

    monkeypatch.setattr(np, "unique", sort)
    np.testing.assert_array_equal(table.read_shingles(3), expected)
    np.testing.assert_array_equal(expected, sorted(set(expected.tolist())))


def test_number_of_tasks_is_not_limited_by_open_files(tmp_path, planted):
    expected = find_duplicates(build_table(tmp_path / "one", planted), CONFIG)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_open + 300, limits[1]))
    try:
        # Of six arrays each, of which 256 are open at a time.
        table = build_table(tmp_path / "many", planted, num_tasks=70)
        found = find_duplicates(table, CONFIG)
        find_repeated_lines(table, found.status, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    np.testing.assert_array_equal(found.status, expected.status)
    np.testing.assert_array_equal(found.kept_as, expected.kept_as)


def test_truncated_array_is_reported_as_full_disk(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # numpy raises the same error, without a number or name, as on a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
    try:
        with pytest.raises(OSError, match="requested") as caught:
            duplicates.save_array(tmp_path / "a.npy", np.zeros(10_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(explain_refusal(caught.value)).startswith(f"{tmp_path / 'a.npy'}: the disk is full")
    assert list(tmp_path.iterdir()) == []


def test_one_row_per_band_matches_brute_force(tmp_path, planted):
    config = replace(CONFIG, near_duplicates_bands=64, near_duplicates_rows=1)
    found = find_duplicates(build_table(tmp_path / "h", planted, config), config)
    assert np.flatnonzero(found.status == KEPT).tolist() == keep_first(planted, 0.8)


@pytest.mark.parametrize(("num_slices", "across"), [(1, "source"), (16, "corpus")])
def test_peak_memory_matches_estimate(tmp_path, monkeypatch, num_slices, across):
    random_, num, num_tasks = np.random.default_rng(0), 100_000, 20
    bands = random_.integers(0, 1 << 63, (num, CONFIG.near_duplicates_bands), np.uint64)
    bands[1::100] = bands[::100]  # Two thousand candidate pairs.
    arrays = {
        "exact": random_.integers(0, 1 << 63, (num, 2), np.uint64),
        "bands": bands,
        "num_shingles": np.full(num, 4),
        "shingles": random_.integers(0, 1 << 32, 4 * num, np.uint32),
        "num_lines": np.zeros(num, np.int64),
        "lines": np.zeros(0, np.uint64),
    }
    for name, array in arrays.items():
        for task, part in enumerate(np.array_split(array, num_tasks)):
            np.save(tmp_path / f"{task:05d}.{name}.npy", part)
    monkeypatch.setattr(duplicates, "_SLICE_ROWS", num // num_slices)
    monkeypatch.setattr(duplicates, "_BLOCK_ROWS", num // 16)
    find_duplicates(build_table(tmp_path / "few", ["one two three four five six"] * 2), CONFIG)
    tracemalloc.start()
    try:
        config = replace(CONFIG, duplicates_across=across)
        find_duplicates(HashTable([HashFolder(tmp_path, num_tasks, "a")]), config)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert 0.6 < peak / count_compared_bytes(num) <= 1, peak / num


def test_hashes_of_a_task_take_the_memory_of_their_arrays(tmp_path):
    """Not of an object for each document: 64 MB of short ones are a million."""
    hashes, num = Hashes(CONFIG), 700
    hashes.add("the first document builds the tables of characters")
    tracemalloc.start()
    try:
        for number in range(num):
            hashes.add(f"document {number} of these few words")
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    hashes.write(tmp_path, 0)
    assert taken < 1.3 * sum(file.stat().st_size for file in tmp_path.iterdir())


def test_memory_of_candidates_does_not_grow_with_their_length(tmp_path, monkeypatch):
    monkeypatch.setattr(duplicates, "_CACHE_BYTES", 1 << 17)
    random_ = random.Random(0)
    books = [" ".join(f"w{random_.randrange(10**6)}" for _ in range(8000)) for _ in range(50)]
    table = build_table(tmp_path, [text for book in books for text in (f"{book} one", f"{book} two")])
    tracemalloc.start()
    found = find_duplicates(table, CONFIG)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (found.status == NEAR).sum() == 50
    assert peak < 4 * table.num_shingles / 2


def test_removed_document_repeats_a_kept_one(tmp_path, planted):
    found = find_duplicates(build_table(tmp_path / "h", planted), CONFIG)
    removed = np.flatnonzero(found.status != KEPT)
    assert len(removed) > 40
    for at in removed:
        kept_as = found.kept_as[at]
        assert kept_as < at
        if found.status[at] == EXACT:
            assert planted[kept_as] == planted[at]
        else:
            assert found.status[kept_as] == KEPT
            assert jaccard(planted[kept_as], planted[at]) >= 0.8
    expected = set(range(len(planted))) - set(keep_first(planted, 0.8))
    assert len(expected - set(removed.tolist())) <= 0.06 * len(expected)


@pytest.mark.parametrize("seed", [1, 2])
def test_kept_texts_are_independent_of_order(tmp_path, seed):
    random_ = random.Random(seed)
    texts = [make_text(random_, 100) for _ in range(40)]
    families = [text for text in texts for _ in range(random_.randrange(1, 4))]
    random_.shuffle(families)
    found = find_duplicates(build_table(tmp_path / "h", families), CONFIG)
    kept = [families[at] for at in np.flatnonzero(found.status == KEPT)]
    assert sorted(kept) == sorted(texts)


def test_unverified_clusters_are_connected_components(tmp_path):
    random_ = random.Random(3)
    chain = [make_text(random_, 200)]
    for _ in range(6):
        chain.append(vary(random_, chain[-1], 3))
    config = replace(CONFIG, near_duplicates_bands=100, near_duplicates_rows=4)
    table = build_table(tmp_path / "h", chain, config)
    assert jaccard(chain[0], chain[-1]) < 0.6
    loose = find_duplicates(table, replace(config, near_duplicates_verify=False))
    assert loose.status.tolist() == [KEPT] + [NEAR] * 6
    verified = find_duplicates(table, config)
    assert np.flatnonzero(verified.status == KEPT).tolist() == keep_first(chain, 0.8)
    assert (verified.status == KEPT).sum() > 1


def test_texts_without_shingles_are_not_duplicates(tmp_path):
    found = find_duplicates(build_table(tmp_path / "h", ["one two", "three", "one two", "a b c d"]), CONFIG)
    assert found.status.tolist() == [KEPT, KEPT, EXACT, KEPT]
    loose = replace(CONFIG, near_duplicates_verify=False)
    assert (
        find_duplicates(build_table(tmp_path / "l", ["one two", "three"], loose), loose).status.tolist() == [KEPT] * 2
    )


def test_duplicates_follow_the_enabled_steps_and_the_sources(tmp_path):
    text = make_text(random.Random(0), 90)
    for label in "ab":
        build_table(tmp_path / label, [text, vary(random.Random(1), text, 1), text])
    table = HashTable([HashFolder(tmp_path / label, 1, label) for label in "ab"])
    for keys, expected in (
        ({}, [KEPT, NEAR, EXACT, EXACT, EXACT, EXACT]),
        ({"duplicates_across": "source"}, [KEPT, NEAR, EXACT] * 2),
        ({"duplicates_across": "source", "near_duplicates_verify": False}, [KEPT, NEAR, EXACT] * 2),
        ({"exact_duplicates": "off"}, [KEPT, *[NEAR] * 5]),
        ({"near_duplicates": "off"}, [KEPT, KEPT, EXACT, EXACT, EXACT, EXACT]),
    ):
        found = find_duplicates(table, replace(CONFIG, **keys))
        assert found.status.tolist() == expected
    assert found.kept_as.tolist() == [0, 1, 0, 0, 1, 0]


def test_number_of_compared_candidates_is_bounded(tmp_path, monkeypatch):
    random_ = random.Random(0)
    template = make_text(random_, 60)
    pages = [f"{template} {make_text(random_, 30)}" for _ in range(60)]
    config = replace(CONFIG, near_duplicates_bands=50, near_duplicates_rows=1)
    table = build_table(tmp_path / "h", [*pages, *pages], replace(config, exact_duplicates="off"))
    monkeypatch.setattr(duplicates, "_MAX_COMPARISONS", 5)
    collected = []
    monkeypatch.setattr(
        duplicates, "sorted", lambda found: collected.append(len(found)) or sorted(found), raising=False
    )
    selection = duplicates._KeepFirst(table, config, None)
    removed = dict(selection.find_removed(np.arange(120)))
    assert removed == {60 + at: at for at in range(5)}
    # At most the bound from every band, for any number of kept pages.
    assert 5 < max(collected) <= 50 * 5


def test_result_is_independent_of_slice_size(tmp_path, planted, monkeypatch):
    lines = ["\n".join([text[:50], "all rights reserved"]) for text in planted]
    table = build_table(tmp_path / "h", lines, num_tasks=3)
    whole = find_duplicates(table, CONFIG)
    repeated = find_repeated_lines(table, whole.status, 10)
    monkeypatch.setattr(duplicates, "_SLICE_ROWS", 50)
    sliced = find_duplicates(table, CONFIG)
    assert whole.status.tolist() == sliced.status.tolist()
    assert [a.tolist() for a in repeated] == [a.tolist() for a in find_repeated_lines(table, sliced.status, 10)]


@pytest.mark.parametrize("unit", ["line", "paragraph"])
def test_repeated_lines_count_once_per_kept_document(tmp_path, unit):
    between = "\n" if unit == "line" else "\n\n"
    texts = [between.join(["menu", f"text {at}", "menu", ""]) for at in range(5)] + [between.join(["foot", "foot"])]
    config = replace(CONFIG, repeated_lines_unit=unit)
    table = build_table(tmp_path / "h", [*texts, texts[0]], config)
    status = find_duplicates(table, config).status
    for least, expected in ((5, ["menu"]), (6, [])):
        hashes, firsts = find_repeated_lines(table, status, least)
        assert hashes.tolist() == [hash_lines(line, unit)[0] for line in expected]
        assert firsts.tolist() == [0] * len(expected)


def test_split_lines_round_trips():
    for unit, between in (("line", "\n"), ("paragraph", "\n\n")):
        text = "a\n\n\nb \n c\n"
        assert between.join(split_lines(text, unit)) == text
        assert len(hash_lines(text, unit)) == len(split_lines(text, unit))
