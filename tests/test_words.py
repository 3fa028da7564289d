"""Terminology: code and documentation use standard terms, not paraphrases."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import pytest
from tests.test_ratchets import read_project, read_python

TERMS: Final = (
    *("tensor parallel", "context parallel", "pipeline parallel", "pipeline stage", "gradient accumulation"),
    *("throughput", "hidden states", "forward hook", "dry run", "held-out", "world size", "preemption", "resume"),
)
"""Standard terms; each must occur at least twice in the code."""

BANNED: Final[Mapping[str, tuple[str, str]]] = {
    r"(?:go|goes|going|went|gone) on": ("resume, continue", "It goes on from the last checkpoint."),
    r"stands? still|standing still|stood still": ("is idle, is blocked", "A process stands still meanwhile."),
    r"stand(?:s|ing)? whole": ("is replicated", "An adapter would stand whole beside them."),
    r"tensors (?:that are )?cut|rows (?:are )?cut|weights are cut": ("tensor or context parallelism", "rows are cut."),
    r"(?:share|shares|shared|sharing) out": ("shard, divide", "The engine shares out the weights."),
    r"hand(?:s|ed|ing)? (?:\w+ )?on": ("pass, send", "A stage hands states on to the next."),
    r"cannot be together": ("incompatible options", "Tells what cannot be together."),
    r"(?:training|launch(?:ed)?|runs?|goes|split|everywhere) in stages": ("pipeline parallelism", "A run in stages."),
    r"how (?:the|a) (?:batch|step) is cut|way (?:the|a) batch is cut": (
        "gradient accumulation, micro-batches",
        "It does not depend on how the batch is cut.",
    ),
    r"outgrows?|beyond one box": ("multi-node scaling", "Who outgrows one machine"),
    r"(?:to|by|for) what was asked(?: for)?": ("launch verification", "It is held to what was asked."),
    r"held? (?:to|against)|hold (?:\w+ )?against|holds (?:\w+ )?against": (
        "compare with, verify against",
        "Each is held against the others.",
    ),
    r"hears?|heard|hearing": ("forward hook; receive (a signal)", "Layers are heard by hooks."),
    r"what its layers hold": ("hidden states", "If asked, what its layers hold besides."),
    r"bytes that (?:a run|it|they) holds?": ("GPU memory, peak memory", "Count the bytes that a run holds."),
    r"price of drifting": ("KL divergence", "The price of drifting from the reference."),
    r"foresees?|foresaw": ("explained variance; plan", "What the critic foresees."),
    r"asked to stop|has to stop": ("preempted, stop request", "The run was asked to stop."),
    r"seal(?:s|ed|ing)?": ("complete, hash-verified", "The checkpoint is sealed."),
    r"by our rules": ("retention", "Checkpoints kept by our rules."),
    r"rehears\w*": ("dry run; uncounted pass", "Saving is rehearsed once."),
    r"beside training": ("asynchronously", "They are written beside training."),
    r"undone?": ("roll back", "A spike is undone."),
    r"so-manieth|every so (?:many|often)": ("every N", "Every so-manieth step is computed twice."),
    r"would each have another": ("would read different rows", "Ranks would each have another row."),
    r"nobody (?:says|knows)": ("name the missing flag or fact", "Nobody says which machine it is."),
    r"leave it away|leaves it away|left away": ("remove it", "It has no use: leave it away."),
    r"says? nothing": ("`None`, empty, unknown", "A reward that says nothing."),
    r"no part of": ("is excluded from", "It is no part of the sum."),
    r"(?:that|which|they) (?:are|is) none": ("non-finite; not a ...", "Numbers that are none."),
    r"told in (?:a|one) line|tell in a line": ("log", "The freezing is told in a line."),
    r"told apart|tells? apart": ("distinguish", "Documents are told apart by positions."),
    r"what stands there": ("the content", "The file keeps what stands there."),
    r"(?:said|told) otherwise": ("by default, unless set", "Private until said otherwise."),
    r"(?:has|have) not(?=[.,;:)`])": ("does not have", "A key that the recipe has not."),
    r"strangers?'?s?": ("untrusted", "The record of a stranger."),
    r"for all that": ("nevertheless", "It is kept for all that."),
    r"the very": ("the same, exactly", "The optimizer updates the very tensors."),
    r"of (?:ours|yours|theirs)": ("our, your, their", "A schedule of ours."),
    r"whoever": ("name the caller, the user, the process", "Whoever loads it next fails."),
    r"mend(?:s|ed|ing)?": ("fix", "Mend these first."),
    r"thereof|therein|thereupon|wherein|whence|hither|hence": ("modern English", "The folder and the parts thereof."),
}
"""Banned paraphrase (a regular expression between word boundaries) -> (standard terms, a violating sentence)."""

PREFIXES: Final = ("src/", "recipes/", "docs/", "README.md", "accelerate_configs/", "benchmarks/", "docker/")
SUFFIXES: Final = (".py", ".md", ".jinja", ".yaml", ".sh")
GENERATED: Final = "docs/configs"
"""Generated pages, which quote the help texts of other libraries."""
_BOUNDED: Final = r"(?i)(?<![\w-])(?:{})(?![\w-])"
# A phrase may be broken over two lines of a paragraph or of a comment.
_PHRASES: Final = {banned: banned.replace(" ", r"\s+(?:#\s+)?") for banned in BANNED}
_PATTERNS: Final = {banned: re.compile(_BOUNDED.format(phrase)) for banned, phrase in _PHRASES.items()}
_ANY: Final = re.compile(_BOUNDED.format("|".join(_PHRASES.values())))


def find_paraphrases(path: str, text: str) -> list[str]:
    """Return the locations of banned paraphrases in a file of the project."""
    if not path.startswith(PREFIXES) or not path.endswith(SUFFIXES) or path.startswith(GENERATED):
        return []
    if not _ANY.search(text):  # One pass over most files, instead of one per paraphrase.
        return []
    return [
        f"{path}:{text[: found.start()].count(chr(10)) + 1}: {found.group()!r}: write {BANNED[banned][0]}"
        for banned, pattern in _PATTERNS.items()
        for found in pattern.finditer(text)
    ]


def find_missing_terms(sources: Mapping[str, str]) -> list[str]:
    text = "\n".join(sources.values()).lower()
    return [term for term in TERMS if text.count(term) < 2]


def test_project_has_no_banned_paraphrase() -> None:
    assert [fault for path, text in read_project().items() for fault in find_paraphrases(path, text)] == []


@pytest.mark.parametrize("banned", BANNED)
def test_find_paraphrases_finds_planted_sentence(banned: str) -> None:
    planted = BANNED[banned][1]
    for text in (planted, planted.replace(" ", "\n    # ")):
        found = find_paraphrases("docs/planted.md", text)
        assert any(fault.endswith(f"write {BANNED[banned][0]}") for fault in found)
    assert find_paraphrases("tests/planted.py", planted) == []


def test_library_uses_standard_terms() -> None:
    assert find_missing_terms(read_python("src/", "recipes/")) == []


def test_find_missing_terms_finds_planted_gap() -> None:
    text = " and ".join(TERMS)
    assert find_missing_terms({"a.py": text, "b.py": text.title()}) == []
    assert find_missing_terms({"a.py": text, "b.py": text.replace("throughput", "speed")}) == ["throughput"]
