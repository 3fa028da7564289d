"""Generates answers with plain transformers and PEFT, without this library: ``BASE FOLDER QUESTIONS``.

Prints, for each question, the token ids of its prompt, the answer, and whether it ended with a stop token.
"""

import json
import sys
from pathlib import Path

ANSWERS = ["Paris.", "Seven days.", "It is\nfour.", "blue, mostly", "Zürich – ja!", "42", "no, never", "🙂 fine"]
QUESTIONS = ["capital of France", "days in a week", "two plus two", "the sky", "wo?", "the answer", "ever?", "hello"]


def write_chats(path, number):
    """Write the first ``number`` questions with their answers."""
    from tests.rows import write_rows

    pairs = zip(QUESTIONS[:number], ANSWERS[:number], strict=True)
    return write_rows(
        path,
        (
            {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]}
            for asked, answer in pairs
        ),
    )


def ask(base, folder, questions):
    """Generate answers in a new process with the model in ``folder``, or with the adapter in it on another base."""
    from tests.forked import run_script

    done = run_script(Path(__file__), base, folder, json.dumps(questions))
    return json.loads(done.stdout)


def main():
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    torch.set_num_threads(1)
    base, folder, questions = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(base)
    if base != folder:
        model = PeftModel.from_pretrained(model, folder)
        model.generation_config = GenerationConfig.from_pretrained(folder)
    answers = []
    for question in questions:
        chat = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        output = model.generate(**prompt, max_new_tokens=40, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        text = tokenizer.decode(output, skip_special_tokens=True)
        answers.append({"prompt_ids": prompt["input_ids"][0].tolist(), "text": text, "stopped": len(output) < 40})
    sys.stdout.write(json.dumps(answers))


if __name__ == "__main__":
    main()
