"""Training data of a run, prepared or streamed: equal packs, held-out rows and records."""

import json
from dataclasses import replace
from itertools import islice

import datasets
import pytest
from transformers import AutoTokenizer

from recipes_lib.data.packed.training_data import load_training_data
from recipes_lib.errors import DataError


@pytest.fixture
def config(build_config, write_rows):
    paths = [
        write_rows(
            f"{name}.jsonl",
            [
                {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}, yes."}]}
                for n in numbers
            ],
        )
        for name, numbers in (("train", range(30)), ("eval", range(30, 36)))
    ]
    return build_config(dataset_name=str(paths[0]), dataset_test_split=str(paths[1]), max_length=64)


def load(config):
    return load_training_data(config, AutoTokenizer.from_pretrained(config.model.model_name_or_path))


def columns_of(packs):
    return sorted(str({name: pack[name].tolist() for name in pack}) for pack in packs)


def test_stream_yields_packs_of_prepared_set(config):
    prepared = load(config)
    streamed = load(replace(config, data=replace(config.data, dataset_streaming=True)))
    assert isinstance(prepared.train, datasets.Dataset)
    assert isinstance(streamed.train, datasets.IterableDataset)
    # The stream has no end: its first epoch.
    assert columns_of(prepared.train) == columns_of(islice(streamed.train, prepared.rows_per_epoch))
    assert (prepared.rows_per_epoch, streamed.rows_per_epoch) == (len(prepared.train), None)
    assert prepared.audit.terminators == streamed.audit.terminators != []
    assert prepared.max_length == streamed.max_length == 64
    assert all(json.loads(json.dumps(data.record)) == data.record for data in (prepared, streamed))


@pytest.mark.parametrize("is_streamed", [True, False])
def test_longest_row_of_a_stream_may_have_max_length(config, is_streamed):
    data = replace(config.data, dataset_streaming=is_streamed, dataset_test_split=None)
    run = load(replace(config, data=replace(data, eval_datasets={"more": {"name": config.data.dataset_test_split}})))
    assert (run.longest == run.max_length) == is_streamed


def test_held_out_rows_are_equal_streamed_or_prepared(config):
    prepared = load(config)
    streamed = load(replace(config, data=replace(config.data, dataset_streaming=True)))
    examples = [list(data.iterate_examples()) for data in (prepared, streamed)]
    tokenizer = AutoTokenizer.from_pretrained(config.model.model_name_or_path)
    for found in examples:
        texts = [tokenizer.decode(ids) for ids, _ in found]
        assert [text.split("?")[0].split("user\n")[1] for text in texts] == [str(number) for number in range(30, 36)]
        assert all(mask.any() for _, mask in found)
    for data in (prepared, streamed):
        (packs,) = data.held_out.values()
        assert sum(len(pack["input_ids"]) for pack in (packs[at] for at in range(len(packs)))) == sum(
            len(ids) for ids, _ in examples[0]
        )
    assert prepared.typical_length == streamed.typical_length


def test_eval_datasets_are_read_with_dataset_columns_unless_they_have_their_own(build_config, write_rows):
    rows, others = [{"q": f"Q{at}", "a": "A"} for at in range(4)], [{"question": "Q9", "answer": "A"}]
    own = {"name": str(write_rows("own.jsonl", others)), "columns": {}}
    sets = {"web": {"name": str(write_rows("web.jsonl", rows[2:]))}, "own": own}
    columns = {"question": "q", "answer": "a"}
    train = str(write_rows(rows=rows[:2]))
    data = load(build_config(dataset_name=train, dataset_columns=columns, eval_datasets=sets))
    (width,) = {len(row) for row in data.train["seq_lengths"]}
    assert [data.eval_sets[name][0]["seq_lengths"][0] for name in sets] == [data.train[0]["seq_lengths"][0]] * width


def test_eval_datasets_overlap_is_refused_unless_allowed(build_config, write_rows, make_chats):
    def build(**options):
        return build_config(eval_datasets={"web": {"name": str(path)}, "apart": {"name": str(apart)}}, **options)

    path, apart = (write_rows(f"{name}.jsonl", make_chats(4, start=start)) for name, start in (("web", 38), ("a", 90)))
    assert str(load(build(allow_eval_overlap=True)).eval_sets.keys()) == "dict_keys(['web', 'apart'])"
    earlier = write_rows("earlier.jsonl", make_chats(4, start=92))
    messages = []
    for options in ({}, {"packing": False}, {"dataset_streaming": True, "max_length": 128}, {"replay": earlier}):
        replay = options.pop("replay", None)
        if replay is not None:
            options |= {"replay_dataset": str(replay), "replay_share": 0.1}
        with pytest.raises(DataError, match="2 training rows are held-out rows too") as raised:
            list(load(build(**options)).train)  # A stream is checked while it is read.
        messages.append(str(raised.value))
        assert "train.jsonl:39 = " in messages[-1]
        assert "web.jsonl:1" in messages[-1]
    assert "a.jsonl" not in messages[0]
    assert "earlier.jsonl:1 = " in messages[-1]
    assert "a.jsonl:3" in messages[-1]
