"""Facts of model cards: lineage, data, effort, curve and limits, from records and metrics."""

from __future__ import annotations

import json

from recipes_lib.publish.card import (
    CHART,
    LOSSES,
    MAX_CURVE_ROWS,
    describe_corpus,
    describe_data,
    describe_effort,
    list_curve,
    list_limits,
    read_events,
    trace_lineage,
    write_card,
)

COMMIT = "c" * 40


def record(recipe="sft", **facts):
    config = {"model_name_or_path": "owner/base", "dataset_name": "owner/chats", "output_dir": "mine"}
    return {"stage": recipe, "versions": {}, "config": config | facts.pop("config", {}), **facts}


def test_lineage_follows_records(tmp_path):
    first = record("pretrain", config={"model_name_or_path": None, "dataset_name": None, "dataset_mixture": PARTS})
    second = record("sft", config={"model_name_or_path": str(tmp_path / "base")}, model_commit=None)
    for name, facts in (("base", first), ("chat", second)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(json.dumps(facts))
    last = record("dpo", config={"model_name_or_path": str(tmp_path / "chat"), "dataset_revision": COMMIT})
    assert trace_lineage(last) == [
        ("pretrain", "random weights", f"owner/web at {COMMIT} (weight 0.75), code.jsonl (weight 0.25)"),
        ("sft", "base", "owner/chats"),
        ("dpo", "chat", f"owner/chats at {COMMIT}"),
    ]
    assert trace_lineage(record(model_commit=COMMIT)) == [("sft", f"owner/base at {COMMIT}", "owner/chats")]


PARTS = [
    {"name": "owner/web", "revision": COMMIT, "weight": 0.75},
    {"name": "/somewhere/secret/code.jsonl", "weight": 0.25},
]


def test_cyclic_lineage_ends(tmp_path):
    loop = record(config={"model_name_or_path": str(tmp_path)})
    (tmp_path / "run.json").write_text(json.dumps(loop))
    assert 1 < len(trace_lineage(loop)) < 20


def test_data_have_counts_and_fingerprints():
    counts = {"num_rows": 8, "num_tokens": 96_000, "num_target_tokens": 16, "cut": {"num_overlong": 0}}
    data = {"inputs": {"sources": {"train": "9604a55826332cb08ea7"}}, "train": counts, "findings": [], "max_length": 64}
    assert list(describe_data(record(data=data))) == [
        ("train", "8 rows, 96,000 tokens, 16 of them trained on", "9604a55826332cb0")
    ]
    pairs = {"num_pairs": 2994, "num_prompts": 1000, "num_chosen_tokens": 5}
    data = {"inputs": {"sources": {"train": "a" * 64, "test": "b" * 64}}, "train": pairs, "eval": {"num_pairs": 986}}
    data |= {"broken_rows": {"num_rows": 3980, "num_broken": 0}}
    assert list(describe_data(record(data=data))) == [
        ("train", "2,994 pairs, 1,000 prompts", "a" * 16),
        ("eval", "986 pairs", "b" * 16),
    ]
    data = {"num_prompts": 3000, "num_eval_prompts": 250, "broken_rows": {"num_rows": 3250}, "fingerprint": "c" * 64}
    assert list(describe_data(record(data=data))) == [("train", "3,000 prompts", "c" * 16), ("eval", "250 prompts", "")]
    assert list(describe_data(record(data=data | {"num_eval_prompts": 0}))) == [("train", "3,000 prompts", "c" * 16)]
    web, held_out = ({"name": name, "train": {"num_tokens": 5000, "num_documents": 12}} for name in ("web", "test"))
    web |= {"name": "/data/web"}
    web |= {"eval": {"num_tokens": 70, "num_documents": 1}, "fingerprint": "a" * 64, "weight": 1.0}
    data = {"sources": [web], "held_out": held_out | {"fingerprint": "b" * 64}, "num_rows": 24}
    data["eval_datasets"] = {"news": {"name": "news", "train": {"num_documents": 2}, "fingerprint": "c" * 64}}
    assert list(describe_data(record(data=data))) == [
        ("train web", "12 documents, 5,000 tokens", "a" * 16),
        ("eval web", "1 documents, 70 tokens", "a" * 16),
        ("eval test", "12 documents, 5,000 tokens", "b" * 16),
        ("eval news", "2 documents", "c" * 16),
    ]
    assert list(describe_data(record())) == []
    assert trace_lineage(record(config={"dataset_name": None}))[0][-1] == ""


def test_effort_sums_devices():
    last = {"kind": "train", "step": 4, "seconds": 7200, "num_tokens": 5_000_000, "num_target_tokens": 1_000_000}
    events = [{"kind": "train", "step": 1, "seconds": 1}, last | {"num_flops": 2.5e15, "memory_bytes": 3e9}]
    events.append({"kind": "eval", "step": 4})
    hardware = {"device": "NVIDIA H100 80GB HBM3"}
    facts = record(hardware=hardware, num_processes=8)
    expected = {
        "device": "8 x NVIDIA H100 80GB HBM3",
        "training time": "2.00 h, 16.00 device hours",
        "tokens": "5,000,000",
        "tokens trained on": "1,000,000",
        "operations": "2.5e+15 FLOP",
        "peak memory": "3.0 GB on the main process",
        "energy": "at most 11.20 kWh: 700 W a board, without the machine around it",
    }
    assert dict(describe_effort(facts, events)) == expected
    facts["config"]["device_hour_price"] = 2.5
    assert dict(describe_effort(facts, events)) == expected | {"cost": "40.00, at 2.5 for a device hour"}
    assert dict(describe_effort(facts, [])) == {"device": expected["device"]}
    best = {"kind": "best", "step": 4, "best_step": 3, "metric": "eval_loss"}
    assert next(describe_effort(facts, [*events, best])) == ("weights", "of step 3 of 4, the best by eval_loss")
    events[1]["energy_joules"] = 3.6e6
    measured = "8.00 kWh, measured on the main process's device, without the machine around it"
    assert dict(describe_effort(facts, events))["energy"] == measured
    del events[1]["energy_joules"]
    unknown = record(hardware={"device": "cpu"})
    assert "energy" not in dict(describe_effort(unknown, events))
    assert list(describe_effort(record(), [])) == []


def test_curve_is_thinned_to_first_and_last_step():
    events = [{"kind": "train", "step": step, "loss": 4 - step / 100} for step in range(1, 101)]
    events += [{"kind": "eval", "step": 100, "eval_loss": 3.25}, {"kind": "train", "step": 101, "loss": "nan"}]
    rows = list_curve(events, LOSSES)
    assert len(rows) == MAX_CURVE_ROWS
    assert rows[0] == ("1", "3.9900", "")
    assert rows[-1] == ("101", "nan", "")
    assert list_curve(events[99:101], LOSSES) == [("100", "3.0", "3.2500")]
    assert list_curve([], LOSSES) == []


def test_limits_list_all_warnings():
    findings = [{"severity": "ok", "found": "fine"}, {"severity": "warning", "found": "train: 3% were cut"}]
    bad = record(data={"findings": findings}, rollbacks=[{}], failed_gates=["length"], git_commit=f"{COMMIT}-dirty")
    limits = " ".join(list_limits(bad, {}))
    for words in (
        "bias",
        "held-out",
        "3% were cut",
        "rolled back 1 time,",
        "length",
        "The revision of owner/chats was not pinned",
        "not a recorded git commit",
    ):
        assert words in limits
    assert "fine" not in limits
    assert "answers were not measured." in limits
    scores = {"truthfulqa_mc1": {"scores": {"acc": {"value": 0.5, "stderr": None}}}}
    assert "not measured, but for the benchmarks above." in " ".join(list_limits(record(scores=scores), {}))
    for number in (0, 9):
        limits = " ".join(list_limits(record(data={"num_eval_prompts": number}), {"eval_reward": 1.0}))
        assert ("held-out" in limits) == (number == 0)
    good = record(git_commit=COMMIT, config={"dataset_revision": COMMIT})
    measured, licence = list_limits(good, {"eval_loss": 1.0})
    assert "were not measured" in measured
    assert "states no licence" in licence
    assert "continues text" in next(list_limits(record("pretrain"), {}))
    assert licence.endswith(": those of the model it began with and of its data apply.")
    tasks = record(config={"eval_tasks": ["gsm8k"], "eval_tasks_limit": 100})
    asked = "The figures of gsm8k were measured in training, on the first 100 questions of each task, without chat"
    assert asked in " ".join(list_limits(tasks, {"eval_gsm8k_exact_match": 0.5}))
    unstarted = record(config={"model_name_or_path": None})
    assert any(limit.endswith(": those of its data apply.") for limit in list_limits(unstarted, {}))
    parts = [{"name": "owner/a", "revision": COMMIT}, {"name": "owner/b"}, {"name": "/data/c.jsonl"}]
    mixed = list(list_limits(record(git_commit=COMMIT, config={"dataset_mixture": parts}), {"eval_loss": 1.0}))
    assert [limit for limit in mixed if "pinned" in limit] == [
        "The revision of owner/b was not pinned: its rows may have changed since."
    ]


def test_truncated_lines_are_skipped(tmp_path):
    assert read_events(tmp_path) == []
    (tmp_path / "metrics.jsonl").write_text('{"step": 2}\n[]\n{"loss": 1}\n{"step": 1}\n{"step": 3, "lo')
    assert [event["step"] for event in read_events(tmp_path)] == [1, 2]


def test_card_links_existing_chart(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "step": 1, "loss": 2.5}\n')
    write_card(tmp_path, record(), {})
    card = (tmp_path / "README.md").read_text()
    assert "| 1 | 2.5000 |  |" in card
    assert "![loss]" not in card
    (tmp_path / CHART).parent.mkdir()
    (tmp_path / CHART).touch()
    write_card(tmp_path, record(), {})
    assert f"![loss]({CHART})" in (tmp_path / "README.md").read_text()


def test_card_of_rl_has_rewards_instead_of_the_surrogate_loss(tmp_path):
    (tmp_path / CHART).parent.mkdir()
    (tmp_path / CHART).touch()
    events = [{"kind": "train", "step": 1, "loss": 0.001, "objective/score": 0.25}]
    events.append({"kind": "eval", "step": 1, "eval_reward": 0.5})
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events))
    write_card(tmp_path, record(), {})
    card = (tmp_path / "README.md").read_text()
    assert "| step | reward | reward of samples |\n|---|---|---|\n| 1 | 0.2500 | 0.5000 |" in card
    assert "![loss]" not in card


def test_card_of_a_distilled_model_compares_losses_of_the_labels(tmp_path):
    events = [{"kind": "train", "step": 1, "loss": 0.5, "distillation/nll": 2.25}, {"step": 1, "eval_loss": 2.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events))
    write_card(tmp_path, record(), {})
    card = (tmp_path / "README.md").read_text()
    assert "| step | loss on labels | held-out loss |\n|---|---|---|\n| 1 | 2.2500 | 2.5000 |" in card


def test_corpus_has_sources_removals_and_benchmarks(tmp_path):
    tally = {"documents_in": 1000, "removed": {}, "found": {}}
    manifest = {
        "documents": 900,
        "sources": [
            {"label": "web", "name": "owner/web", "license": "ODC-By-1.0", "documents": 800},
            {"label": "mine", "name": str(tmp_path), "license": None, "documents": 100},
        ],
        "steps": {
            "read": tally,
            "pii": tally | {"found": {"email": 1234}},
            "near_duplicates": tally | {"removed": {f"reason {at}": at for at in range(1, 8)}},
        },
        "config": {"benchmarks": [{"name": "openai/gsm8k"}]},
    }
    folder = tmp_path / "clean"
    (folder / "data" / "web").mkdir(parents=True)
    (folder / "corpus.json").write_text(json.dumps(manifest))
    expected = [
        ("clean", "900 of 1,000 documents"),
        ("source web", "owner/web, 800 documents, licence ODC-By-1.0"),
        ("source mine", f"{tmp_path.name}, 100 documents, licence not stated"),
        ("removed by near_duplicates", "28: reason 7 7, reason 6 6, reason 5 5, reason 4 4, reason 3 3"),
        ("personal data found", "email 1,234"),
        ("decontaminated against", "gsm8k"),
    ]
    assert list(describe_corpus({"dataset_name": str(folder)})) == expected
    mixture = [{"name": str(folder / "data" / name)} for name in ("web", "mine")]
    assert list(describe_corpus({"dataset_mixture": mixture})) == expected
    write_card(tmp_path, record(config={"dataset_name": str(folder)}), {})
    assert "| decontaminated against | gsm8k |" in (tmp_path / "README.md").read_text()


def test_missing_or_damaged_corpus_manifest_is_no_error(tmp_path):
    assert list(describe_corpus({"dataset_name": "owner/chats"})) == []
    assert list(describe_corpus({})) == []
    for steps in ('{"read": 3}', "{}", "{"):
        text = f'{{"documents": 1, "steps": {steps}, "sources": [4]}}'
        (tmp_path / "corpus.json").write_text(text)
        facts = list(describe_corpus({"dataset_name": str(tmp_path)}))
        assert facts == [(tmp_path.name, "its manifest cannot be read")]
