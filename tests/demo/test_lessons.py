"""What the later stages learn from: brief answers that say the same, and pairs in which only the prompt decides."""

from collections import Counter

import pytest

from recipes_lib.data.sources.formats import canonicalize, detect_format
from recipes_lib.demo.stdlib_texts import QUESTIONS, Chat, build_chats, load_modules, parse_module, standard_library
from recipes_lib.demo.walkthrough import ask, build_pairs, shorten
from recipes_lib.rl.verifiers import exact_match


@pytest.fixture(scope="module")
def chats():
    return build_chats(load_modules(standard_library()), seed=0)


def ask_about(source):
    return build_chats([parse_module("heapq", source.encode())], seed=0).train


def asked(*answers, question=QUESTIONS[0]):
    return [Chat(question, f"prompt {number}", answer) for number, answer in enumerate(answers)]


def texts_of(pair):
    return tuple(message["content"] for column in ("prompt", "chosen", "rejected") for message in pair[column])


def test_a_brief_answer_is_the_word_or_two_that_matter():
    line = "def _get(self, a, b=1)"
    brief = {chat.prompt: chat.answer for chat in shorten(ask_about(f'{line}:\n    """Copy it."""\n'))}
    assert brief == {
        f"Briefly: What is `{line}`?": "A private method.",
        f"Briefly: How many parameters does `{line}` have?": "Two.",
        f"Briefly: Can `{line}` be called without arguments?": "No.",
        'Briefly: What does it do? Its documentation says: "Copy it."': "Copies.",
    }


def test_every_answer_but_a_description_has_a_brief_form_that_it_contains(chats):
    short = [chat for chat in chats.held_out if chat.question.brief]
    assert {chat.question for chat in chats.held_out} - {chat.question for chat in short} == {QUESTIONS[3]}
    for long, brief in zip(short, shorten(chats.held_out), strict=True):
        assert brief.prompt == f"Briefly: {long.prompt}"
        assert brief.answer.rstrip(".").lower() in long.answer.lower()
        assert len(brief.answer) < len(long.answer)


def test_every_pair_is_a_row_of_the_preference_layout(chats):
    for number, pair in enumerate(build_pairs(chats.held_out)):
        row_format = detect_format(pair, where="demo")
        assert row_format.name == "preference"
        assert canonicalize(pair, row_format, "demo", number).rejected


def test_the_chosen_answer_is_right_and_the_rejected_one_is_another_of_its_kind(chats):
    right = {chat.prompt: chat for chat in chats.held_out}
    answers = {(chat.question, chat.answer) for chat in chats.held_out}
    pairs = [texts_of(pair) for pair in build_pairs(chats.held_out)]
    assert len({prompt for prompt, _, _ in pairs}) == len(pairs) > 0.9 * len(chats.held_out)
    for prompt, chosen, rejected in pairs:
        assert chosen == right[prompt].answer != rejected
        assert (right[prompt].question, rejected) in answers


def test_each_answer_is_rejected_as_often_as_it_is_chosen(chats):
    pairs = [texts_of(pair) for pair in build_pairs(chats.train[:1000])]
    assert Counter((chosen, rejected) for _, chosen, rejected in pairs) == Counter(
        (rejected, chosen) for _, chosen, rejected in pairs
    )


def test_pairs_stand_in_the_order_of_the_chats_and_only_the_lone_ones_are_missing():
    pairs = [texts_of(pair) for pair in build_pairs(asked("a", "a", "b", "a", "c", "a"))]
    assert pairs == [
        ("prompt 0", "a", "b"),
        ("prompt 1", "a", "c"),
        ("prompt 2", "b", "a"),
        ("prompt 4", "c", "a"),
    ]


def test_answers_to_different_questions_are_never_paired():
    assert not list(build_pairs([*asked("a"), *asked("b", question=QUESTIONS[1])]))


def test_a_question_is_a_row_of_prompts_that_a_verifier_can_judge(chats):
    for chat in chats.held_out[:20]:
        row = ask(chat)
        assert row["prompt"] == chat.row["messages"][:1]
        assert exact_match(completions=[chat.row["messages"][1:]], solution=[row["solution"]]) == [1.0]
