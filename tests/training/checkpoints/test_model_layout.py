"""Choice of the model layout, and saving and loading of trained parameters across layouts."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, TrainingArguments
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from recipes_lib.config.schema import AdapterConfig
from recipes_lib.models.adapters.lora import add_adapter, read_adapter_state
from recipes_lib.models.adapters.saved import ADAPTER_WEIGHTS
from recipes_lib.models.saved_weights import BrokenSaveError
from recipes_lib.training.checkpoints.model_layout import (
    ModelLayout,
    PipelineLayout,
    ReplicatedLayout,
    ShardedLayout,
    choose_layout,
    choose_learner_layout,
    load_trained,
)
from recipes_lib.training.checkpoints.saver import CheckpointSaver
from recipes_lib.training.checkpoints.sharded import Trained


def make_trainer(*, deepspeed=False, fsdp=False, part=False):
    model = nn.Linear(2, 2)
    if part:
        model.part = object()
    return SimpleNamespace(model=model, is_deepspeed_enabled=deepspeed, is_fsdp_enabled=fsdp)


@pytest.mark.parametrize(
    ("launch", "layout", "engine", "is_shared"),
    [
        ({}, ReplicatedLayout, "", False),
        ({"fsdp": True}, ShardedLayout, "FSDP", True),
        ({"part": True}, PipelineLayout, "FSDP", True),
        ({"part": True, "fsdp": True}, PipelineLayout, "FSDP", True),
        ({"deepspeed": True}, ModelLayout, "DEEPSPEED", True),
    ],
)
def test_choose_layout(launch, layout, engine, is_shared):
    chosen = choose_layout(make_trainer(**launch))
    assert type(chosen) is layout
    assert (chosen.engine, chosen.is_shared) == (engine, is_shared)


def test_drop_copies_removes_tied_weight():
    model = SimpleNamespace(all_tied_weights_keys={"lm_head.weight": "model.embed_tokens.weight"})
    embedding = torch.ones(2)
    state = {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding.clone()}
    assert ModelLayout().drop_copies(model, state) == {"model.embed_tokens.weight": embedding}


def test_base_layout_leaves_saving_and_loading_to_upstream(tmp_path):
    layout, model = ModelLayout(), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    trained = Trained({}, optimizer)
    saver = SimpleNamespace(is_main=True)
    assert layout.save_model(tmp_path, model, None, saver) is layout.save_optimizer(tmp_path, trained, None) is None
    assert not layout.load_model(tmp_path, model)
    assert not layout.load_optimizer(tmp_path, model, trained, lambda _: optimizer)
    assert layout.gather(model) is None


@pytest.fixture
def mesh():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def train(mesh, seed):
    """Train one step of a linear layer with frozen bias, sharded over ``mesh`` if given."""
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    if mesh is not None:
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
    optimizer = torch.optim.AdamW([model.weight], lr=0.1 + seed)
    model.weight.square().sum().backward()
    optimizer.step()
    return model, {"weight": model.weight}, optimizer


@pytest.mark.parametrize("reads", ["replicated", "sharded"])
@pytest.mark.parametrize("writes", ["replicated", "sharded"])
def test_trained_parameters_load_across_layouts(mesh, tmp_path, writes, reads):
    (model, parameters, optimizer), place = train(mesh if writes == "sharded" else None, 0), tmp_path / "policy"
    layout = choose_learner_layout(model)
    assert layout.is_shared is (writes == "sharded")
    saver = CheckpointSaver(TrainingArguments(output_dir=str(tmp_path), use_cpu=True), print, engine=layout.engine)
    saver.decide_to_copy((parameters, dict(optimizer.state)))
    for task in layout.save_trained(place, Trained(parameters, optimizer), saver):
        task()
    layout.verify_trained(place, {"weight": model.weight.shape})
    layout.compare_trained(place, Trained(parameters, optimizer))
    _, other, other_optimizer = train(mesh if reads == "sharded" else None, 1)
    load_trained(place, Trained(other, other_optimizer))
    assert other_optimizer.param_groups[0]["lr"] == 0.1
    moments = [(one.state[part["weight"]], part["weight"]) for one, part in
               ((optimizer, parameters), (other_optimizer, other))]  # fmt: skip
    for state, weight in moments:
        assert torch.equal(to_local(weight), to_local(moments[0][1]))
        assert all(torch.equal(to_local(value), to_local(moments[0][0][key])) for key, value in state.items())
    with torch.no_grad():
        to_local(model.weight)[0, 0] += 1
    with pytest.raises(BrokenSaveError, match="weight differ"):
        layout.compare_trained(place, Trained(parameters, optimizer))


def to_local(tensor):
    """Return the local shard, which in one process is the whole tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def test_state_of_paged_optimizer_is_saved_without_its_attributes(tmp_path):
    """Resuming on several GPUs loads states onto them, where bitsandbytes ends the process by ``is_paged``."""
    _, parameters, optimizer = train(None, 0)
    moment = optimizer.state[parameters["weight"]]["exp_avg"]
    moment.is_paged, moment.page_deviceid = True, 0
    saver = CheckpointSaver(TrainingArguments(output_dir=str(tmp_path), use_cpu=True), print)
    (write,) = ReplicatedLayout().save_optimizer(tmp_path, Trained(parameters, optimizer), saver)
    write()
    (saved,) = torch.load(tmp_path / "optimizer.pt", weights_only=True)["state"].values()
    assert torch.equal(saved["exp_avg"], moment)
    assert not vars(saved["exp_avg"])
    assert moment.is_paged


def test_adapter_is_saved_without_state_of_base(tmp_path, tiny_model_dir, monkeypatch):
    """That of a 4-bit layer is large, and computed for each save."""
    model = add_adapter(AutoModelForCausalLM.from_pretrained(tiny_model_dir), AdapterConfig(use_peft=True), seed=0)
    expected = read_adapter_state(model)
    monkeypatch.setattr(LlamaRMSNorm, "_save_to_state_dict", None)
    saver = CheckpointSaver(TrainingArguments(output_dir=str(tmp_path)), say=lambda _: None)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    model.generation_config.eos_token_id = [7, 9]
    (write,) = ReplicatedLayout().save_model(tmp_path / "new", model, tokenizer, saver)
    write()
    assert ModelLayout().save_model(tmp_path / "deepspeed", model, tokenizer, saver) is None
    stops = [GenerationConfig.from_pretrained(tmp_path / name).eos_token_id for name in ("new", "deepspeed")]
    assert stops == [[7, 9], [7, 9]]
    saved = load_file(tmp_path / "new" / ADAPTER_WEIGHTS)
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], expected[name]) for name in saved)
