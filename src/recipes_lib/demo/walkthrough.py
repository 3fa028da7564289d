"""Steps of ``recipes demo``: data from the standard library, the pipeline of all recipes, and a summary."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import chdir
from pathlib import Path
from textwrap import indent
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from recipes_lib.config.table import read_lists
from recipes_lib.demo.stdlib_texts import LIBRARY, Chat, QuestionTemplate, build_chats, load_modules, split_texts
from recipes_lib.errors import EXIT_DONE
from recipes_lib.files import explain_write_errors, read_lines, read_record
from recipes_lib.models.loading import hide_progress_bars
from recipes_lib.models.vocabulary import CHATML_TEMPLATE, CHATML_TOKENS, train_tokenizer
from recipes_lib.pipelines.pipeline import load_pipeline
from recipes_lib.pipelines.runner import run_pipeline
from recipes_lib.report.overview import write_overview

VOCAB_SIZE = 2048
MAX_POSITIONS = 512

MAX_CHATS = 3000
"""Chats for LoRA, reward model and PPO: about as many as these stages read in their few steps."""
SEED = 0
SHOWN_CHARACTERS = 100
MAX_ANSWERED = 250
"""Held-out chats that models answer; preference pairs use all held-out chats, since they need no sampling."""
FIGURES = read_lists(Path(__file__).with_name("figures.yaml"))
TASK = Path(__file__).with_name("held_out_pairs.yaml")
BITS = "eval_bits_per_byte"
TRY_IT = """from transformers import pipeline
ask = pipeline("text-generation", {model!r}, do_sample=False)
print(ask([{{"role": "user", "content": {question!r}}}])[0]["generated_text"][-1]["content"])"""


def build_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer of 2048 tokens, with a ChatML chat template."""
    tokenizer = train_tokenizer(
        texts, vocab_size=VOCAB_SIZE, special_tokens=CHATML_TOKENS, chat_template=CHATML_TEMPLATE
    )
    tokenizer.model_max_length = MAX_POSITIONS
    return tokenizer


def save_student(folder: Path, tokenizer: PreTrainedTokenizerFast, seed: int) -> int:
    """Write a randomly initialised Llama, a quarter of the teacher's size, with the tokenizer; return its weights."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=0.05,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    # Restores the global generator: later draws do not depend on the number of weights.
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return int(model.num_parameters())


def shorten(chats: Iterable[Chat]) -> Iterator[Chat]:
    """Yield those chats whose answer has a short form, with a prompt that asks for it."""
    for chat in chats:
        if chat.question.brief and (match := re.match(chat.question.brief, chat.answer)):
            yield Chat(chat.question, f"Briefly: {chat.prompt}", f"{match[1].capitalize()}.")


def ask(chat: Chat) -> dict[str, Any]:
    """Return a prompt row: the question, and the right answer in the column ``solution``."""
    return {"prompt": [{"role": "user", "content": chat.prompt}], "solution": chat.answer}


def build_pairs(chats: Sequence[Chat]) -> Iterator[dict[str, Any]]:
    """Yield ``preference`` rows in the order of the chats: a prompt with its right answer and a wrong one.

    The wrong answer is the right one of another chat with the same question template, and vice versa. Each answer is
    therefore rejected as often as it is chosen, so that only the prompt determines the label. Chats without a partner
    are dropped.
    """
    unpaired: defaultdict[QuestionTemplate, deque[int]] = defaultdict(deque)
    partners: dict[int, int] = {}
    for number, chat in enumerate(chats):
        queue = unpaired[chat.question]  # All chats in it have the same answer, or they would be paired.
        if queue and chats[queue[0]].answer != chat.answer:
            other = queue.popleft()
            partners |= {number: other, other: number}
        else:
            queue.append(number)
    for number in sorted(partners):
        chosen, rejected = chats[number], chats[partners[number]]
        yield {
            "prompt": [{"role": "user", "content": chosen.prompt}],
            "chosen": [{"role": "assistant", "content": chosen.answer}],
            "rejected": [{"role": "assistant", "content": rejected.answer}],
        }


def run_demo(file: Path, output_dir: Path, num_jobs: int = 1) -> int:
    """Write the data, run all stages and print the results; return the exit code of the first stage that fails.

    Args:
        file: The pipeline file.
        output_dir: Folder of all outputs.
        num_jobs: Stages that may run at the same time, each on one core.

    Raises:
        ConfigError: ``output_dir`` cannot be written.
        DataError: This Python has no sources of its standard library.
    """
    console = Console(highlight=False, markup=False, soft_wrap=True)
    hide_progress_bars()
    started = time.perf_counter()

    def announce(purpose: str) -> None:
        console.print(f"\nat {time.perf_counter() - started:.0f} s: {purpose}", style="bold")

    pipeline = load_pipeline(file)
    console.print("From your Python's sources to a small assistant: about six minutes on two cores.")
    announce("texts and chats from the standard library, and a tokenizer")
    open_folder(output_dir)
    for line in write_start(output_dir):
        console.print(f"  {line}")
    console.print(f"\n  cd {shlex.quote(str(output_dir))} && recipes run {shlex.quote(str(file))}", style="dim")
    # Paths in the pipeline and its recipes are relative to this folder.
    with chdir(output_dir):
        code = run_pipeline(
            pipeline, pipeline.stages, announce, on_change=lambda: write_overview(Path()), slots=({},) * num_jobs
        )
    if code:
        return code
    announce("results on held-out modules")
    for show in (show_answers, show_figures, show_students, show_verdict):
        show(output_dir, console)
    show_places(output_dir, [stage.name for stage in pipeline.stages], console)
    return EXIT_DONE


def open_folder(output_dir: Path) -> None:
    """Create the folders, and check that they are writable.

    Raises:
        ConfigError: The folder cannot be written.
    """
    with explain_write_errors(output_dir, "name another --output_dir"):
        (output_dir / "data").mkdir(parents=True, exist_ok=True)
        # An existing folder may be read-only, which `mkdir` does not notice.
        (output_dir / "data" / "pretrain.jsonl").touch()


def write_start(output_dir: Path) -> Iterator[str]:
    """Write data, tokenizer and the initial student; yield a line about each."""
    modules = load_modules(LIBRARY)
    texts, chats = split_texts(modules, SEED), build_chats(modules, SEED)
    few, few_held_out = chats.train[:MAX_CHATS], chats.held_out[:MAX_ANSWERED]
    files: dict[str, list[Any]] = {
        "pretrain": [{"text": text} for text in texts.train],
        "pretrain_held_out": [{"text": text} for text in texts.held_out],
        "sft": [chat.row for chat in chats.train],
        "sft_held_out": [chat.row for chat in few_held_out],
        "brief": [chat.row for chat in shorten(few)],
        "brief_held_out": [chat.row for chat in shorten(few_held_out)],
        "pairs": list(build_pairs(few)),
        "pairs_held_out": list(build_pairs(chats.held_out)),
        # Disjoint from the prompts of `pairs`, which the reward model is trained on.
        "questions": [ask(chat) for chat in chats.train[MAX_CHATS : 2 * MAX_CHATS]],
        "questions_held_out": [ask(chat) for chat in few_held_out],
    }
    for name, rows in files.items():
        path = output_dir / "data" / f"{name}.jsonl"
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
        yield f"{path}: {len(rows)} rows"
    (output_dir / "tasks").mkdir(exist_ok=True)
    shutil.copyfile(TASK, output_dir / "tasks" / TASK.name)
    tokenizer = build_tokenizer(texts.train)
    tokenizer.save_pretrained(output_dir / "tokenizer")
    yield f"{output_dir / 'tokenizer'}: {len(tokenizer)} tokens"
    num_weights = save_student(output_dir / "student", tokenizer, SEED)
    yield f"{output_dir / 'student'}: {num_weights:,} random weights"


def show_figures(output_dir: Path, console: Console) -> None:
    """Print the metrics on held-out modules, at the start and at the end of each stage."""
    table = Table("on held-out modules", "before", "after")
    for stage, label, key, form in FIGURES["figures"]:
        table.add_row(f"{stage}: {label}", *(format(value, form) for value in read_ends(output_dir / stage, key)))
    console.print()
    console.print(table)


def show_students(output_dir: Path, console: Console) -> None:
    """Print bits per byte of the teacher, and of the student trained with and without distillation."""
    table = Table("bits for each byte of held-out modules", "before", "after")
    bits = {}
    for stage, label in FIGURES["students"].items():
        before, bits[stage] = read_ends(output_dir / stage, BITS)
        table.add_row(label, f"{before:.3f}", f"{bits[stage]:.3f}")
    console.print()
    console.print(table)
    gain, distance = bits["labels"] - bits["distill"], bits["labels"] - bits["pretrain"]
    share = f"{gain / distance:.0%} of the way to the teacher"
    console.print(f"At equal tokens, distillation gains {gain:.3f} bits, {share}.")


def read_ends(run_dir: Path, key: str) -> tuple[float, float]:
    """Return the first and the last value of a metric of a run."""
    values = [line[key] for line in read_lines(run_dir / "metrics.jsonl") if line and key in line]
    return values[0], values[-1]


def show_verdict(output_dir: Path, console: Console) -> None:
    """Print whether the reward model passes the gates for PPO, and those that it fails."""
    failed = read_record(output_dir / "reward" / "reward_report.json")["failed_gates"]
    console.print(f"\nIs the reward model good enough for PPO? {'No:' if failed else 'Yes, it passes every gate.'}")
    for gate in failed:
        console.print(f"  {gate}")


def show_answers(output_dir: Path, console: Console) -> None:
    """Print the answers of the model before and after each stage, and the references."""
    for stage, count in FIGURES["samples"].items():
        samples = [*filter(None, read_lines(output_dir / stage / "samples.jsonl"))]
        # A run samples the same prompts before its first step and after its last one.
        first, last = ([s for s in samples if s["step"] == end["step"]] for end in (samples[0], samples[-1]))
        for before, after in zip(first[:count], last[:count], strict=True):
            prompt = before["prompt"] if stage == "pretrain" else strip_chat(before["prompt"])
            console.print(f"\n{prompt}", style="bold")
            for label, sample in (("before", before), ("after", after)):
                reward = f"  (reward {sample['reward']:.2f})" if "reward" in sample else ""
                console.print(f"  {label + ':':8}{_shorten(sample['completion'])}{reward}")
            if after["reference"] is not None:
                console.print(f"  {'right:':8}{_shorten(after['reference'])}")


def _shorten(text: str) -> str:
    return " ".join(text.split())[:SHOWN_CHARACTERS] or "(nothing)"


def show_places(output_dir: Path, stages: Iterable[str], console: Console) -> None:
    """Print the paths of the reports, and code that asks the model a question."""
    question = strip_chat(next(filter(None, read_lines(output_dir / "sft" / "samples.jsonl")))["prompt"])
    console.print("\nReports: an overview of all stages, then curves and samples of each", style="bold")
    console.print(f"  {output_dir / 'index.html'}")
    for report in (output_dir / stage / "report.html" for stage in stages):
        if report.exists():
            console.print(f"  {report}")
    console.print(f"\nAsk it yourself, in {shlex.quote(sys.executable)}:", style="bold")
    console.print(indent(TRY_IT.format(model=str((output_dir / "sft").resolve()), question=question), "  "))


def strip_chat(prompt: str) -> str:
    """Return the question in a rendered prompt of one turn."""
    return prompt.partition("user\n")[2].partition("<|im_end|>")[0]
