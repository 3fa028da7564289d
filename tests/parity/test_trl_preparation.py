"""SFT preparation and trajectory against TRL's ``SFTTrainer`` on the same chats."""

from functools import partial

import pytest
import trl
from tests.parity import trl_runs
from tests.rows import write_rows
from tests.training.trajectories import Recorder
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig

from recipes_lib.data.packed.collators import PackedCollator
from recipes_lib.training.layouts.launch_environment import read_launch
from recipes_lib.training.monitoring.callbacks import Observer
from recipes_lib.training.monitoring.metrics import StepCounter
from recipes_lib.training.monitoring.progress import build_progress
from recipes_lib.training.trainers.arguments import build_training_arguments
from recipes_lib.training.trainers.next_token_trainer import SFTTrainer

# TRL trains on answers only where a template has markers.
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}\n{% else %}{{ m['content'] }}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
KEYS = trl_runs.SHARED | {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "max_steps": 5,
}
LAYOUTS = {
    "messages": lambda n: {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": f"What is {n} times {n + 3}? " * (1 + n % 3)},
            {"role": "assistant", "content": f"It is {n * (n + 3)}."},
            {"role": "user", "content": "Sure?"},
            {"role": "assistant", "content": "Yes. " * (1 + n % 5)},
        ]
    },
    "prompt_completion": lambda n: {"prompt": f"{n} plus {n} is", "completion": f" {2 * n}, " * (1 + n % 4)},
    "text": lambda n: {"text": f"Line {n} of the text. " * (1 + n % 6)},
}


def train_ours(model_dir, path, tmp_path):
    config, data = trl_runs.prepare_rows("sft", model_dir, path, tmp_path, KEYS)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    recorder = Recorder()
    SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(model_dir),
        args=build_training_arguments(config, read_launch(), has_eval=False),
        train_dataset=data,
        data_collator=PackedCollator(pad_token_id=tokenizer.pad_token_id),
        processing_class=tokenizer,
        observer=Observer(StepCounter(), [], [recorder], build_progress(is_main=False)),
    ).train()
    return recorder.steps


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sft_trajectory_equals_trl(tiny_model_dir, tmp_path, layout):
    model_dir = trl_runs.copy_with_template(tiny_model_dir, tmp_path / "model", MARKED)
    path = write_rows(tmp_path / "rows.jsonl", (LAYOUTS[layout](n) for n in range(16)))
    ours = train_ours(model_dir, path, tmp_path)
    arguments = partial(SFTConfig, max_length=512, assistant_only_loss=layout == "messages", **KEYS)
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    theirs = trl_runs.train_trl(trl.SFTTrainer, arguments, model, model_dir, path, tmp_path)
    assert len(ours) == KEYS["max_steps"]
    trl_runs.assert_same_steps(theirs, ours, rel=2e-5)
