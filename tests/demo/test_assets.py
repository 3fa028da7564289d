"""The demo's starting points: a tokenizer that spells everything, a student that knows nothing."""

from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes_lib.demo.walkthrough import VOCAB_SIZE, build_tokenizer, save_student, save_tokenizer
from recipes_lib.models.vocabulary import CHATML_TOKENS, EOS_TOKEN, PAD_TOKEN

TEXTS = [f"def function_{number}(argument):\n    return argument + {number}\n" * 3 for number in range(300)]
TOKENIZER = build_tokenizer(TEXTS)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_every_text_survives_the_tokenizer(text):
    ids = TOKENIZER.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert TOKENIZER.decode(ids) == text


def test_the_special_tokens_come_first_and_the_chat_template_ends_turns_with_one():
    assert TOKENIZER.convert_tokens_to_ids([EOS_TOKEN, PAD_TOKEN, *CHATML_TOKENS]) == [0, 1, 2, 3]
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    prompt = TOKENIZER.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
    assert TOKENIZER.apply_chat_template(chat, tokenize=False) == prompt + "Ho<|im_end|>\n"


def test_the_tokenizer_is_the_same_every_time_and_any_recipe_can_load_it(tmp_path):
    sizes = [save_tokenizer(tmp_path / name, TEXTS) for name in ("one", "two")]
    assert (tmp_path / "one" / "tokenizer.json").read_bytes() == (tmp_path / "two" / "tokenizer.json").read_bytes()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "one")
    assert sizes == [len(tokenizer)] * 2
    assert len(tokenizer) <= VOCAB_SIZE


def test_the_student_is_the_same_every_time_and_a_quarter_of_its_teacher(tmp_path):
    save_tokenizer(tmp_path / "tokenizer", TEXTS)
    sizes = [
        save_student(tmp_path / name, tmp_path / "tokenizer", seed) for name, seed in (("a", 0), ("b", 0), ("c", 1))
    ]
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in "abc"]
    assert files[0] == files[1] != files[2]
    student = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    assert sizes == [student.num_parameters()] * 3
    assert len(AutoTokenizer.from_pretrained(tmp_path / "a")) == student.config.vocab_size
