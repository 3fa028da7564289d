"""Defaults of torch.compile and Liger, and regional compilation of layers."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from tests.training.trajectories import Narrator, make_packs, make_trainer
from torch import distributed, nn
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama import modeling_llama

from recipes_lib.config.loader import load_config
from recipes_lib.config.schema import RecipeConfig
from recipes_lib.errors import ConfigError
from recipes_lib.models.attention.varlen import register_varlen
from recipes_lib.models.heads.loss_head import add_loss_head
from recipes_lib.training.layouts.launch_environment import Launch, Layout
from recipes_lib.training.optim import compilation
from recipes_lib.training.optim.compilation import (
    Compilation,
    choose_compilation,
    choose_liger,
    compile_layers,
    preserve_architecture,
    verify_compiler,
)

ONE = Launch(rank=0, local_rank=0, world_size=1, engine="")
FP8 = Launch(rank=0, local_rank=0, world_size=1, engine="", precision="fp8")
TENSORS = Launch(rank=0, local_rank=0, world_size=2, engine="FSDP", layout=Layout(sizes={"tp": 2}))
CONTEXT = Launch(rank=0, local_rank=0, world_size=2, engine="FSDP", layout=Layout(sizes={"cp": 2}))
PIPELINE = Launch(rank=0, local_rank=0, world_size=2, engine="", layout=Layout(pipeline_stages=2))


def read(recipe: str, **keys: Any) -> RecipeConfig:
    flags = {"model_name_or_path": "o/m", "dataset_name": "o/d", "output_dir": "out", **keys}
    flags |= {"max_length": 8} if recipe == "pretrain" else {}
    return load_config(recipe, [f"--{name}={value}" for name, value in flags.items()])


@pytest.mark.parametrize(
    ("recipe", "keys", "launch", "is_cuda", "expected"),
    [
        ("pretrain", {}, ONE, True, {}),
        ("pretrain", {}, ONE, False, None),
        ("pretrain", {"torch_compile": "false"}, ONE, True, None),
        ("pretrain", {}, TENSORS, True, None),
        ("pretrain", {}, PIPELINE, True, None),
        ("pretrain", {}, CONTEXT, True, None),
        ("sft", {}, ONE, True, None),
        ("sft", {}, FP8, True, {}),
        ("sft", {"torch_compile": "true"}, ONE, False, {}),
        ("sft", {"torch_compile_mode": "max-autotune"}, ONE, False, {"mode": "max-autotune"}),
        ("dpo", {"torch_compile": "true", "torch_compile_backend": "eager"}, ONE, True, {"backend": "eager"}),
    ],
)
def test_compilation_options_by_recipe_and_launch(monkeypatch, recipe, keys, launch, is_cuda, expected) -> None:
    monkeypatch.setattr(compilation, "find_compiler_obstacle", lambda: "")
    assert choose_compilation(read(recipe, **keys), launch, is_cuda=is_cuda) == expected


def test_pretraining_is_not_compiled_without_c_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "find_compiler_obstacle", lambda: "no Python.h")
    assert choose_compilation(read("pretrain"), ONE, is_cuda=True) is None
    assert choose_compilation(read("sft", torch_compile_backend="eager"), ONE, is_cuda=True) == {"backend": "eager"}
    for config, launch in ((read("sft", torch_compile="true"), ONE), (read("sft"), FP8)):
        with pytest.raises(ConfigError, match=r"torch_compile: .* this machine has no Python\.h"):
            verify_compiler(choose_compilation(config, launch, is_cuda=True), launch)
    verify_compiler({"backend": "eager"}, ONE)
    verify_compiler(None, ONE)


def test_optimizer_on_the_host_needs_extensions(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = Launch(rank=0, local_rank=0, world_size=2, engine="DEEPSPEED", layout=Layout(offloads_optimizer=True))
    monkeypatch.setattr(compilation, "find_extension_obstacle", lambda: "no C++ compiler")
    with pytest.raises(ConfigError, match=r"offload_optimizer_device: .* no C\+\+ compiler\n.* without offload"):
        verify_compiler(None, launch)


@pytest.mark.parametrize(
    ("keys", "launch", "found"),
    [
        ({"torch_compile": "false"}, FP8, "slower than bf16"),
        ({"torch_compile_mode": "max_autotune"}, ONE, "torch_compile_mode: Unrecognized mode=max_autotune"),
        ({"torch_compile_backend": "inductr"}, ONE, "torch_compile_backend: Invalid backend: 'inductr'"),
    ],
)
def test_invalid_compilation_is_refused(keys, launch, found) -> None:
    with pytest.raises(ConfigError, match=found):
        choose_compilation(read("sft", **keys), launch, is_cuda=False)


@pytest.mark.parametrize(
    ("keys", "launch", "is_cuda", "is_installed", "expected"),
    [
        ({}, ONE, True, True, True),
        ({}, ONE, True, False, False),
        ({}, ONE, False, True, False),
        ({}, TENSORS, True, True, False),
        ({}, PIPELINE, True, True, False),
        ({}, CONTEXT, True, True, False),
        ({"use_liger_kernel": "false"}, ONE, True, True, False),
        ({"use_liger_kernel": "true"}, ONE, True, True, True),
        ({"use_liger_kernel": "true"}, ONE, False, False, False),
        # Inductor fuses the same operations.
        ({"torch_compile": "true"}, ONE, True, True, False),
        ({"torch_compile": "true", "use_liger_kernel": "true"}, ONE, True, True, True),
    ],
)
def test_liger_is_used_if_supported_without_cross_entropies(monkeypatch, keys, launch, is_cuda, is_installed, expected):
    monkeypatch.setattr(compilation, "is_liger_kernel_available", lambda: is_installed)
    monkeypatch.setattr(compilation, "find_compiler_obstacle", lambda: "")
    chosen = choose_liger(read("sft", **keys), launch, is_cuda=is_cuda)
    assert chosen["use_liger_kernel"] is expected
    if expected:
        assert chosen["liger_kernel_config"] == {"cross_entropy": False, "fused_linear_cross_entropy": False}


def test_liger_kernel_config_is_kept_except_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "is_liger_kernel_available", lambda: True)
    monkeypatch.setattr(compilation, "find_compiler_obstacle", lambda: "")
    config = read("sft")
    config.training["liger_kernel_config"] = {"rope": False}
    assert choose_liger(config, ONE, is_cuda=True)["liger_kernel_config"]["rope"] is False
    config.training["liger_kernel_config"] = {"fused_linear_cross_entropy": True}
    with pytest.raises(ConfigError, match="replace the loss head"):
        choose_liger(config, ONE, is_cuda=True)


def test_requested_liger_must_be_installed_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "is_liger_kernel_available", lambda: False)
    with pytest.raises(ConfigError, match="pip install liger-kernel"):
        choose_liger(read("sft", use_liger_kernel="true"), ONE, is_cuda=True)


def test_liger_needs_a_machine_that_compiles_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "is_liger_kernel_available", lambda: True)
    monkeypatch.setattr(compilation, "find_compiler_obstacle", lambda: "no Python.h")
    assert choose_liger(read("sft"), ONE, is_cuda=True)["use_liger_kernel"] is False
    assert choose_liger(read("sft", use_liger_kernel="true"), ONE, is_cuda=False)["use_liger_kernel"] is False
    with pytest.raises(ConfigError, match=r"has no Python\.h"):
        choose_liger(read("sft", use_liger_kernel="true"), ONE, is_cuda=True)


def test_architecture_is_as_before_after_training_with_liger(tiny_model_dir, tmp_path, monkeypatch) -> None:
    """Its kernels replace functions that a model loaded later, on a CPU, would call."""
    own, calls = modeling_llama.apply_rotary_pos_emb, []

    def rotate(*args: Any, **options: Any) -> Any:
        calls.append(1)
        return own(*args, **options)

    monkeypatch.setattr(
        "transformers.trainer.apply_liger_kernel", lambda *_: setattr(modeling_llama, "apply_rotary_pos_emb", rotate)
    )
    trainer, _ = make_trainer(tiny_model_dir, tmp_path, make_packs(), max_steps=1)
    trainer.args.use_liger_kernel = True
    trainer.train()
    assert calls
    assert modeling_llama.apply_rotary_pos_emb is own


def is_compiled(model: nn.Module) -> bool:
    return any(module._compiled_call_impl is not None for module in model.modules())


def build_batch(lengths: list[int]) -> dict[str, Any]:
    ids = torch.arange(sum(lengths))[None] % 60 + 1
    bounds = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    labels = ids.masked_fill(positions == 0, -100)
    kernel = {
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }
    return {"input_ids": ids, "position_ids": positions, "labels": labels, **kernel}


@pytest.mark.parametrize(
    ("kernel", "checkpointed", "rows"),
    [
        # Rows of one length are compiled once; another length would be traced again, with dynamic shapes.
        ("sdpa", True, [[5, 9, 3], [8, 9]]),
        pytest.param("varlen", False, [[5, 9, 3], [8, 8], [4, 4, 4, 9]], marks=pytest.mark.slow),
    ],
)
def test_compiled_layers_equal_eager_on_packed_rows(kernel: str, checkpointed: bool, rows: list[list[int]]) -> None:
    register_varlen()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation=kernel).train()
    add_loss_head(model)
    names = list(model.state_dict())
    if checkpointed:
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    results = []
    for compiles in (False, True):
        if compiles:
            assert compile_layers(model, {"backend": "aot_eager"}) == 2
            assert is_compiled(model)
        losses = []
        model.zero_grad()
        for lengths in rows:
            loss = model(**build_batch(lengths), loss_head=True).nll_sum
            loss.backward()
            losses.append(loss.detach())
        results.append([torch.stack(losses), *(parameter.grad.clone() for parameter in model.parameters())])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-5)
    assert list(model.state_dict()) == names
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"]


# Undoing monkeypatch's setattr would delete the option, for every later test.
@torch._dynamo.config.patch(optimize_ddp=True)
def test_layer_is_one_graph_under_ddp() -> None:
    torch._dynamo.reset()
    # More than DDP's first bucket of 1 MiB in each layer.
    config = LlamaConfig(
        vocab_size=64, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4
    )
    model = AutoModelForCausalLM.from_config(config)
    graphs = []
    compile_layers(model, {"backend": lambda graph, _: graphs.append(graph) or graph.forward})
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        ids = torch.arange(16)[None]
        nn.parallel.DistributedDataParallel(model)(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    finally:
        distributed.destroy_process_group()
    assert len(graphs) == 1


@torch._dynamo.config.patch(optimize_ddp=True, recompile_limit=8)
def test_layers_of_many_kinds_and_modes_are_all_compiled() -> None:
    torch._dynamo.reset()
    config = LlamaConfig(
        vocab_size=64, hidden_size=8, intermediate_size=8, num_hidden_layers=6, num_attention_heads=2, use_cache=False
    )
    model = AutoModelForCausalLM.from_config(config)
    for kind, layer in enumerate(model.model.layers):
        layer.self_attn.scaling = 0.1 * kind
    graphs: list[Any] = []
    compile_layers(model, {"backend": lambda graph, _: graphs.append(graph) or graph.forward})
    for with_gradients in (True, False):
        with torch.set_grad_enabled(with_gradients):
            model(input_ids=torch.arange(16)[None])
    assert len(graphs) == 2 * 6


def test_trained_model_computes_like_a_reloaded_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """After training, without compilation and the methods and functions that Liger replaces, as a stand-in here."""

    def distort(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        return 2 * hidden

    distort.__module__ = "liger_kernel.transformers.rms_norm"
    monkeypatch.setattr(modeling_llama, "rotate_half", rotate := modeling_llama.rotate_half)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    model, ids = AutoModelForCausalLM.from_config(config), torch.arange(8)[None]
    before = model(input_ids=ids).logits
    with preserve_architecture(model):
        compile_layers(model, {"backend": "eager"})
        modeling_llama.rotate_half = torch.neg
        for layer in model.model.layers:
            vars(layer.input_layernorm)["forward"] = distort.__get__(layer.input_layernorm)
        assert is_compiled(model)
        assert not torch.equal(model(input_ids=ids).logits, before)
    assert not is_compiled(model)
    assert modeling_llama.rotate_half is rotate
    assert torch.equal(model(input_ids=ids).logits, before)


def test_layers_are_compiled_by_the_trainer_and_fallback_is_logged(tiny_model_dir, tmp_path, monkeypatch) -> None:
    compiled: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(
        "recipes_lib.training.optim.compilation.compile_layers",
        lambda model, options: compiled.append((type(model).__name__, options)) or 2,
    )
    keys = {"torch_compile_backend": "eager", "max_steps": 1}
    trainer, recorder = make_trainer(tiny_model_dir, tmp_path, make_packs(), **keys)
    assert not trainer.args.torch_compile, "upstream would compile the whole model"
    trainer.train()
    assert compiled == [("LlamaForCausalLM", {"backend": "eager"})]
    assert "torch.compile of 2 layers made no graph: torch fell back to eager mode" in recorder.lines


def test_model_of_a_finished_training_is_not_compiled(tiny_model_dir, tmp_path) -> None:
    trainer, recorder = make_trainer(tiny_model_dir, tmp_path, make_packs(), torch_compile_backend="eager", max_steps=1)
    trainer.train()
    assert any(line.startswith("torch.compile of 2 layers made ") for line in recorder.lines)
    assert not is_compiled(trainer.model)


def test_second_run_of_a_process_is_compiled_as_the_first() -> None:
    """Graphs of the first would be reused without being counted: as if torch had fallen back to eager mode."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    lines: list[str] = []
    for _ in range(2):
        model = AutoModelForCausalLM.from_config(config)
        check = Compilation(model, {"backend": "eager"}, Narrator(lines))
        model(input_ids=torch.arange(8)[None], use_cache=False)
        check.on_step_end(None, None, None)
    assert re.search(r"made [1-9]\d* graphs?$", lines[0])
    assert lines[1] == lines[0]


def test_compiled_graphs_are_counted_instead_of_frames(monkeypatch) -> None:
    """A frame whose only graph break is inside of a checkpoint counts as ``ok`` and runs in eager mode."""
    monkeypatch.setattr("recipes_lib.training.optim.compilation.compile_layers", lambda *_: 2)
    lines: list[str] = []
    counters = torch._dynamo.utils.counters
    for kind, name in (("frames", "ok"), ("stats", "unique_graphs")):
        check = Compilation(None, {}, Narrator(lines))
        counters[kind][name] += 3
        for _ in range(2):  # Only the first step is reported.
            check.on_step_end(None, None, None)
    assert [line.rpartition("made ")[2] for line in lines] == ["no graph: torch fell back to eager mode", "3 graphs"]
