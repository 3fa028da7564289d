"""The end of a run: exported model, card and report, and repeated or interrupted exports."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file
from tests.publish.runs import finish, make_run
from tests.training.configurations import build_recipe
from tests.training.trajectories import make_packs, make_trainer
from transformers.core_model_loading import PrefixChange

from recipes_lib.config.schema import RecipeConfig
from recipes_lib.models.saved_weights import BrokenSaveError
from recipes_lib.publish import final_model as finishing
from recipes_lib.publish.final_model import UNVERIFIED, copy_sentencepiece, export_model, finish_run, recipe
from recipes_lib.training.collectives import destroy_groups
from recipes_lib.training.layouts.launch_environment import Launch
from recipes_lib.training.run import Run


@pytest.fixture
def build(tmp_path):
    folder = finish(make_run(tmp_path / "run", status="done"))

    def build(*, finished: bool, rank: int = 0) -> Run:
        launch = Launch(rank=rank, local_rank=rank, world_size=rank + 1, engine="")
        return Run(RecipeConfig.__new__(RecipeConfig), folder, launch, None, finished=finished)

    return build


def test_missing_or_truncated_card_and_report_are_rewritten(build, capsys):
    run = build(finished=True)
    card, report = (run.output_dir / name for name in ("README.md", "report.html"))
    finish_run(run)
    before = card.read_text(), report.read_text()
    assert "| eval_loss | 1.0 |" in before[0]  # From the last evaluation.
    assert "</html>" in before[1]
    for file, content in ((card, None), (card, ""), (report, None), (report, before[1][:-20])):
        file.unlink() if content is None else file.write_text(content)
        capsys.readouterr()
        finish_run(run)
        output = capsys.readouterr().out
        assert str(card) in output
        assert str(report) in output
        # The second card links the chart that the report has drawn.
        assert (card.read_text().replace("![loss](report/loss.png)\n\n", ""), report.read_text()) == before
    card.write_text("edited by hand")
    finish_run(run)
    assert card.read_text() == "edited by hand"


def test_report_is_rebuilt_only_after_training(build, monkeypatch):
    reports = []

    def write_report(folder):
        reports.append(folder)
        (folder / "report.html").write_text("</html>\n")

    monkeypatch.setattr(finishing, "build_report", write_report)
    for finished in (True, True, False):
        finish_run(build(finished=finished))
    assert len(reports) == 2


def test_only_main_process_writes_report(build, capsys):
    run = build(finished=False, rank=1)
    finish_run(run)
    assert not (run.output_dir / "report.html").exists()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("is_done", [False, True])
def test_finished_run_is_not_trained_again(build, monkeypatch, is_done) -> None:
    config = build_recipe({})
    run, calls = replace(build(finished=is_done), config=config), []
    monkeypatch.setattr(finishing, "start_run", lambda config, launch: calls.append("start") or run)
    monkeypatch.setattr(finishing, "finish_run", lambda run: calls.append("finish"))
    recipe(lambda run: calls.append("train"))(config)
    assert calls == ["start", *([] if is_done else ["train"]), "finish"]


@pytest.mark.parametrize("fails", [False, True])
def test_process_groups_are_destroyed_after_success_only(build, monkeypatch, fails) -> None:
    """After a failure, NCCL would wait for collectives of the other ranks."""
    registered: list = []
    config = build_recipe({})
    monkeypatch.setattr(finishing, "atexit", SimpleNamespace(register=registered.append))
    monkeypatch.setattr(finishing, "start_run", lambda *_: replace(build(finished=False), config=config))
    monkeypatch.setattr(finishing, "finish_run", lambda _: None)

    def train(run: Run) -> None:
        assert not fails, "training failed"

    with pytest.raises(AssertionError, match="training failed") if fails else nullcontext():
        recipe(train)(config)
    assert registered == ([] if fails else [destroy_groups])


@pytest.fixture
def trained(tiny_model_dir, tmp_path):
    trainer, _ = make_trainer(tiny_model_dir, tmp_path, make_packs(), max_steps=1)
    (tmp_path / "run.json").write_text(json.dumps({"stage": "sft", "config": {}}))
    return trainer, tmp_path


def test_non_finite_model_is_not_exported(trained):
    trainer, folder = trained
    with torch.no_grad():
        trainer.model.model.norm.weight[3] = float("nan")
    with pytest.raises(BrokenSaveError, match=r"model\.norm\.weight is not finite"):
        export_model(trainer, folder)
    assert (folder / UNVERIFIED / "model.safetensors").exists()
    assert not (folder / "model.safetensors").exists()


def test_text_model_of_multimodal_checkpoint_is_exported_under_its_own_names(trained):
    """As loaded from a checkpoint whose names have a prefix; vLLM's class of the text model has no such module."""
    trainer, folder = trained
    trainer.model._weight_conversions = [PrefixChange(prefix_to_remove="language_model", model_prefix="model")]
    export_model(trainer, folder)
    assert load_file(folder / "model.safetensors").keys() <= trainer.model.state_dict().keys()


def test_sentencepiece_model_of_the_tokenizer_is_exported(trained):
    trainer, folder = trained
    (folder / "base").mkdir()
    (folder / "base" / "tokenizer.model").write_bytes(b"pieces")
    config = {"model_name_or_path": str(folder / "base"), "output_dir": str(folder)}
    (folder / "run.json").write_text(json.dumps({"stage": "sft", "config": config}))
    export_model(trainer, folder)
    assert (folder / "tokenizer.model").read_bytes() == b"pieces"


@pytest.mark.parametrize(
    ("keys", "copied"),
    [
        ({"model_name_or_path": "org/model"}, True),
        ({"model_name_or_path": "org/model", "model_revision": "c" * 40}, True),
        ({"model_name_or_path": "org/model", "model_revision": "other"}, False),
        ({"tokenizer_name_or_path": "org/model", "model_revision": "other"}, True),
        ({"tokenizer_name_or_path": "org/model", "tokenizer_revision": "other"}, False),
        ({"model_name_or_path": "org/model", "tokenizer_name_or_path": "org/other"}, False),
        ({"model_name_or_path": None}, False),
        ({"model_name_or_path": "/deleted/during/the/run"}, False),
    ],
)
def test_sentencepiece_model_of_hub_is_copied_from_cache(tmp_path, monkeypatch, keys, copied):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--org--model"
    for path, text in (("refs/main", "c" * 40), (f"snapshots/{'c' * 40}/tokenizer.model", "pieces")):
        (repository / path).parent.mkdir(parents=True)
        (repository / path).write_text(text)
    copy_sentencepiece(keys, tmp_path)
    copy_sentencepiece({"model_name_or_path": str(tmp_path)}, tmp_path)
    assert (tmp_path / "tokenizer.model").exists() == copied


def test_interrupted_export_is_repeated(trained):
    """The interrupted export had moved a folder, over which none can be renamed."""
    trainer, folder = trained
    trainer.processing_class.chat_template = {"default": "{{ messages }}", "rag": "{{ messages }}"}
    moved = folder / "additional_chat_templates"
    moved.mkdir()
    (moved / "rag.jinja").write_text("cut o")
    export_model(trainer, folder)
    assert (moved / "rag.jinja").read_text() == "{{ messages }}"
    assert not (folder / UNVERIFIED).exists()


def test_model_is_on_the_disk_before_its_name(trained, monkeypatch):
    """Otherwise a power cut after the end could leave a run that counts as done with an empty model."""
    trainer, folder = trained
    events = []
    monkeypatch.setattr(finishing, "fsync", lambda path: events.append(("fsync", path.name)))
    replace = Path.replace
    monkeypatch.setattr(
        Path, "replace", lambda path, target: (events.append(("rename", path.name)), replace(path, target))[1]
    )
    export_model(trainer, folder)
    at = events.index(("rename", "model.safetensors"))
    assert events[at - 1] == ("fsync", "model.safetensors")


def test_export_without_record_writes_no_card(trained):
    trainer, folder = trained
    (folder / "run.json").unlink()
    (folder / "README.md").write_text("a card of an earlier export")
    export_model(trainer, folder)
    assert (folder / "model.safetensors").is_file()
    assert not (folder / "README.md").exists()
