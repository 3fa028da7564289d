"""Streamed packs, against the prepared set: content, order by seed and epoch, and resumption."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from itertools import islice

import pytest
import torch
from accelerate import skip_first_batches
from torch.utils.data import DataLoader

from recipes_lib.data.packed import encoding
from recipes_lib.data.packed import training_data as streaming
from recipes_lib.data.packed.collators import PackedCollator
from recipes_lib.data.packed.training_data import load_training_data
from recipes_lib.errors import DataError

ROWS_PER_WINDOW = 15
build_train_stream = partial(streaming.build_train_stream, epochs=range(1))


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    for module in (encoding, streaming):
        monkeypatch.setattr(module, "ROWS_PER_CHUNK", ROWS_PER_WINDOW)


@pytest.fixture
def config(build_config):
    return build_config(max_length=128, dataset_streaming=True)


def listed(packs) -> list[dict[str, list]]:
    return [{name: pack[name].tolist() for name in pack} for pack in packs]


def row_ids(packs) -> list[int]:
    return [int(row_id) for pack in packs for row_id in pack["row_ids"]]


def test_stream_yields_every_row_once_in_window_order(config, tiny_tokenizer):
    ids = row_ids(build_train_stream(config, tiny_tokenizer))
    assert sorted(ids) == list(range(40))
    assert [number // ROWS_PER_WINDOW for number in ids] == sorted(number // ROWS_PER_WINDOW for number in range(40))


def test_stream_order_depends_only_on_seed_and_epoch(build_config, tiny_tokenizer):
    def order(seed: int, epoch: int) -> list[int]:
        config = build_config(max_length=128, dataset_streaming=True, seed=seed)
        stream = build_train_stream(config, tiny_tokenizer, epochs=range(epoch, epoch + 1))
        first = row_ids(stream)
        assert row_ids(stream) == first
        return first

    orders = {(seed, epoch): order(seed, epoch) for seed in (0, 1) for epoch in (0, 1, 2)}
    assert len({tuple(found) for found in orders.values()}) == len(orders)
    assert order(1, 2) == orders[1, 2]


def test_epochs_of_stream_follow_each_other_without_end(config, tiny_tokenizer):
    epochs = [listed(build_train_stream(config, tiny_tokenizer, epochs=range(at, at + 1))) for at in range(3)]
    packs = [pack for epoch in epochs for pack in epoch]
    assert listed(islice(streaming.build_train_stream(config, tiny_tokenizer), len(packs))) == packs


@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("num_seen", [1, 4, 7])
def test_stream_resumes_from_state(config, tiny_tokenizer, epoch, num_seen):
    epochs = range(epoch, epoch + 1)
    stream = build_train_stream(config, tiny_tokenizer, epochs=epochs)
    packs = iter(stream)
    for _ in range(num_seen):
        next(packs)
    state = stream.state_dict()
    again = build_train_stream(config, tiny_tokenizer, epochs=epochs)
    again.load_state_dict(state)
    assert listed(again) == listed(packs)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_skip_batches_resumes_stream(config, tiny_tokenizer, num_workers):
    def load() -> DataLoader:
        stream = build_train_stream(config, tiny_tokenizer, epochs=range(2))
        collator = PackedCollator(pad_token_id=tiny_tokenizer.pad_token_id)
        return DataLoader(stream, batch_size=2, collate_fn=collator, num_workers=num_workers)

    whole = [batch["input_ids"] for batch in load()]
    rest = [batch["input_ids"] for batch in skip_first_batches(load(), 2)]
    assert len(rest) == len(whole) - 2 > 0
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(rest, whole[2:], strict=True))


def test_held_out_stream_rows_are_ordered_and_excluded(build_config, write_rows, make_chats, tiny_tokenizer):
    def build(start: int, **options):
        path = write_rows(f"held_out_{start}.jsonl", make_chats(20, start=start))
        return build_config(max_length=128, dataset_streaming=True, dataset_test_split=str(path), **options)

    apart, shared = build(100), build(30)
    assert sorted(row_ids(load_training_data(apart, tiny_tokenizer).eval)) == list(range(20))
    assert sorted(row_ids(build_train_stream(apart, tiny_tokenizer))) == list(range(40))
    with pytest.raises(DataError, match=r"held-out rows too: .*train\.jsonl:31 = .*held_out_30\.jsonl:1"):
        list(build_train_stream(shared, tiny_tokenizer))
    allowed = build(30, allow_eval_overlap=True)
    assert len(row_ids(build_train_stream(allowed, tiny_tokenizer))) == 40


def test_overlong_stream_rows_are_reported_or_truncated(build_config, tiny_tokenizer):
    with pytest.raises(DataError, match=r"train.jsonl:5: \d+ tokens, max_length is 55"):
        list(build_train_stream(build_config(max_length=55, dataset_streaming=True), tiny_tokenizer))
    cut = build_config(max_length=55, dataset_streaming=True, overlong="truncate", max_truncated_fraction=0.5)
    assert max(len(pack["input_ids"]) for pack in build_train_stream(cut, tiny_tokenizer)) <= 55
    strict = build_config(max_length=40, dataset_streaming=True, overlong="truncate", max_truncated_fraction=0)
    with pytest.raises(DataError, match="max_truncated_fraction"):
        list(build_train_stream(strict, tiny_tokenizer))


def test_first_window_audit_equals_prepared_audit(config, tiny_tokenizer):
    data = load_training_data(config, tiny_tokenizer)
    assert data.audit.num_rows == ROWS_PER_WINDOW
    assert data.audit.stop_fraction == 1
    assert all(finding.severity == "ok" for finding in data.findings)


@pytest.mark.parametrize(
    ("at", "change", "is_refused"),
    [(0, {"weight": 0}, True), (120, {"weight": 0}, False), (120, {"content": "word " * 200}, False)],
)
def test_audit_limits_are_for_all_rows_so_far(
    build_config, write_rows, make_chats, tiny_tokenizer, at, change, is_refused
):
    rows = make_chats(121)  # The last one is alone in its window.
    rows[at]["messages"][-1] |= change
    keys = {"dataset_name": str(write_rows(rows=rows)), "max_length": 128, "overlong": "drop"}
    stream = build_train_stream(build_config(**keys, dataset_streaming=True), tiny_tokenizer)
    with pytest.raises(DataError, match=r"1 of 15 rows .* hold no target token") if is_refused else nullcontext():
        assert sorted(row_ids(stream)) == list(range(120))


def test_share_of_rows_with_an_end_is_of_all_rows_so_far(
    build_config, write_rows, make_chats, tiny_tokenizer, tmp_path
):
    rows = make_chats(ROWS_PER_WINDOW + 1)  # The last one is alone in its window, and ends with a question.
    rows[-1]["messages"].append({"role": "user", "content": "And now?"})
    template = tmp_path / "open.jinja"
    end = "{{ '<|im_end|>' if m.role == 'assistant' }}"
    template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}" + end + "\n{% endfor %}")
    keys = {"dataset_name": str(write_rows(rows=rows)), "chat_template_path": str(template), "loss_on": "all"}
    stream = build_train_stream(build_config(**keys, max_length=128, dataset_streaming=True), tiny_tokenizer)
    assert sorted(row_ids(stream)) == list(range(len(rows)))


def test_record_of_stream_identifies_its_rows(config, write_rows, make_chats, tiny_tokenizer):
    records = [load_training_data(config, tiny_tokenizer).record for _ in range(2)]
    write_rows(rows=make_chats(39))
    changed = load_training_data(config, tiny_tokenizer).record
    assert records[0]["fingerprint"] == records[1]["fingerprint"] != changed["fingerprint"]


def test_first_window_counts_duplicates(build_config, write_rows, make_chats, tiny_tokenizer):
    path = write_rows("twice.jsonl", [*make_chats(5), *make_chats(5)])
    config = build_config(dataset_name=str(path), max_length=128, dataset_streaming=True)
    assert load_training_data(config, tiny_tokenizer).audit.num_duplicates == 5
