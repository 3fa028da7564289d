"""Loading of models and tokenizers: the whole model or one clear error, offline, no pickles."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from huggingface_hub import errors as hub
from huggingface_hub import utils as hub_progress
from safetensors.torch import load_file, save_file
from tests.models.vision_models import build_gemma3
from tests.training.optim.small_models import MODELS, build
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.models.auto import tokenization_auto
from transformers.utils.logging import enable_progress_bar, set_tqdm_hook

from recipes_lib.config.schema import ModelConfig, TokensConfig
from recipes_lib.errors import ConfigError
from recipes_lib.models.heads.loss_head import add_loss_head
from recipes_lib.models.loading import (
    check_agreement,
    describe_spare_tokens,
    explained,
    find_commit,
    load_causal_lm,
    load_model_config,
    load_tokenizer,
)
from recipes_lib.models.saved_weights import verify_checkpoint


def config_for(path: Path | str, **changes: Any) -> ModelConfig:
    return ModelConfig(model_name_or_path=str(path), **changes)


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture
def model_dir(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """A writable copy of the tiny model."""
    return Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))


def catch_problem(action: Callable[[], object]) -> tuple[str, str, str]:
    with pytest.raises(ConfigError) as caught:
        action()
    (problem,) = caught.value.problems
    return problem.where, problem.found, problem.remedy


def test_loaded_weights_equal_checkpoint(model_dir: Path) -> None:
    edit_json(model_dir / "config.json", return_dict=False)
    model = load_causal_lm(config_for(model_dir), "eager")
    saved = load_file(model_dir / "model.safetensors")
    state = model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in saved.items())
    assert model.training
    assert model.config.use_cache is False
    assert model.config.return_dict is True
    assert model.config._attn_implementation == "eager"


def test_loaded_experts_have_router_loss_without_key_that_breaks_padded_generation(tmp_path: Path) -> None:
    sizes = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2, "output_router_logits": True}
    MixtralForCausalLM(MixtralConfig(**sizes, **heads)).save_pretrained(tmp_path)
    model = load_causal_lm(ModelConfig(model_name_or_path=str(tmp_path)), "sdpa")
    ids, mask = torch.arange(6).view(2, 3), torch.tensor([[0, 1, 1], [1, 1, 1]])
    assert model.generate(ids, attention_mask=mask, max_new_tokens=3, min_new_tokens=3).shape == (2, 6)
    add_loss_head(model)
    assert model(input_ids=ids, labels=ids, loss_head=True).aux_loss is not None


@pytest.mark.parametrize(("name", "expected"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("auto", "float16")])
def test_loaded_weights_have_requested_dtype(name: Any, expected: str, model_dir: Path) -> None:
    AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float16).save_pretrained(model_dir)
    model = load_causal_lm(config_for(model_dir, dtype=name), "sdpa")
    assert {parameter.dtype for parameter in model.parameters()} == {getattr(torch, expected)}


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [("config.json", b"{", "is not a valid JSON file"), ("model.safetensors", b"x" * 99, "cannot be opened")],
)
def test_corrupt_file_is_one_config_error(file: str, content: bytes, words: str, model_dir: Path) -> None:
    (model_dir / file).write_bytes(content)
    where, found, _ = catch_problem(lambda: load_causal_lm(config_for(model_dir), "sdpa"))
    assert (where, words in found) == ("model_name_or_path", True)


def test_damaged_generation_config_is_refused(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers would ignore it, and with it the stop tokens."""
    (model_dir / "generation_config.json").write_text('{"eos_token_id": [0, 3')
    where, found, _ = catch_problem(lambda: load_model_config(config_for(model_dir)))
    assert (where, "generation_config.json" in found) == ("model_name_or_path", True)
    (model_dir / "generation_config.json").unlink()
    assert load_model_config(config_for(model_dir))[1].eos_token_id == 0
    # The Hub may have one, with other stop tokens, and not send it.
    busy = OSError("not found")
    busy.__cause__ = hub.HfHubHTTPError("refused", response=MagicMock(status_code=429))
    monkeypatch.setattr("recipes_lib.models.loading.GenerationConfig.from_pretrained", MagicMock(side_effect=busy))
    assert "the Hub answers 429" in catch_problem(lambda: load_model_config(config_for(model_dir)))[1]


def break_weights(folder: Path) -> tuple[str, str]:
    """Rename the first matrix of a checkpoint, and add a row to the last; return their names."""
    weights = load_file(folder / "model.safetensors")
    matrices = sorted(name for name, weight in weights.items() if weight.dim() > 1)
    weights["stray.weight"] = weights.pop(matrices[0])
    weights[matrices[-1]] = torch.cat([weights[matrices[-1]]] * 2)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return matrices[0], matrices[-1]


@pytest.mark.parametrize("load", [lambda config: load_causal_lm(config, "sdpa"), verify_checkpoint])
def test_missing_unexpected_and_mismatched_weights_are_reported_together(load: Any, model_dir: Path) -> None:
    missing, mismatched = break_weights(model_dir)
    with pytest.raises(ConfigError) as caught:
        load(config_for(model_dir))
    assert [problem.found for problem in caught.value.problems] == [
        f"the checkpoint of {model_dir} lacks {missing}",
        "LlamaForCausalLM has no weights called stray.weight",
        f"the checkpoint of {model_dir} has other shapes: {mismatched} (64, 64) for (32, 64)",
    ]


@pytest.mark.parametrize("name", [*MODELS, "gemma3"])
def test_headers_show_the_faults_of_loading(name: str, tmp_path: Path) -> None:
    """Also of tensors that loading renames or fuses, as those of experts, and in shards."""
    model = build_gemma3() if name == "gemma3" else build(name)

    def list_faults(load: Callable[[ModelConfig], object]) -> list[str]:
        try:
            load(config_for(tmp_path))
        except ConfigError as error:
            return [problem.found for problem in error.problems]
        return []

    model.save_pretrained(tmp_path, max_shard_size="8KB")
    assert list_faults(verify_checkpoint) == []
    for path in tmp_path.glob("*.safetensors*"):
        path.unlink()
    model.save_pretrained(tmp_path)
    break_weights(tmp_path)
    faults = list_faults(verify_checkpoint)
    assert faults == list_faults(lambda config: load_causal_lm(config, "eager"))
    assert len(faults) >= 2


def test_check_of_tensors_reads_no_values(model_dir: Path) -> None:
    """A file of 137 GB, of which the disk holds only the header."""
    edit_json(model_dir / "config.json", vocab_size=2**28)
    path = model_dir / "model.safetensors"
    names = load_file(path)
    shapes = {name: [2**28, 64] if len(weight) == 512 else list(weight.shape) for name, weight in names.items()}
    header, end = {}, 0
    for name, shape in shapes.items():
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end := end + 4 * math.prod(shape)]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + end)
    verify_checkpoint(config_for(model_dir))


@pytest.mark.parametrize("key", ["quantization_config", "auto_map"])
def test_tensors_of_other_layouts_are_not_checked(key: str, model_dir: Path) -> None:
    break_weights(model_dir)
    edit_json(model_dir / "config.json", **{key: {}})
    verify_checkpoint(config_for(model_dir))


def test_tied_weights_that_differ_are_refused(model_dir: Path) -> None:
    """transformers leaves them untied, as saved; vLLM and llama.cpp tie them."""
    edit_json(model_dir / "config.json", tie_word_embeddings=True)
    weights = load_file(model_dir / "model.safetensors")
    _, found, remedy = catch_problem(lambda: load_causal_lm(config_for(model_dir), "sdpa"))
    assert "ties weights to others from which they differ in its checkpoint: lm_head.weight" in found
    assert remedy == "write tie_word_embeddings: false into its config.json"
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, model_dir / "model.safetensors", metadata={"format": "pt"})
    model = load_causal_lm(config_for(model_dir), "sdpa")
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_adapter_in_the_folder_of_a_model_is_refused(model_dir: Path) -> None:
    (model_dir / "adapter_config.json").write_text("{}")
    _, found, _ = catch_problem(lambda: load_causal_lm(config_for(model_dir), "sdpa"))
    assert found == f"{model_dir} has an adapter beside the config.json of a model"


@pytest.mark.parametrize("name", ["", "model-q4_0.gguf"])
def test_gguf_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "model-q4_0.gguf").write_bytes(b"GGUF")
    _, found, remedy = catch_problem(lambda: load_tokenizer(config_for(tmp_path / name), TokensConfig()))
    assert "GGUF" in found
    assert "it was converted from" in remedy


def test_wrong_type_in_config_and_missing_tokenizer_files_are_explained(model_dir: Path) -> None:
    (model_dir / "tokenizer.json").unlink()
    _, found, remedy = catch_problem(lambda: load_tokenizer(config_for(model_dir), TokensConfig()))
    assert "has no tokenizer files" in found
    assert "tokenizer_name_or_path" in remedy
    settings = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps(settings | {"hidden_size": "64"}))
    assert "'hidden_size'" in (found := catch_problem(lambda: load_model_config(config_for(model_dir)))[1])
    assert "expected int" in found
    (model_dir / "config.json").write_text(json.dumps(settings | {"num_key_value_heads": 3}))
    assert "contradict each other" in catch_problem(lambda: load_model_config(config_for(model_dir)))[1]
    (model_dir / "config.json").write_text(json.dumps(settings | {"sliding_window": 1.5}))
    assert "`sliding_window` is 1.5" in catch_problem(lambda: load_model_config(config_for(model_dir)))[1]
    AutoConfig.for_model("musicgen").save_pretrained(model_dir)  # It has two text models.
    assert "cannot be loaded" in catch_problem(lambda: load_model_config(config_for(model_dir)))[1]
    (model_dir / "config.json").unlink()  # As in the folder of an adapter.
    _, found, remedy = catch_problem(lambda: load_model_config(config_for(model_dir)))
    assert (found, "adapter_name_or_path" in remedy) == (f"{model_dir} has no config.json of a model", True)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_byte_order_mark_in_tokenizer_file_is_located(model_dir: Path, name: str) -> None:
    (model_dir / name).write_bytes(b"\xef\xbb\xbf" + (model_dir / name).read_bytes())
    _, found, remedy = catch_problem(lambda: load_tokenizer(config_for(model_dir), TokensConfig()))
    assert found == f"{model_dir / name} begins with a byte order mark"
    assert "without one" in remedy
    (model_dir / name).write_text("{")
    found = catch_problem(lambda: load_tokenizer(config_for(model_dir), TokensConfig()))[1]
    assert found.startswith(f"{model_dir / name} is not JSON: ")


def test_interrupted_download_is_named_offline() -> None:
    def load() -> None:
        with explained("model_name_or_path", "org/model"):
            raise OSError("org/model does not appear to have a file named model.safetensors")  # As transformers.

    found, remedy = catch_problem(load)[1:]
    assert (found, remedy) == (
        "org/model is cached without its weights, and offline",
        "`hf download org/model` while online",
    )


def test_pickled_weights_are_never_opened(model_dir: Path) -> None:
    (model_dir / "model.safetensors").unlink()
    canary = model_dir / "opened"

    class Malicious:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (canary,)

    torch.save(Malicious(), model_dir / "pytorch_model.bin")
    for load in (lambda config: load_causal_lm(config, "sdpa"), verify_checkpoint):
        where, found, remedy = catch_problem(lambda load=load: load(config_for(model_dir)))
        assert where == "model_name_or_path"
        assert "no whole safetensors weights, and pickled ones could run code" in found
        assert "save_pretrained" in remedy
    assert not canary.exists()


@pytest.mark.parametrize("name", ["model_shards/shard-00001-model-00001-of-00001", "policy/model_shards/a", "policy"])
def test_checkpoint_is_refused_with_export_command(model_dir: Path, name: str) -> None:
    (weights := model_dir / f"{name}.safetensors").parent.mkdir(parents=True, exist_ok=True)
    (model_dir / "model.safetensors").rename(weights)
    where, found, remedy = catch_problem(lambda: load_causal_lm(config_for(model_dir), "sdpa"))
    assert (where, found) == ("model_name_or_path", f"{model_dir} is a training checkpoint, not a model")
    assert f"recipes export {model_dir} FOLDER" in remedy


@pytest.mark.parametrize(
    "load", [lambda c: load_causal_lm(c, "sdpa"), lambda c: load_tokenizer(c, TokensConfig()), load_model_config]
)
@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("/nowhere/at/all", "/nowhere/at/all is neither a folder nor a Hub id"),
        ("owner/missing", "owner/missing is no folder, nor cached; the Hub is out of reach"),
    ],
)
def test_missing_model_is_one_config_error(load: Callable[[ModelConfig], object], name: str, found: str) -> None:
    assert catch_problem(lambda: load(config_for(name)))[:2] == ("model_name_or_path", found)


@pytest.mark.parametrize(
    ("kind", "status", "words", "way_out"),
    [
        (hub.GatedRepoError, 403, "org/model is gated", "accept its terms"),
        (hub.RepositoryNotFoundError, 401, "org/model is no folder, and not on the Hub or private", "check the spell"),
        (hub.RevisionNotFoundError, 404, "org/model has no such revision", "check model_revision"),
        (hub.HfHubHTTPError, 401, "org/model: the Hub answers 401", "unset HF_TOKEN"),
        (hub.HfHubHTTPError, 403, "org/model: the Hub answers 403", "token that may read it"),
        (hub.HfHubHTTPError, 429, "org/model: the Hub answers 429", "wait some minutes"),
        (hub.HfHubHTTPError, 503, "org/model: the Hub answers 503", "again later"),
    ],
)
def test_hub_errors_have_distinct_messages(kind, status, words, way_out, monkeypatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        # huggingface_hub looks into its cache after most refusals, in vain.
        missing = hub.LocalEntryNotFoundError("not in the cache")
        missing.__cause__ = kind("refused", response=MagicMock(status_code=status))
        raise OSError("You cannot have this.") from missing

    monkeypatch.setattr("recipes_lib.models.loading.AutoConfig.from_pretrained", refuse)
    _, found, remedy = catch_problem(lambda: load_model_config(config_for("org/model")))
    assert found == words
    assert way_out in remedy


def test_file_beyond_memory_is_explained(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("unable to mmap 64 bytes from file <model.safetensors>: Cannot allocate memory (12)")

    monkeypatch.setattr("recipes_lib.models.loading.AutoModelForCausalLM.from_pretrained", refuse)
    _, found, _ = catch_problem(lambda: load_causal_lm(config_for(tiny_model_dir), "sdpa"))
    assert "larger than the memory of this machine" in found


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_cache_that_cannot_be_written_is_no_incomplete_model(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code), "/cache/hub/blob")

    monkeypatch.setattr("recipes_lib.models.loading.AutoConfig.from_pretrained", refuse)
    _, found, remedy = catch_problem(lambda: load_model_config(config_for("org/model")))
    assert os.strerror(code) in found
    assert "complete model folder" not in remedy


def test_remote_code_is_not_run_by_default(model_dir: Path) -> None:
    (model_dir / "custom.py").write_text(f"open({str(model_dir / 'ran')!r}, 'w')")
    edit_json(model_dir / "config.json", model_type="custom", auto_map={"AutoConfig": "custom.Custom"})
    _, found, remedy = catch_problem(lambda: load_model_config(config_for(model_dir)))
    assert found == f"{model_dir} has its own code"
    assert "trust_remote_code: true" in remedy
    assert not (model_dir / "ran").exists()


def test_tokenizer_is_loaded_from_model(tiny_model_dir: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer = load_tokenizer(config_for(tiny_model_dir), TokensConfig())
    assert tokenizer.get_vocab() == tiny_tokenizer.get_vocab()
    assert tokenizer.chat_template == tiny_tokenizer.chat_template
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|endoftext|>", "<|pad|>")


def test_configured_tokens_and_template_are_saved_with_tokenizer(tiny_model_dir: Path, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0]['content'] }}é", encoding="utf-8")
    tokens = TokensConfig(eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template_path=str(template))
    load_tokenizer(config_for(tiny_model_dir), tokens).save_pretrained(tmp_path / "saved")
    saved = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert (saved.eos_token, saved.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert saved.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hié"


def test_tokenizer_name_or_path_is_loaded(tiny_tokenizer_dir: Path) -> None:
    config = config_for("/nowhere/at/all", tokenizer_name_or_path=str(tiny_tokenizer_dir), model_revision="0" * 40)
    assert load_tokenizer(config, TokensConfig()).vocab_size == 512
    missing = config_for(tiny_tokenizer_dir, tokenizer_name_or_path="/nowhere/at/all")
    assert catch_problem(lambda: load_tokenizer(missing, TokensConfig()))[0] == "tokenizer_name_or_path"


def test_eos_is_pad_token_if_tokenizer_has_none(model_dir: Path) -> None:
    edit_json(model_dir / "tokenizer_config.json", pad_token=None)
    tokenizer = load_tokenizer(config_for(model_dir), TokensConfig())
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    assert len(tokenizer) == 512


def test_all_tokenizer_problems_are_reported_at_once(model_dir: Path) -> None:
    edit_json(model_dir / "tokenizer_config.json", eos_token=None)
    tokens = TokensConfig(pad_token="<|nope|>", chat_template_path=str(model_dir / "nope.jinja"))
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(config_for(model_dir), tokens)
    assert [problem.where for problem in caught.value.problems] == ["pad_token", "eos_token", "chat_template_path"]
    where, found, _ = catch_problem(lambda: load_tokenizer(config_for(model_dir), TokensConfig(eos_token="<|no|>")))
    assert (where, "has no token '<|no|>'" in found) == ("eos_token", True)


def test_tokenizer_without_offsets_is_refused(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PreTrainedTokenizerFast, "is_fast", False)
    with pytest.raises(ConfigError, match=r"tokenizer of .* is not a fast one"):
        load_tokenizer(config_for(model_dir), TokensConfig())


def test_check_agreement_accepts_matching_model_and_tokenizer(tiny_model_dir: Path) -> None:
    config, generation_config = load_model_config(config_for(tiny_model_dir))
    tokenizer = load_tokenizer(config_for(tiny_model_dir), TokensConfig())
    assert check_agreement(config, generation_config, tokenizer, max_length=512) == []


def test_check_agreement_reports_every_mismatch(tiny_tokenizer_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer_dir)
    tokenizer.add_tokens([f"<extra_{number}>" for number in range(5)])
    tokenizer.bos_token = "<|im_start|>"
    config = LlamaConfig(vocab_size=512, max_position_embeddings=512, bos_token_id=0)
    problems = check_agreement(config, GenerationConfig(), tokenizer, max_length=513)
    assert [(problem.where, problem.found) for problem in problems] == [
        (
            "tokenizer_name_or_path",
            "the model has 512 embedding rows, none for <extra_0>, <extra_1>, <extra_2> and 2 more of the tokenizer",
        ),
        ("tokenizer_name_or_path", "the model starts with '<|endoftext|>', the tokenizer with '<|im_start|>'"),
        ("max_length", "513 tokens are more than the 512 positions of the model"),
    ]


def test_unused_special_tokens_beyond_embedding_are_accepted(tiny_tokenizer_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer_dir)
    tokenizer.add_tokens(["<image_soft_token>"], special_tokens=True)
    config = LlamaConfig(vocab_size=512)
    assert check_agreement(config, GenerationConfig(), tokenizer) == []
    clause = "; no text may contain <image_soft_token>, for which the model has no embedding"
    assert describe_spare_tokens(config, tokenizer) == clause
    assert describe_spare_tokens(LlamaConfig(vocab_size=513), tokenizer) == ""


@pytest.mark.parametrize("role", ["bos_token", "eos_token", "pad_token", "chat_template"])
def test_used_special_tokens_beyond_embedding_are_refused(tiny_tokenizer_dir: Path, role: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer_dir)
    tokenizer.add_tokens(["<special>"], special_tokens=True)
    setattr(tokenizer, role, "{{ '<special>' }}" if role == "chat_template" else "<special>")
    (problem,) = check_agreement(LlamaConfig(vocab_size=512, bos_token_id=None), GenerationConfig(), tokenizer)
    assert problem.found == "the model has 512 embedding rows, none for <special> of the tokenizer"
    assert describe_spare_tokens(LlamaConfig(vocab_size=512), tokenizer) == ""


def test_bos_token_may_be_any_of_models_list(tiny_tokenizer_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer_dir)
    tokenizer.bos_token = "<|im_start|>"
    config = LlamaConfig(vocab_size=512, bos_token_id=0)
    starts = GenerationConfig(bos_token_id=tokenizer.bos_token_id)
    assert check_agreement(config, starts, tokenizer) == []


def test_chat_templates_without_a_default_are_refused(tiny_tokenizer_dir: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer_dir)
    tokenizer.chat_template = {"rag": "a", "tool_use": "b"}
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="has chat templates without a default: rag, tool_use") as caught:
        load_tokenizer(config_for(tmp_path), TokensConfig())
    assert caught.value.problems[0].where == "chat_template_path"
    (tmp_path / "own.jinja").write_text("c")
    chosen = TokensConfig(chat_template_path=str(tmp_path / "own.jinja"))
    assert load_tokenizer(config_for(tmp_path), chosen).chat_template == "c"
    tokenizer.chat_template |= {"default": "d"}
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(config_for(tmp_path), TokensConfig()).get_chat_template() == "d"


def test_tokenizer_json_is_read_where_mistral_common_is_installed(tiny_model_dir, monkeypatch) -> None:
    asked = []
    monkeypatch.setitem(tokenization_auto.TOKENIZER_MAPPING_NAMES, "llama", "MistralCommonBackend")
    monkeypatch.setattr(
        "transformers.integrations.mistral.tokenizer.resolve_mistral_format",
        lambda *_, **options: asked.append(options) or (False, None),
    )
    assert load_tokenizer(config_for(tiny_model_dir), TokensConfig()).is_fast
    assert asked == []


def test_model_revision_is_not_applied_to_other_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refuse(name: str, revision: str | None, **_: object) -> None:
        asked.append((name, revision))
        raise OSError("no")

    monkeypatch.setattr("recipes_lib.models.loading.AutoTokenizer.from_pretrained", refuse)
    other = {"tokenizer_name_or_path": "org/other"}
    for changes in ({}, other, other | {"tokenizer_revision": "v2"}, {"tokenizer_revision": "v3"}):
        with pytest.raises(ConfigError):
            load_tokenizer(config_for("org/model", model_revision="v1", **changes), TokensConfig())
    assert asked == [("org/model", "v1"), ("org/other", None), ("org/other", "v2"), ("org/model", "v3")]


def test_configurations_are_of_model_revision(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    for kind in (AutoConfig, GenerationConfig):
        read = kind.from_pretrained

        def load(name: str, *, revision: str | None, read: Any = read, **_: object) -> Any:
            asked.append(revision)
            return read(name)

        monkeypatch.setattr(kind, "from_pretrained", load)
    for revision in ("v1", None):
        load_model_config(config_for(tiny_model_dir, model_revision=revision))
    assert asked == ["v1", "v1", None, "main"]


def test_commit_of_hub_model_is_found(tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit, repository = "c" * 40, tmp_path / "models--owner--base"
    shutil.copytree(tiny_model_dir, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for revision in (None, "main", commit):
        assert find_commit("owner/base", revision) == commit
    assert find_commit("owner/base", "trial") is None
    assert find_commit("owner/other", None) is None
    assert find_commit(str(tiny_model_dir), None) is None
    model = load_causal_lm(config_for(tiny_model_dir), "sdpa")
    assert model.config._commit_hash is None
    assert "_commit_hash" not in model.config.to_dict()


@pytest.mark.parametrize("is_shown", [True, False])
def test_bars_of_loading_are_hidden_and_other_bars_unchanged(tiny_model_dir, is_shown, capfd) -> None:
    enable_progress_bar()
    previous = set_tqdm_hook(None)
    if not is_shown:
        hub_progress.disable_progress_bars()
    try:
        load_causal_lm(config_for(tiny_model_dir), "eager")
        assert not capfd.readouterr().err
        assert hub_progress.are_progress_bars_disabled() is not is_shown
        AutoModelForCausalLM.from_pretrained(tiny_model_dir)
        assert "Loading weights" in capfd.readouterr().err, "the caller's own loading has its bar again"
    finally:
        hub_progress.enable_progress_bars()
        set_tqdm_hook(previous)
