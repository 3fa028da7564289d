"""How FSDP2 shards a model: in which precision it computes and reduces, a frozen model too, and back to its shards."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import fsdp2_prepare_model
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy


def settle_precision(accelerator: Accelerator) -> None:
    """Have FSDP2 reduce gradients and return losses in ``float32``; call it before any model is prepared.

    accelerate asks for the narrow type everywhere: losses and log-probabilities would have three digits, and gradients
    would be summed over the processes with as many. The products alone are narrow, as under autocast.

    Source: ``tests/training/test_sharded_models.py``.
    """
    plugin = accelerator.state.fsdp_plugin if accelerator.is_fsdp2 else None
    if plugin is not None and plugin.mixed_precision_policy is not None:
        plugin.mixed_precision_policy = MixedPrecisionPolicy(
            param_dtype=plugin.mixed_precision_policy.param_dtype,
            reduce_dtype=torch.float32,
            output_dtype=torch.float32,
        )


def prepare_frozen(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """Return a model that is not trained, sharded as the trained one is, its products in the same precision."""
    if accelerator.is_fsdp2:
        sharded: nn.Module = fsdp2_prepare_model(accelerator, model)
        return sharded
    prepared: nn.Module = accelerator.prepare_model(model, device_placement=True, evaluation_mode=True)
    # accelerate keeps what it prepares, for checkpoints of its own.
    accelerator._models.pop()
    return prepared


def reshard(model: nn.Module) -> None:
    """Leave every process with its own shards; FSDP2 keeps some weights whole after a forward pass."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
