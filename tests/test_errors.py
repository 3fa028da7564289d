"""What a user reads when something is wrong: where, what, and the way out."""

from recipes_lib.errors import ConfigError, DataError, DivergedError, Problem, UserError


def test_a_problem_reads_as_place_finding_and_remedy():
    problem = Problem("sft.yaml:3", "`learning_rat` is no key", "did you mean `learning_rate`?")
    assert str(problem) == "sft.yaml:3: `learning_rat` is no key\n    did you mean `learning_rate`?"
    assert str(Problem("--seed", "is missing")) == "--seed: is missing"


def test_an_error_tells_every_problem_it_carries():
    first, second = Problem("a", "one"), Problem("b", "two")
    assert str(ConfigError(first, second)) == "a: one\nb: two"
    assert DataError(first, second).problems == (first, second)


def test_exit_codes_are_those_of_the_contract():
    assert UserError().exit_code == ConfigError().exit_code == DataError().exit_code == 2
    assert DivergedError("nan").exit_code == 3
