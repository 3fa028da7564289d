"""Weight transfer to engines: sharded policies give the weights of replicated ones, one layer at a time."""

from __future__ import annotations

import copy

import pytest
import torch
from safetensors.torch import load_file
from tests.models.adapter_models import adapt, build_model
from torch import distributed
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import MixtralConfig, MixtralForCausalLM

from recipes_lib.errors import ConfigError
from recipes_lib.models.inference import unwrap_adapter
from recipes_lib.rl.engines.vllm import check_vllm, engine_errors, iterate_policy


@pytest.fixture
def shard():
    """Return a function that shards each layer, and the rest of a model, over one process."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)

    def apply(model, dtype=None):
        mesh = distributed.init_device_mesh("cpu", (1,))
        for module in (*unwrap_adapter(model).model.layers, model):
            fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
        return model

    try:
        yield apply
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("is_adapted", [False, True])
@pytest.mark.parametrize("kind", ["llama", "tied"])
def test_sharded_policy_gives_weights_of_replicated_policy(shard, kind, is_adapted):
    whole = adapt(build_model(kind)) if is_adapted else build_model(kind)
    sharded = shard(copy.deepcopy(whole))
    expected, shards = dict(iterate_policy(whole)), {n: v.full_tensor() for n, v in sharded.state_dict().items()}
    # Tensors that a receiver keeps stay valid after resharding.
    got = dict(iterate_policy(sharded))
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=0, atol=0)
    assert all(torch.equal(value.full_tensor(), shards[name]) for name, value in sharded.state_dict().items())


def test_fused_experts_are_sent_as_in_the_checkpoint(shard, tmp_path):
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = MixtralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, num_local_experts=4)
    MixtralForCausalLM(config).save_pretrained(tmp_path)
    policy, saved = MixtralForCausalLM.from_pretrained(tmp_path), load_file(tmp_path / "model.safetensors")
    assert "model.layers.1.block_sparse_moe.experts.3.w2.weight" in saved
    for whole_or_sharded in (policy, shard(copy.deepcopy(policy))):
        sent = dict(iterate_policy(whole_or_sharded))
        assert sent.keys() == saved.keys()
        assert all(torch.equal(sent[name], tensor) for name, tensor in saved.items())


def test_at_most_one_layer_is_gathered_at_a_time(shard):
    sharded = shard(build_model("llama"))
    most = 0
    for _ in iterate_policy(sharded):
        whole = [name for name, value in sharded.named_parameters() if not hasattr(value, "device_mesh")]
        units = {name.split(".")[2] if ".layers." in name else "rest" for name in whole}
        most = max(most, len(units))
    assert most == 1
    assert all(hasattr(value, "device_mesh") for value in sharded.parameters())


def test_weights_are_sent_in_compute_dtype(shard):
    sharded = shard(build_model("llama"), torch.bfloat16)
    assert {tensor.dtype for _, tensor in iterate_policy(sharded)} == {torch.bfloat16}


def test_engine_error_is_one_line_with_key():
    with pytest.raises(ConfigError) as refused, engine_errors("sampling answers"):
        raise RuntimeError("out of\n blocks")
    (problem,) = refused.value.problems
    assert (problem.where, problem.found) == ("use_vllm", "vLLM failed at sampling answers: out of blocks")


def test_missing_vllm_raises():
    with pytest.raises(ConfigError, match="vLLM is not installed"):
        check_vllm()
