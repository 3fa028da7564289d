"""The demo's questions: every answer follows from the source, and what is held out is new."""

import pytest

from recipes_lib.data.formats import canonicalize, detect_format
from recipes_lib.demo.chats import build_chats
from recipes_lib.demo.corpus import load_modules, standard_library


@pytest.fixture(scope="module")
def chats():
    return build_chats(load_modules(standard_library()), seed=0)


def turns(chat):
    return [message["content"] for message in chat["messages"]]


def test_every_chat_is_a_row_of_the_chat_layout(chats):
    for number, chat in enumerate([*chats.train[:200], *chats.held_out]):
        row_format = detect_format(chat, where="demo")
        assert row_format.name == "messages"
        assert canonicalize(chat, row_format, "demo", number).messages is not None


def test_held_out_questions_are_about_definitions_that_training_never_names(chats):
    asked = {turns(chat)[0] for chat in chats.train}
    assert len(chats.held_out) == 250
    assert not asked & {turns(chat)[0] for chat in chats.held_out}


def test_answers_follow_from_the_source(chats):
    answers = dict(map(turns, chats.train))
    counted = {question: answer for question, answer in answers.items() if question.startswith("How many parameters")}
    for question, answer in list(counted.items())[:500]:
        signature = question.split("`")[1]
        if signature.endswith(("(self)", "()")):
            assert answer == "It has no parameters."
        if "," not in signature and not any(part in signature for part in ("(self", "(cls", "()")):
            assert answer == "It has one parameter."


def test_the_first_held_out_chats_show_every_kind_of_question(chats):
    kinds = {turns(chat)[0].split("`")[0] for chat in chats.held_out[:10]}
    assert len(kinds) == len({turns(chat)[0].split("`")[0] for chat in chats.train})


def test_two_builds_are_equal(chats):
    assert build_chats(load_modules(standard_library()), seed=0) == chats
