"""``recipes check --migrate``: rewrite a recipe of an older TRL or alignment-handbook, line by line."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from recipes_lib.config.document import Entry, read_entries, read_text
from recipes_lib.config.legacy_datasets import COMPANIONS, LEGACY_KEYS, convert_datasets
from recipes_lib.config.loader import check_text
from recipes_lib.config.meanings import MEANINGS
from recipes_lib.config.renames import RETIRED_VALUES, read_known
from recipes_lib.config.rules import are_shares
from recipes_lib.config.secrets import is_secret_key
from recipes_lib.config.suggest import explain_unknown
from recipes_lib.config.table import KeyTable, load_table
from recipes_lib.config.values import plain_value
from recipes_lib.errors import ConfigError, Problem

_WEIGHT_KEY = re.compile(r"\bweight(?=['\"]?\s*:)")
_LENGTH_KEYS = {"max_length", "max_seq_length"}
_TOKENIZER_KEYS = {"tokenizer_name_or_path", "tokenizer_name", "tokenizer"}


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that migration did, or left to the user.

    Attributes:
        line: Line of the old file; 0 when it concerns the file as a whole.
        what: What was done, or what to decide.
        by_hand: Whether the user has to decide or look.
    """

    line: int
    what: str
    by_hand: bool = False


class Migration(NamedTuple):
    """A rewritten file and what was changed in it."""

    text: str
    changes: list[Change]


def migrate(path: Path, stage: str = "sft") -> Migration:
    """Rewrite a recipe so that it loads; order and comments of what stays are kept.

    A key that cannot be rewritten becomes a comment, and a change ``by_hand`` names it. What the result still lacks is
    listed in the same way.

    Raises:
        ConfigError: The file cannot be read, repeats a key, or is one JSON-like mapping in braces.
    """
    problems: list[Problem] = []
    text = read_text(path, problems)
    entries = [] if text is None else read_entries(text, str(path), problems)
    lines = (text or "").splitlines()
    for entry in entries:
        line, column = _position(entry)
        if lines[line][:column].strip():
            problems.append(
                Problem(entry.where, f"`{entry.key}` does not begin its line", "write one `key: value` a line")
            )
    if problems or text is None:
        raise ConfigError(*problems)
    rewriter = _Rewriter(load_table(stage), text, entries)
    rewriter.settle()
    for entry in entries:
        rewriter.rewrite(entry)
    rewriter.remark_on_meaning()
    new_text = rewriter.apply()
    try:
        check_text(stage, new_text, path)
    except ConfigError as error:
        rewriter.changes += [
            Change(0, f"{problem.found}: {problem.remedy}", by_hand=True) for problem in error.problems
        ]
    return Migration(new_text, rewriter.changes)


@dataclass(slots=True)
class _Rewriter:
    table: KeyTable
    text: str
    entries: Sequence[Entry]
    changes: list[Change] = field(default_factory=list)
    edits: dict[int, tuple[int, list[str]]] = field(default_factory=dict)
    lines: list[str] = field(init=False)
    taken: set[str] = field(init=False)

    def __post_init__(self) -> None:
        self.lines = self.text.splitlines()
        self.taken = {entry.key for entry in self.entries}

    def settle(self) -> None:
        """Take back keys of today, or the weaker old one, where upstream went by the old key beside them."""
        entries = {entry.key: entry for entry in self.entries}
        values = {key: plain_value(entry.node) for key, entry in entries.items()}
        if values.get("warmup_ratio") is not None and values.get("warmup_steps", 1) in (0, None):
            self._give_way(entries["warmup_steps"], "warmup_ratio")
        if values.get("assistant_only_loss") is True and values.get("completion_only_loss", True) is False:
            self._give_way(entries["completion_only_loss"], "assistant_only_loss")
        stage = self.table.stage
        if stage in ("ppo", "rloo") and values.get("sft_model_path") and values.get("model_name_or_path"):
            # TRL took the policy from the first, and the tokenizer alone from the second.
            model = entries["model_name_or_path"]
            if values["model_name_or_path"] == values["sft_model_path"] or _TOKENIZER_KEYS & self.taken:
                self._give_way(model, "sft_model_path")
            else:
                self._rename(model, "tokenizer_name_or_path")
                self.taken = self.taken - {model.key} | {"tokenizer_name_or_path"}

    def rewrite(self, entry: Entry) -> None:
        """Decide what becomes of one key of the old file that is not settled yet."""
        key, value = entry.key, plain_value(entry.node)
        if _position(entry)[0] in self.edits:
            return
        if key in LEGACY_KEYS and not (key == "dataset_mixture" and isinstance(value, list)):
            self._rewrite_datasets(entry)
        elif key in COMPANIONS and self.taken & {"dataset_mixer", "dataset_mixer_list"}:
            self._replace(entry, {}, f"`{key}` went into the datasets")
        elif key in self.table.keys:
            self._rewrite_value(entry, value)
        elif key in read_known(self.table.stage):
            self._rewrite_retired(entry, value)
        elif is_secret_key(key):
            self._replace(entry, {}, f"deleted `{key}`: secrets come from the environment", by_hand=True)
        else:
            problem = explain_unknown(entry, self.table, self.taken)
            self._comment_out(entry, f"{problem.found}; {problem.remedy}")

    def remark_on_meaning(self) -> None:
        """Name what is spelled as before and means something else."""
        self.changes += [
            Change(0, str(meaning), by_hand=True)
            for meaning in MEANINGS
            if meaning.concerns(self.taken, self.table.keys.keys())
        ]

    def apply(self) -> str:
        """Return the text with every edit made."""
        lines = list(self.lines)
        for first in sorted(self.edits, reverse=True):
            last, replacement = self.edits[first]
            lines[first : last + 1] = replacement
        return "\n".join(lines) + "\n"

    def _give_way(self, entry: Entry, stronger: str) -> None:
        self._replace(entry, {}, f"deleted `{entry.key}`: upstream went by `{stronger}`")
        self.taken = self.taken - {entry.key}

    def _rewrite_value(self, entry: Entry, value: Any) -> None:
        successor = RETIRED_VALUES.get((entry.key, str(value)))
        if successor:
            self._replace(entry, {entry.key: successor}, f"`{entry.key}: {value}` became {successor}")
        elif entry.key == "dataset_mixture" and self.table.stage != "pretrain":
            self._rewrite_weights(entry, value)
        elif value == "None" and self.table.keys[entry.key].accepts("null"):
            self._replace(entry, {entry.key: None}, f"`{entry.key}: None` became null")

    def _rewrite_weights(self, entry: Entry, parts: Any) -> None:
        """Turn weights of fine-tuning that are no shares into what they were: how often rows come up."""
        parts = [part for part in parts if isinstance(part, Mapping)] if isinstance(parts, list) else []
        if not any("weight" in part for part in parts) or any("repeat" in part for part in parts):
            return
        first, _ = _position(entry)
        if are_shares(parts):
            what = "`weight` in `dataset_mixture` is a share of all rows; `repeat` is how often an entry's rows come up"
            self.changes.append(Change(first + 1, what, by_hand=True))
            return
        last = _last_line(entry.node, first)
        renamed = [_WEIGHT_KEY.sub("repeat", line) for line in self.lines[first : last + 1]]
        self.edits[first] = (last, renamed)
        self.changes.append(Change(first + 1, "`weight` in `dataset_mixture` became `repeat`"))

    def _rewrite_retired(self, entry: Entry, value: Any) -> None:
        retired = read_known(self.table.stage)[entry.key]
        new = retired.rewrite(value)
        if new is None:
            self._comment_out(entry, f"`{entry.key}` {retired.found}; {retired.remedy}")
            return
        if "overlong" in new and not self.taken & _LENGTH_KEYS:
            new = {}
        present = [key for key in new if key in self.taken]
        if present:
            self._replace(entry, {}, f"deleted `{entry.key}`: `{present[0]}` is set as well", by_hand=True)
        elif not new:
            self._replace(entry, {}, f"deleted `{entry.key}`, which {retired.found}")
        elif dict(new) == {retired.new: value}:
            self._rename(entry, str(retired.new))
        else:
            spelled = ", ".join(f"`{key}: {value}`" for key, value in new.items())
            self._replace(entry, new, f"`{entry.key}: {value}` became {spelled}")
        self.taken |= set(new)

    def _rewrite_datasets(self, entry: Entry) -> None:
        legacy = {other.key: plain_value(other.node) for other in self.entries if other.key in LEGACY_KEYS + COMPANIONS}
        new, remark = convert_datasets(legacy)
        new = new and {key: value for key, value in new.items() if key not in self.taken or key == entry.key}
        if not new:
            self._comment_out(entry, f"`{entry.key}` could not be rewritten; write `dataset_name` or `dataset_mixture`")
            return
        self._replace(entry, new, f"`{entry.key}` became {', '.join(f'`{key}`' for key in new)}")
        if remark:
            self.changes.append(Change(_position(entry)[0] + 1, remark, by_hand=True))
        self.taken |= set(new)

    def _rename(self, entry: Entry, new: str) -> None:
        line, column = _position(entry)
        rest = self.lines[line][column:]
        # The old name ends where the colon (or the closing quote and the colon) begins.
        self.edits[line] = (line, [self.lines[line][:column] + new + rest[rest.index(":") :]])
        self.changes.append(Change(line + 1, f"`{entry.key}` became `{new}`"))

    def _replace(self, entry: Entry, new: Mapping[str, Any], what: str, *, by_hand: bool = False) -> None:
        line, column = _position(entry)
        dumped = yaml.safe_dump(dict(new), sort_keys=False, allow_unicode=True, width=1000) if new else ""
        self.edits[line] = (_last_line(entry.node, line), [" " * column + part for part in dumped.splitlines()])
        self.changes.append(Change(line + 1, what, by_hand))

    def _comment_out(self, entry: Entry, what: str) -> None:
        line, _ = _position(entry)
        last = _last_line(entry.node, line)
        self.edits[line] = (last, [f"# {what}", *(f"# {part}" for part in self.lines[line : last + 1])])
        self.changes.append(Change(line + 1, what, by_hand=True))


def _position(entry: Entry) -> tuple[int, int]:
    """Return line and column of a key, from 0."""
    assert entry.key_node is not None
    mark = entry.key_node.start_mark
    assert mark is not None
    return int(mark.line), int(mark.column)


def _last_line(node: yaml.Node, first: int) -> int:
    """Return the last line of a value; a block's own end mark lies behind the comments that follow it."""
    assert node.end_mark is not None
    if isinstance(node, yaml.ScalarNode):
        inside = node.style in ("|", ">") or node.end_mark.column == 0
        return max(first, int(node.end_mark.line) - (1 if inside else 0))
    assert isinstance(node, yaml.CollectionNode)
    if node.flow_style:
        return max(first, int(node.end_mark.line))
    children = node.value if isinstance(node, yaml.SequenceNode) else [part for pair in node.value for part in pair]
    return max([first, *(_last_line(child, first) for child in children)])
