"""The model inside a wrapper is the very one that was wrapped."""

from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from recipes_lib.models.inference import unwrap_adapter


def test_the_wrapped_model_is_found_and_any_other_is_itself(tiny_model_dir):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    assert unwrap_adapter(model) is model
    assert unwrap_adapter(get_peft_model(model, LoraConfig(target_modules=["q_proj"]))) is model
