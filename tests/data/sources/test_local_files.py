"""Local files: splits, against ``datasets``; decompression; fingerprints and cached digests."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import lzma
import os
import random
import shutil
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants
from tests.rows import read_source

from recipes_lib.config.loader import load_config
from recipes_lib.data.sources import local_files
from recipes_lib.data.sources.canonical import load_source
from recipes_lib.data.sources.local_files import FileSource, compute_digest, load_files, open_file
from recipes_lib.data.sources.rows import RawRow
from recipes_lib.errors import ConfigError, DataError, ReadFailedError

LAYOUTS = [
    ["a.jsonl"],
    ["b.jsonl", "a.jsonl", "sub/c.jsonl", ".hidden.jsonl", "__pycache__/x.jsonl", "README.md"],
    ["train.jsonl", "test.jsonl"],
    ["train_0.jsonl", "train_1.jsonl", "dev.jsonl", "my-eval.jsonl"],
    ["data/train.jsonl", "data/validation.jsonl"],
    ["train/1.jsonl", "train/2.jsonl", "testing/1.jsonl"],
    ["data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl", "data/extra-00000-of-00001-ab12.jsonl"],
    ["pretrain.jsonl", "latest.jsonl"],
]


@pytest.mark.parametrize("names", LAYOUTS, ids=lambda names: names[0])
def test_splits_agree_with_datasets(names: list[str], tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('{"text": "a"}\n')
    patterns = datasets.data_files.get_data_patterns(str(tmp_path))
    theirs = datasets.data_files.DataFilesDict.from_patterns(patterns, str(tmp_path), allowed_extensions=[".jsonl"])
    for split, files in theirs.items():
        ours = load_files(tmp_path, str(tmp_path), str(split))
        assert sorted(map(str, ours.files.values())) == sorted(files)
        assert list(ours.files) == sorted(ours.files)
    with pytest.raises(DataError, match="no split `absent`"):
        load_files(tmp_path, str(tmp_path), "absent")


def test_single_file_is_train_split(tmp_path: Path) -> None:
    path = tmp_path / "test.jsonl"
    path.touch()
    assert list(load_files(path, "test.jsonl", "train").files) == ["test.jsonl"]
    with pytest.raises(DataError, match="test_split_size"):
        load_files(path, "test.jsonl", "test")
    with pytest.raises(DataError, match=r"no split `train\[:1%\]`; found `train`\n.*`repeat` in `dataset_mixture`"):
        load_files(path, "test.jsonl", "train[:1%]")


CARD = """---
license: mit
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: [main/test-*, "./more/**/test.jsonl"]
- config_name: other
  data_dir: other
  data_files: "[a-m]?.jsonl"
- config_name: named
  data_dir: named
---
# About
"""


@pytest.fixture
def card_folder(tmp_path: Path) -> Path:
    """A folder as cloned from the Hub, whose dataset card has three configurations."""
    files = ("main/train-00000-of-00001", "main/test-00000-of-00001", "more/a/b/test", "other/ab", "other/zz")
    for name in (*files, "named/train", "named/test", "unlisted"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": name}) + "\n")
    (tmp_path / "README.md").write_text(CARD)
    return tmp_path


@pytest.mark.parametrize(
    ("config", "splits"), [("main", ["train", "test"]), ("other", ["train"]), ("named", ["train", "test"])]
)
def test_dataset_card_agrees_with_datasets(config: str, splits: list[str], card_folder: Path) -> None:
    theirs = datasets.load_dataset(str(card_folder), config, cache_dir=str(card_folder / ".cache"))
    assert list(theirs) == splits
    for split in splits:
        rows = load_source(str(card_folder), config=config, split=split).rows()
        assert [entry.columns["text"] for entry in rows if isinstance(entry, RawRow)] == theirs[split]["text"]


@pytest.mark.parametrize(
    ("change", "config", "words"),
    [
        (("", ""), None, r"several configurations, and no default one\n.*dataset_config.*main, other, named"),
        (("", ""), "mian", "no configuration `mian`"),
        (("main/train-*", "main/part-*"), "main", "no data file matches `main/part-\\*`"),
        (("main/train-*", "../*"), "main", r"no data file matches `\.\./\*`"),
        (("main/train-*", "main/**.jsonl"), "main", "Invalid pattern"),
        (("data_dir: named", "data_dir: /etc"), "named", "`data_dir` outside of the folder"),
    ],
    ids=["no default", "unknown", "missing file", "file outside", "invalid pattern", "folder outside"],
)
def test_dataset_card_problem_is_located(change, config, words, card_folder) -> None:
    (card_folder / "README.md").write_text(CARD.replace(*change))
    with pytest.raises(DataError, match=words) as caught:
        load_source(str(card_folder), config=config)
    assert caught.value.problems[0].where == str(card_folder)


@pytest.mark.parametrize("is_folder", [True, False])
def test_dataset_config_is_a_key_of_folders_and_not_of_files(is_folder: bool, card_folder: Path) -> None:
    name = card_folder if is_folder else card_folder / "unlisted.jsonl"
    keys = {"model_name_or_path": "a/b", "output_dir": "out", "dataset_name": name, "dataset_config": "main"}
    argv = [f"--{key}={value}" for key, value in keys.items()]
    if is_folder:
        assert load_config("sft", argv).data.dataset_config == "main"
    else:
        with pytest.raises(ConfigError, match="the dataset is a local file"):
            load_config("sft", argv)


def test_default_configuration_of_dataset_card_is_read(card_folder: Path) -> None:
    (card_folder / "README.md").write_text(CARD.replace("config_name: other", "config_name: other\n  default: true"))
    (entry,) = load_source(str(card_folder)).rows()
    assert isinstance(entry, RawRow)
    assert entry.columns == {"text": "other/ab"}


@pytest.mark.parametrize("card", ["---\nconfigs: 3\n---\n", "---\n: [\n---\n", "configs: []", "---\n3\n---\n"])
def test_readme_without_configurations_is_ignored(card: str, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "README.md").write_text(card)
    assert len(list(load_source(str(tmp_path)).rows())) == 1
    with pytest.raises(DataError, match="this is a local path"):
        load_source(str(tmp_path), config="main")


@pytest.mark.parametrize(("loop", "onto"), [("itself", "."), ("sub/above", "..")])
def test_linked_files_are_read_once(loop: str, onto: str, tmp_path: Path) -> None:
    data, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    for path in (data / "a.jsonl", data / "sub" / "b.jsonl", elsewhere / "c.jsonl"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(f'{{"text": "{path.stem}"}}\n')
    for link, target in {
        loop: onto,
        "sub/beside": "../../elsewhere",
        "elsewhere": "../elsewhere",
        "z.jsonl": "a.jsonl",
    }.items():
        (data / link).symlink_to(target)
    source = load_files(data, "data", "train")
    assert list(source.files) == ["data/a.jsonl", "data/elsewhere/c.jsonl", "data/sub/b.jsonl"]
    assert [entry.columns["text"] for entry in source.rows() if isinstance(entry, RawRow)] == ["a", "c", "b"]
    for split in ("train", "test"):
        (elsewhere / f"{split}.jsonl").symlink_to("../data/a.jsonl")
    (elsewhere / "c.jsonl").unlink()
    assert [list(load_files(elsewhere, "e", split).files) for split in ("train", "test")] == [
        ["e/train.jsonl"],
        ["e/test.jsonl"],
    ]


def test_cache_of_the_hub_is_no_dataset(tmp_path: Path) -> None:
    for commit in ("1" * 40, "2" * 40):
        snapshot = tmp_path / "datasets--a--b" / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (snapshot / "train.jsonl").write_text(json.dumps({"text": commit}) + "\n")
        (entry,) = load_source(str(snapshot)).rows()
        assert isinstance(entry, RawRow)
        assert entry.columns["text"] == commit
    for folder in (tmp_path, tmp_path / "datasets--a--b", snapshot.parent):
        with pytest.raises(DataError, match=r"2 snapshots, first .*1{40}\n.*folder of one snapshot"):
            load_source(str(folder))


def test_named_pipe_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    os.mkfifo(tmp_path / "b.jsonl")
    assert list(load_files(tmp_path, "data", "train").files) == ["data/a.jsonl"]


def test_files_of_unknown_kinds_are_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a.jsonl", "b/c.jsonl.zip", "_SUCCESS", "report.html"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert [list(load_files(tmp_path, "rows", "train").files) for _ in range(2)] == [["rows/a.jsonl"]] * 2
    assert caplog.messages == ["rows: files of unknown kinds are ignored: _SUCCESS, b/c.jsonl.zip"]


def test_broken_link_is_located_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").symlink_to("a.jsonl")
    with pytest.raises(DataError) as caught:
        list(load_files(tmp_path, "data", "train").rows())
    assert [problem.where for problem in caught.value.problems] == ["data/a.jsonl"]


def test_all_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(b'{"text": "b"}\n')[:-9])
    files = {name: tmp_path / name for name in ("a.jsonl", "b.jsonl", "c.jsonl", "d.jsonl.gz")}
    rows = []
    with pytest.raises(ReadFailedError) as caught:
        rows.extend(FileSource("x", files).rows())
    assert [problem.where for problem in caught.value.problems] == ["a.jsonl", "c.jsonl", "d.jsonl.gz"]
    assert len(rows) >= 1


def test_fingerprint_depends_on_bytes_and_order_not_names(tmp_path: Path) -> None:
    for name, content in {"a": b"1\n", "b": b"2\n"}.items():
        (tmp_path / f"{name}.jsonl").write_bytes(content)
    shutil.copytree(tmp_path, tmp_path / "moved")
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    fingerprint = FileSource("x", {"a": first, "b": second}).fingerprint()
    moved = load_files(tmp_path / "moved", "moved", "train")
    assert moved.fingerprint() == fingerprint
    assert FileSource("x", {"a": second, "b": first}).fingerprint() != fingerprint
    assert FileSource("x", {"a": first}).fingerprint() != fingerprint
    assert FileSource("x", {"a": first.rename(tmp_path / "a.txt"), "b": second}).fingerprint() != fingerprint
    second.write_bytes(b"3\n")
    assert FileSource("x", {"a": tmp_path / "a.txt", "b": second}).fingerprint() != fingerprint


def test_text_documents_change_fingerprint_of_text_files_only(tmp_path: Path) -> None:
    for suffix in ("txt", "md", "jsonl"):
        (tmp_path / f"d.{suffix}").write_text('{"text": "one"}\n\n{"text": "two"}\n')
    for suffix, num_fingerprints in {"txt": 3, "md": 3, "jsonl": 1}.items():
        path = tmp_path / f"d.{suffix}"
        sources = [load_files(path, "d", "train", unit) for unit in ("line", "paragraph", "file")]
        assert len({source.fingerprint() for source in sources}) == num_fingerprints
        assert [len(list(source.rows())) for source in sources] == ([2, 2, 1] if num_fingerprints == 3 else [2, 2, 2])
        assert sources[0].fingerprint() == load_files(path, "d", "train").fingerprint()


COMPRESS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": pa.Codec("zstd").compress}


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("has_suffix", [True, False])
def test_compressed_file_is_read_to_last_member(suffix: str, has_suffix: bool, tmp_path: Path) -> None:
    parts = [b'{"text": "%d"}\n' % number * 5_000 for number in range(2)]
    path = tmp_path / ("d.jsonl" + suffix * has_suffix)
    path.write_bytes(b"".join(bytes(COMPRESS[suffix](part)) for part in parts))
    with open_file(path) as file:
        assert file.read() == b"".join(parts)
    assert len(list(load_files(path, "d", "train").rows())) == 10_000


@pytest.mark.parametrize("suffix", COMPRESS)
def test_compressed_parquet_file_is_read(suffix: str, tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a", "b"]}), tmp_path / "d.parquet")
    path = tmp_path / f"d.parquet{suffix}"
    path.write_bytes(bytes(COMPRESS[suffix]((tmp_path / "d.parquet").read_bytes())))
    assert [row.text for row in read_source(load_source(str(path)))] == ["a", "b"]


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("damage", ["cut", "none at all"])
def test_damaged_compressed_file_is_located_error(suffix: str, damage: str, tmp_path: Path) -> None:
    path = tmp_path / f"d.jsonl{suffix}"
    whole = bytes(COMPRESS[suffix](random.Random(0).randbytes(100_000)))
    path.write_bytes(whole[:50_000] if damage == "cut" else b'{"text": "a"}\n')
    with pytest.raises(DataError) as caught:
        list(load_files(path, "d", "train").rows())
    problem = caught.value.problems[-1]
    assert (problem.where, f"not a whole {suffix} file" in problem.found) == ("d", True)
    assert "decompress" in problem.remedy


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.jsonl.zst"])
def test_git_lfs_pointer_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 3\n")
    with pytest.raises(DataError, match="git lfs pull"):
        list(load_files(tmp_path / name, name, "train").rows())


@pytest.mark.parametrize(("name", "kind"), [("a.tar.gz", ".tar.gz"), ("a.xlsx", ".xlsx"), ("a.warc.zst", ".warc.zst")])
def test_unknown_suffix_lists_supported_ones(name: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    with pytest.raises(DataError, match=rf"unknown kind of file `{kind}`\s+convert.*\.parquet.*\.xz.*`recipes clean`"):
        load_files(tmp_path / name, name, "train")


def test_pipe_or_device_is_refused(tmp_path):
    """As of `dataset_name: <(zcat d.jsonl.gz)` in a shell, which can be read once."""
    os.mkfifo(tmp_path / "pipe.jsonl")
    for path in (tmp_path / "pipe.jsonl", Path("/dev/null")):
        with pytest.raises(DataError, match=r"is a pipe or a device.*\s+write its rows to a file"):
            load_files(path, str(path), "train")


@pytest.fixture
def large(tmp_path, monkeypatch):
    """A file above ``MIN_BYTES``, last changed before ``_SETTLED_NS``."""
    monkeypatch.setattr(local_files, "MIN_BYTES", 10)
    monkeypatch.setattr(local_files, "_SETTLED_NS", -1)
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "cache"))
    path = tmp_path / "rows with spaces.jsonl"
    path.write_bytes(b"0123456789")
    return path


@pytest.fixture
def num_reads(monkeypatch):
    """One entry per full read of a file."""
    reads = []
    monkeypatch.setattr(
        local_files.hashlib, "file_digest", lambda file, kind: reads.append(1) or hashlib.new(kind, file.read())
    )
    return reads


def sha256(path):
    return hashlib.sha256(path.read_bytes()).digest()


def test_digest_of_large_file_is_cached(large, num_reads):
    digests = [compute_digest(large) for _ in range(3)]
    assert digests == [sha256(large)] * 3
    assert len(num_reads) == 1


def test_digest_of_small_file_is_not_cached(large, tmp_path, num_reads):
    large.write_bytes(b"012345678")
    assert [compute_digest(large) for _ in range(2)] == [sha256(large)] * 2
    assert len(num_reads) == 2
    assert not (tmp_path / "cache").exists()


def test_changed_bytes_with_equal_mtime_are_detected(large):
    compute_digest(large)
    times = large.stat()
    large.write_bytes(b"9876543210")
    os.utime(large, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert compute_digest(large) == sha256(large)


def test_replaced_file_is_detected(large, tmp_path):
    compute_digest(large)
    other = tmp_path / "other"
    other.write_bytes(b"9876543210")
    other.replace(large)
    assert compute_digest(large) == sha256(large)


def test_digest_of_recently_changed_file_is_not_cached(large, num_reads, monkeypatch):
    monkeypatch.setattr(local_files, "_SETTLED_NS", 3600 * 10**9)
    compute_digest(large)
    compute_digest(large)
    assert len(num_reads) == 2


@pytest.mark.parametrize("content", ["", "{", "[]", '{"sha256": 1}', '{"sha256": "zz"}', "null"])
def test_damaged_cache_entry_is_ignored(large, tmp_path, content):
    compute_digest(large)
    (entry,) = (tmp_path / "cache").rglob("*.json")
    entry.write_text(content)
    assert compute_digest(large) == sha256(large)


def test_unwritable_cache_is_ignored(large, tmp_path):
    (tmp_path / "cache").write_text("a file")
    assert compute_digest(large) == sha256(large)


def test_digest_of_missing_file_raises(tmp_path):
    with pytest.raises(FileNotFoundError):
        compute_digest(tmp_path / "nothing")
