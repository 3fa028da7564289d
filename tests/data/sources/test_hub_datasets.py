"""Saved and Hub datasets: rows, fingerprints, the offline cache, and errors with remedies."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock

import datasets
import pytest
from datasets.packaged_modules.json.json import Json
from datasets.packaged_modules.parquet.parquet import Parquet
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError
from tests.rows import write_rows

from recipes_lib.data.sources.canonical import load_source
from recipes_lib.data.sources.hub_datasets import HubSource, load_hub, load_saved
from recipes_lib.data.sources.rows import RawRow, Source
from recipes_lib.errors import DataError

ROWS = [{"text": f"row {n}", "extra": None if n % 2 else {"a": n}} for n in range(2100)]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = ["train.jsonl"]


def texts(source: Source) -> list[str]:
    return [entry.columns["text"] for entry in source.rows() if isinstance(entry, RawRow)]


def test_saved_dataset_is_read_in_order_for_any_format(tmp_path: Path) -> None:
    datasets.Dataset.from_list(ROWS).with_format("numpy", columns=["text"]).save_to_disk(str(tmp_path), num_shards=3)
    source = load_saved(tmp_path, "saved", "train")
    entries = [entry for entry in source.rows() if isinstance(entry, RawRow)]
    assert [entry.columns["text"] for entry in entries] == [row["text"] for row in ROWS]
    assert [entry.columns.get("extra") for entry in entries] == [row["extra"] for row in ROWS]
    assert entries[7].where == "saved/data-00000-of-00003.arrow row 7"


def test_saved_dataset_dict_has_splits(tmp_path: Path) -> None:
    parts = {"train": datasets.Dataset.from_list(ROWS[:3]), "test": datasets.Dataset.from_list(ROWS[3:5])}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path))
    assert texts(load_source(str(tmp_path), split="test")) == ["row 3", "row 4"]
    with pytest.raises(DataError, match="no split `dev`; found `test`, `train`"):
        load_source(str(tmp_path), split="dev")


def test_saved_dataset_fingerprint_depends_on_rows(tmp_path: Path) -> None:
    for name, rows in {"a": ROWS[:3], "b": ROWS[:4]}.items():
        datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / name))
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    first, second, copy = (load_saved(tmp_path / name, name, "train").fingerprint() for name in ("a", "b", "copy"))
    assert first == copy
    assert first != second


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A Hub with the dataset ``name`` at ``COMMIT``; calling the fixture goes offline and keeps the cache."""
    file = tmp_path / "train.jsonl"
    write_rows(file, ({"text": row["text"]} for row in ROWS))
    cache = tmp_path / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    load = datasets.load_dataset_builder

    def load_builder(name: str, config: str | None = None, revision: str | None = None) -> datasets.DatasetBuilder:
        return Json(cache_dir=str(cache), dataset_name=name, hash=COMMIT, config_id="default", data_files=str(file))

    monkeypatch.setattr(datasets, "load_dataset_builder", load_builder)
    return lambda: monkeypatch.setattr(datasets, "load_dataset_builder", load)


@pytest.mark.usefixtures("hub")
def test_hub_dataset_is_equal_streamed_or_downloaded() -> None:
    downloaded, streamed = (load_hub("name", None, None, "train", streaming) for streaming in (False, True))
    assert texts(downloaded) == texts(streamed) == [row["text"] for row in ROWS]
    assert texts(streamed) == texts(streamed)
    assert downloaded.fingerprint() == streamed.fingerprint()
    assert downloaded.commit == COMMIT


def test_hub_fingerprint_covers_name_commit_config_and_split() -> None:
    source = HubSource("org/name", COMMIT, "default", "train", False, None)
    changes = {"name": "org/other", "commit": COMMIT[::-1], "config": "other", "split": "test"}
    others = [replace(source, **{key: value}) for key, value in changes.items()]
    assert len({source.fingerprint(), *(other.fingerprint() for other in others)}) == 5


def test_offline_cache_serves_only_its_commit_and_whole_files(hub: Callable[[], None], tmp_path: Path) -> None:
    load_hub("name", None, None, "train", False)
    hub()
    offline = load_hub("name", None, COMMIT, "train", False)
    streamed = load_hub("name", None, None, "train", True)
    assert texts(offline) == texts(streamed) == [row["text"] for row in ROWS]
    assert offline.commit == COMMIT
    with pytest.raises(DataError, match=f"the cached copy is commit {COMMIT}, not `v2`"):
        load_hub("name", None, "v2", "train", False)
    (file,) = tmp_path.glob("cache/**/*.arrow")
    content = file.read_bytes()
    file.unlink()  # The sources above have mapped it.
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match="if its cached copy is damaged, delete it"):
        load_hub("name", None, None, "train", False)


@pytest.mark.parametrize(
    ("listed", "revision"),
    [(FILES, None), (FILES, COMMIT), ([*FILES, "b.jsonl"], None), (None, None), (FILES, COMMIT[::-1])],
    ids=["newest", "pinned", "interrupted", "unlisted", "other commit"],
)
def test_download_of_hub_client_is_read_offline_if_complete(
    listed: list[str] | None, revision: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "prepared")
    repository = tmp_path / "datasets--org--name"
    for folder in ("blobs", "refs", "trees", f"snapshots/{COMMIT}"):
        (repository / folder).mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    write_rows(repository / "blobs" / "0", ({"text": row["text"]} for row in ROWS))
    (repository / "snapshots" / COMMIT / FILES[0]).symlink_to(repository / "blobs" / "0")
    if listed is not None:
        files = {file: {"size": 1, "blob_id": "0"} for file in listed}
        (repository / "trees" / f"{COMMIT}.json").write_text(json.dumps({"format_version": 1, "files": files}))
    if listed != FILES or revision == COMMIT[::-1]:
        with pytest.raises(DataError, match="go online"):
            load_hub("org/name", None, revision, "train", False)
        return
    downloaded, streamed = (load_hub("org/name", None, revision, "train", streaming) for streaming in (False, True))
    assert texts(downloaded) == texts(streamed) == [row["text"] for row in ROWS]
    online = HubSource("org/name", COMMIT, "default", "train", False, None)
    assert downloaded.fingerprint() == streamed.fingerprint() == online.fingerprint()


@pytest.mark.parametrize("streaming", [False, True])
def test_objects_of_mixed_types_are_read_from_the_hub(streaming, tmp_path, monkeypatch) -> None:
    file, rows = tmp_path / "train.jsonl", [{"calls": [{"arguments": one}]} for one in ({"x": 1}, {"x": ["a"]})]
    write_rows(file, rows)
    builder = Json(cache_dir=str(tmp_path / "cache"), dataset_name="name", hash=COMMIT, data_files=str(file))
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *_, **__: builder)
    source = load_hub("name", None, None, "train", streaming)
    assert [entry.columns for entry in source.rows() if isinstance(entry, RawRow)] == rows


@pytest.mark.parametrize("streaming", [False, True])
def test_media_of_hub_dataset_are_not_decoded(streaming: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, image = tmp_path / "train.parquet", datasets.Image()
    columns = {"image": image, "images": datasets.List(image), "parts": datasets.List({"image": image})}
    features = datasets.Features({"text": datasets.Value("string"), **columns})
    media = {"bytes": b"no image", "path": None}
    row = {"text": "a", "image": media, "images": [media], "parts": [{"image": media}]}
    datasets.Dataset.from_list([row], features=features).to_parquet(file)
    builder = Parquet(cache_dir=str(tmp_path / "cache"), dataset_name="name", hash=COMMIT, data_files=str(file))
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *_, **__: builder)
    assert texts(load_hub("name", None, None, "train", streaming)) == ["a"]


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("streaming", [False, True])
def test_unknown_hub_split_names_key(streaming: bool) -> None:
    with pytest.raises(DataError, match="dataset_test_split"):
        load_hub("name", None, None, "absent", streaming)


@pytest.mark.usefixtures("hub")
def test_slice_of_a_stream_names_its_key() -> None:
    with pytest.raises(DataError, match="dataset_streaming: false"):
        load_hub("name", None, None, "train[:1]", streaming=True)


def test_unknown_hub_dataset_offline_has_remedy() -> None:
    with pytest.raises(DataError, match=r"(?s)no-such-org/no-such-data: cannot be loaded from the Hub.*local file"):
        load_source("no-such-org/no-such-data")


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (datasets.exceptions.DatasetNotFoundError("Dataset 'a/b' is a gated dataset on the Hub."), "accept its terms"),
        (datasets.exceptions.DatasetNotFoundError("Dataset 'a/b' doesn't exist on the Hub"), "hf auth login"),
        (datasets.exceptions.DatasetNotFoundError("Revision 'v9' doesn't exist"), "dataset_revision"),
        (ValueError("Config name is missing.\nPlease pick one among the available configs: ['a']"), "dataset_config"),
        (ValueError("BuilderConfig 'x' not found. Available: ['a']"), "dataset_config"),
        (RuntimeError("Dataset scripts are no longer supported, but found b.py"), "refs/convert/parquet"),
        (ConnectionError("Couldn't reach 'a/b' on the Hub (OfflineModeIsEnabled)"), "go online"),
        (datasets.exceptions.DatasetGenerationError("An error occurred"), "spelling"),
        (OSError(errno.EROFS, "Read-only file system", "/cache/a.lock"), "mount options"),
        (HfHubHTTPError("refused", response=MagicMock(status_code=429)), "wait some minutes"),
    ],
)
def test_hub_error_has_remedy(error: Exception, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(datasets, "load_dataset_builder", refuse)
    with pytest.raises(DataError) as caught:
        load_hub("a/b", None, None, "train", False)
    (problem,) = caught.value.problems
    assert remedy in problem.remedy
    assert "\n" not in problem.found
    assert "OfflineMode" not in problem.found
    assert ("['a']" in str(error)) == ("['a']" in problem.found)


def test_reason_below_a_heading_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(tmp_path / "a.jsonl", [{"text": "a"}])
    write_rows(tmp_path / "b.jsonl", [{"other": 1}])
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    load = datasets.load_dataset_builder
    for files, words in ((["a.jsonl", "b.jsonl"], "Couldn't cast other"), (["a.jsonl", "c.jsonl"], "JSON parse error")):
        (tmp_path / "c.jsonl").write_text('{"text": "b"}\n{"text"')
        paths = [str(tmp_path / file) for file in files]
        monkeypatch.setattr(datasets, "load_dataset_builder", lambda *_, **__: load("json", data_files=paths))  # noqa: B023
        with pytest.raises(DataError, match=words):
            load_hub("name", None, None, "train", False)
