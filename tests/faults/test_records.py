"""Fuzzing of the files that commands read: the result is a value or an error with a reason, never a traceback.

Mutations are drawn from a seed: a few per file in ``make test``, ``NUM_MUTATIONS`` in the slow tests.
"""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tests.forked import ROOT
from tests.recipes.preferences import make_rows
from tests.rows import write_rows
from tests.tiny import build_tokenizer, save_model

from recipes_lib.boundary import run_command
from recipes_lib.commands import reproduce, weights
from recipes_lib.commands.sampling import PairCounts, RowFile
from recipes_lib.config.loader import load_config
from recipes_lib.config.schema import ModelConfig, TokensConfig
from recipes_lib.data.packed.encoding import build_encoder
from recipes_lib.data.packed.training_data import load_training_data
from recipes_lib.data.pairs.preference_sets import load_pair_data
from recipes_lib.data.sources.rows import Row
from recipes_lib.models.heads.scoring import read_adapter_statistics
from recipes_lib.models.loading import load_causal_lm, load_model_config, load_tokenizer
from recipes_lib.models.model_files import find_damage as find_damaged_weights
from recipes_lib.publish.card import write_card
from recipes_lib.report.page import build_report
from recipes_lib.report.run_files import read_run
from recipes_lib.training.checkpoints.manifest import find_damage, write_complete
from recipes_lib.training.guards.step_guard import Rollback, read_rollbacks, write_rollbacks
from recipes_lib.training.layouts.launch_environment import Launch, read_launch_file
from recipes_lib.training.monitoring.metrics import MetricsWriter
from recipes_lib.training.run import start_run

NUM_MUTATIONS = 80
NUM_QUICK = 4
NUM_DRAWN = 1
"""Mutations of files from which a report draws charts, which takes half a second."""
ONE = Launch(rank=0, local_rank=0, world_size=1, engine="")
ALLOWED = {0, 2, 3}
ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 10**400, 1e308, "", "x", "../../x", "/dev/zero", "\x1b[2J\n", [], {}, [[]], {"x": None}),
    "x" * 5000,
)


def list_items(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every container in a JSON value with each of its keys or indices."""
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from list_items(value[key])


def mutate_json(value: Any, draw: random.Random) -> bytes:
    """Return a JSON value in which one item is replaced or deleted."""
    value = copy.deepcopy(value)
    items = list(list_items(value))
    if items:
        container, key = draw.choice(items)
        if isinstance(container, dict) and draw.random() < 0.3:
            del container[key]
        else:
            container[key] = draw.choice(ODD)
    return json.dumps(value).encode()


def mutate(content: bytes, draw: random.Random) -> bytes:
    """Return truncated, overwritten or repeated bytes, or another JSON value if content or a line of it is JSON."""
    at, to = sorted(draw.randrange(len(content) + 1) for _ in range(2))
    noise = bytes(draw.randrange(256) for _ in range(draw.randrange(1, 9)))
    texts = (b"", b"null", b"[]", b"{}", b"[" * 50_000, b"1" * 50_000, b"\xff\xfe", b"\0" * 64, b"---\n- a: &a [*a]\n")
    ways: list[Callable[[], bytes]] = [
        lambda: content[:at],
        lambda: content[:at] + content[to:],
        lambda: content[:at] + noise + content[at + len(noise) :],
        lambda: content[:to] + content[at:to] + content[to:],
        lambda: draw.choice(texts),
    ]
    lines = content.decode(errors="replace").split("\n")
    for text in (content.decode(errors="replace"), draw.choice(lines)):
        try:
            value = json.loads(text)
        except ValueError:
            continue
        if isinstance(value, dict | list):
            changed = mutate_json(value, draw)
            ways += [lambda text=text, changed=changed: content.replace(text.encode(), changed, 1)] * 5
    return draw.choice(ways)()


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with one file of every kind, as the library writes it."""
    folder = tmp_path_factory.mktemp("records")
    save_model(folder / "model", build_tokenizer())
    weights = load_file(folder / "model" / "model.safetensors")
    shutil.copytree(folder / "model", folder / "sharded")
    (folder / "sharded" / "model.safetensors").unlink()
    names = {f"model-{at + 1:05}-of-00002.safetensors": list(weights)[at::2] for at in range(2)}
    for name, keys in names.items():
        save_file({key: weights[key] for key in keys}, folder / "sharded" / name, metadata={"format": "pt"})
    index = {"metadata": {"total_size": 1}, "weight_map": {key: name for name, keys in names.items() for key in keys}}
    (folder / "sharded" / "model.safetensors.index.json").write_text(json.dumps(index))
    chats = [[{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}."}] for n in range(6)]
    write_rows(folder / "chats.jsonl", ({"messages": chat} for chat in chats))
    write_rows(folder / "pairs.jsonl", make_rows(6))
    (folder / "sft.yaml").write_text(
        f"model_name_or_path: {folder / 'model'}\ndataset_name: {folder / 'chats.jsonl'}\n"
        f"output_dir: {folder / 'run'}\nprepared_dir: {folder / 'prepared'}\nlearning_rate: 1e-4\nbf16: false\n"
    )
    shutil.copy(ROOT / "accelerate_configs" / "fsdp2.yaml", folder / "launch.yaml")
    config = read_config(folder)
    load_training_data(config, load_tokenizer(config.model, config.tokens))
    run = start_run(config, ONE)
    checkpoint = run.output_dir / "checkpoint-2"
    checkpoint.mkdir()
    (checkpoint / "model.safetensors").write_bytes(b"weights")
    write_complete(checkpoint, step=2, world_size=1, data_size=1, run=dict(run.facts))
    run.record(data={"train": {"num_rows": 6}, "findings": []}, rollbacks=[], failed_gates=[])
    writer = MetricsWriter(run.output_dir / "metrics.jsonl", is_main=True)
    for step in range(1, 4):
        figures = {"loss": 2.0 / step, "grad_norm": 1.0, "learning_rate": 1e-4, "num_tokens": 9 * step, "seconds": 1.0}
        writer.write({"kind": "train", "step": step, **figures})
    writer.write({"kind": "eval", "step": 3, "eval_loss": 1.0})
    sample = {"step": 3, "prompt": "1?", "completion": "1.", "reference": "1.", "is_finished": True}
    (run.output_dir / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    write_rollbacks(run.output_dir, [Rollback(2, "the loss", 1, (0, 4), (1, 2))])
    adapter = {"task_type": "CAUSAL_LM", "base_model_name_or_path": str(folder / "model"), "peft_type": "LORA", "r": 4}
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    (folder / "reward_scale.json").write_text(json.dumps({"mean": 0.5, "std": 2.0}))
    rows = folder / "answers.jsonl"
    rows.write_text("")
    RowFile(rows.with_name("other.jsonl"), {}, PairCounts(), what="").write(iter([[{"prompt": "a"}]]))
    shutil.move(folder / "other.jsonl.record.json", folder / "answers.jsonl.record.json")
    return folder


def read_config(folder: Path) -> Any:
    return load_config("sft", ["--config", str(folder / "sft.yaml")])


def start(folder: Path) -> None:
    run = start_run(read_config(folder), ONE)
    run.choose_checkpoint()


def read_figures(folder: Path) -> None:
    read_run(folder / "run")
    build_report(folder / "run")


def load_model(folder: Path, name: str = "model") -> None:
    config = ModelConfig(model_name_or_path=str(folder / name))
    load_model_config(config)
    load_causal_lm(config, "sdpa")


def read_text(folder: Path) -> None:
    config = read_config(folder)
    chat = [{"role": "user", "content": "How?"}, {"role": "assistant", "content": "So."}]
    build_encoder(config, load_tokenizer(config.model, TokensConfig())).encode(
        [Row(where="chats.jsonl row 0", messages=chat)]
    )


def prepare_chats(folder: Path) -> None:
    config = read_config(folder)
    shutil.rmtree(folder / "prepared", ignore_errors=True)
    load_training_data(config, load_tokenizer(config.model, config.tokens))


def find_chats(folder: Path) -> None:
    config = read_config(folder)
    load_training_data(config, load_tokenizer(config.model, config.tokens))


def prepare_pairs(folder: Path) -> None:
    flags = {"model_name_or_path": folder / "model", "dataset_name": folder / "pairs.jsonl", "output_dir": "run"}
    flags |= {"prepared_dir": folder / "prepared pairs"}
    shutil.rmtree(folder / "prepared pairs", ignore_errors=True)
    config = load_config("dpo", [f"--{name}={value}" for name, value in flags.items()])
    load_pair_data(config, load_tokenizer(config.model, config.tokens))


def repeat(folder: Path) -> None:
    reproduce.main([str(folder / "run"), "--output", str(folder / "again")])


def write_the_card(folder: Path) -> None:
    """Write the card of a model that was trained further from the run's model."""
    config = {"model_name_or_path": str(folder / "run"), "output_dir": "x", "dataset_name": "a/b"}
    write_card(folder / "run", {"stage": "sft", "config": config}, {})


def read_adapter(folder: Path) -> None:
    weights._read_adapter(folder)


READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "run.json, to resume": ("run/run.json", start),
    "run.json, to report": ("run/run.json", read_figures),
    "run.json, to reproduce": ("run/run.json", repeat),
    "run.json, to trace": ("run/run.json", write_the_card),
    "run.json, to merge": ("run/run.json", lambda folder: weights._read_bits(folder / "run")),
    "COMPLETE.json of a checkpoint": ("run/checkpoint-2/COMPLETE.json", start),
    "COMPLETE.json, to verify": ("run/checkpoint-2/COMPLETE.json", lambda f: find_damage(f / "run" / "checkpoint-2")),
    "metrics.jsonl": ("run/metrics.jsonl", read_figures),
    "metrics.jsonl, to rewind": ("run/metrics.jsonl", lambda f: MetricsWriter(f / "run" / "m", is_main=True).rewind(2)),
    "samples.jsonl": ("run/samples.jsonl", read_figures),
    "rollbacks.json": ("run/rollbacks.json", lambda folder: read_rollbacks(folder / "run")),
    "config.json": ("model/config.json", load_model),
    "generation_config.json": ("model/generation_config.json", load_model),
    "model.safetensors": ("model/model.safetensors", load_model),
    "an index of shards": ("sharded/model.safetensors.index.json", lambda folder: load_model(folder, "sharded")),
    "an index, to publish": ("sharded/model.safetensors.index.json", lambda f: find_damaged_weights(f / "sharded")),
    "tokenizer.json": ("model/tokenizer.json", read_text),
    "tokenizer_config.json": ("model/tokenizer_config.json", read_text),
    "chat_template.jinja": ("model/chat_template.jinja", read_text),
    "adapter_config.json": ("adapter_config.json", read_adapter),
    "reward_scale.json": ("reward_scale.json", read_adapter_statistics),
    "answers.jsonl.record.json": (
        "answers.jsonl.record.json",
        lambda folder: RowFile(folder / "answers.jsonl", {}, PairCounts(), what="other rows"),
    ),
    "a recipe": ("sft.yaml", read_config),
    "a launch file": ("launch.yaml", lambda folder: read_launch_file(folder / "launch.yaml")),
    "chats": ("chats.jsonl", prepare_chats),
    "pairs": ("pairs.jsonl", prepare_pairs),
    "a prepared set": ("prepared/**/COMPLETE.json", find_chats),
    "the manifest of a prepared set": ("prepared/**/manifest.json", find_chats),
}


def fuzz_file(run_folder: Path, name: str, num_mutations: int, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Mutate a file repeatedly, and return the mutations that ended with another exit code or a traceback."""
    pattern, reader = READERS[name]
    find_chats(run_folder)
    (file,) = run_folder.glob(pattern)
    content, draw, failures = file.read_bytes(), random.Random(f"{name} 1"), []
    originals = {path: path.read_bytes() for path in (run_folder / "run").glob("*.json*")}
    for number in range(num_mutations):
        file.parent.mkdir(parents=True, exist_ok=True)
        mutated = mutate(content, draw)
        file.write_bytes(mutated)
        code = run_command(lambda: reader(run_folder) and None)
        output = capsys.readouterr()
        if code not in ALLOWED or "Traceback" in output.err:
            failures.append(f"{number}: exit {code} of {mutated[:200]!r}\n{output.err[-1500:]}")
        for path, text in (originals | {file: content}).items():
            if path.parent.is_dir():
                path.write_bytes(text)
    return failures


@pytest.mark.parametrize("name", READERS)
def test_mutated_file_is_read_or_rejected(run_folder, name, capsys) -> None:
    assert not fuzz_file(run_folder, name, NUM_DRAWN if READERS[name][1] is read_figures else NUM_QUICK, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_many_mutations_are_read_or_rejected(run_folder, name, capsys) -> None:
    assert not fuzz_file(run_folder, name, NUM_MUTATIONS, capsys)
