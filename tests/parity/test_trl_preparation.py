"""SFT preparation and trajectory against TRL's ``SFTTrainer`` on the same chats."""

import datasets
import pytest
from tests.rows import write_rows
from tests.training.trajectories import Recorder
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig
from trl import SFTTrainer as TRLTrainer

from recipes_lib.config.loader import load_config
from recipes_lib.data.packed.collators import PackedCollator
from recipes_lib.data.packed.prepared_set import prepare
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
SHARED = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "max_steps": 5,
    "seed": 3,
    "logging_steps": 1,
    "bf16": False,
    "use_cpu": True,
    "save_strategy": "no",
    "activation_checkpointing": False,
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


@pytest.fixture(params=LAYOUTS)
def rows(request, tmp_path):
    path = tmp_path / "rows.jsonl"
    write_rows(path, (LAYOUTS[request.param](n) for n in range(16)))
    return request.param, path


@pytest.fixture
def model_dir(tiny_model_dir, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    tokenizer.chat_template = MARKED
    tokenizer.save_pretrained(tmp_path / "model")
    AutoModelForCausalLM.from_pretrained(tiny_model_dir).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def train_ours(model_dir, path, tmp_path):
    keys = SHARED | {
        "model_name_or_path": model_dir,
        "dataset_name": path,
        "output_dir": tmp_path / "ours",
        "prepared_dir": tmp_path / "prepared",
        "packing": False,
    }
    config = load_config("sft", [f"--{name}={value}" for name, value in keys.items()])
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    data = prepare(config, lambda _: tokenizer)
    recorder = Recorder()
    SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(model_dir),
        args=build_training_arguments(config, read_launch(), has_eval=False),
        train_dataset=data.train,
        data_collator=PackedCollator(pad_token_id=tokenizer.pad_token_id),
        processing_class=tokenizer,
        observer=Observer(StepCounter(), [], [recorder], build_progress(is_main=False)),
    ).train()
    return recorder.steps


def train_trl(model_dir, path, tmp_path, layout):
    recorder = Recorder()
    TRLTrainer(
        model=AutoModelForCausalLM.from_pretrained(model_dir),
        args=SFTConfig(
            output_dir=str(tmp_path / "trl"),
            max_length=512,
            assistant_only_loss=layout == "messages",
            report_to="none",
            disable_tqdm=True,
            **SHARED,
        ),
        train_dataset=datasets.load_dataset(
            "json", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache")
        ),
        processing_class=AutoTokenizer.from_pretrained(model_dir),
        callbacks=[recorder],
    ).train()
    return recorder.steps


def test_sft_trajectory_equals_trl(rows, model_dir, tmp_path):
    layout, path = rows
    ours = train_ours(model_dir, path, tmp_path)
    theirs = train_trl(model_dir, path, tmp_path, layout)
    assert len(ours) == 5
    for step, (expected, got) in enumerate(zip(theirs, ours, strict=True), 1):
        assert got == pytest.approx(expected, rel=2e-5), f"step {step}"
