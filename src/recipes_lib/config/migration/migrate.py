"""``recipes check --migrate``: converts a configuration of TRL or alignment-handbook, line by line."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from recipes_lib.config.loader import check_text, explain_unknown, read_synonyms
from recipes_lib.config.migration import legacy_files
from recipes_lib.config.recipes import read_known, read_renames
from recipes_lib.config.rules import COMMIT, DECISIONS, is_overruled
from recipes_lib.config.table import KeyTable, load_table
from recipes_lib.config.values import (
    INVALID,
    Entry,
    Reader,
    Settings,
    is_secret_key,
    plain_value,
    read_entries,
    read_text,
)
from recipes_lib.errors import ConfigError, Problem

_TOKENIZER_KEYS = {"tokenizer_name_or_path", "tokenizer_name", "tokenizer"}
_LEARNING_KEYS = (
    "learning_rate",
    "lr_scheduler_type",
    "warmup_steps",
    "num_train_epochs",
    "weight_decay",
    "adam_beta2",
    "center_rewards_coefficient",
)
"""Keys that change what a model learns, and whose defaults differ in some recipes."""
_SAME_TEXTS = {
    *("model_name_or_path", "output_dir", "prepared_dir", "run_name", "hub_model_id", "system_prompt"),
    *("lr_scheduler_type", "optim", "loss_type", "activation_checkpointing"),
}
"""Keys of text with the same values in other programs."""
_SAME_MEANINGS = {
    *("base_model", "cutoff_len", "dataset_prepared_path", "lora_rank", "lr_scheduler", "micro_batch_size"),
    *("num_epochs", "optimizer", "pref_beta", "pref_loss", "sample_packing", "sequence_len", "val_set_size"),
    "wandb_name",
}
"""Keys of axolotl and LLaMA-Factory whose successor needs no review, beyond the differences in ``renames.yaml``."""
_REWARDS_OF_TRL = {
    **{name: name for name in ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")},
    "get_soft_overlong_punishment": "get_soft_overlong_punishment(max_completion_len=1280, soft_punish_cache=256)",
}
"""Reward functions of ``trl.rewards`` by their short names in TRL's scripts."""


@dataclass(frozen=True, slots=True)
class Change:
    """One change made by migration, or left to the user.

    Attributes:
        line: Line number in the old file, from 1; 0 if it concerns the whole file.
        what: Description of the change, or of the decision.
        by_hand: Whether the user has to decide or review it.
    """

    line: int
    what: str
    by_hand: bool = False


class Migration(NamedTuple):
    """A converted file and its changes.

    Attributes:
        text: Text of the new file.
        changes: Changes made, and changes left to the user.
        recipe: Recipe of the file.
        is_ready: Whether the new file is valid and trains by the method of the old file.
    """

    text: str
    changes: list[Change]
    recipe: str
    is_ready: bool


def migrate(path: Path, recipe: str | None = None) -> Migration:
    """Convert a configuration or a TRL command line; order and comments are kept.

    A key that cannot be converted becomes a comment and a change ``by_hand``; so does every problem that remains in the
    result. An inline chat template is written to a file beside ``path``.

    Args:
        path: Path of the old file.
        recipe: Recipe of the new file; ``None`` to infer it from keys and names.

    Raises:
        ConfigError: The file cannot be read, repeats a key, or is for a method that no recipe implements; or the chat
            template cannot be written.
    """
    problems: list[Problem] = []
    text, names, launcher = read_text(path, problems), [path.stem, path.resolve().parent.name], ""
    is_rewritten = text is not None and (path.suffix in {".sh", ".py"} or legacy_files.is_command(text))
    if text is not None and is_rewritten:
        script, flags, launcher = legacy_files.parse_command_text(text, str(path))
        names, text = [script], _dump(legacy_files.flatten_sections(flags))
    entries = [] if text is None else read_entries(text, str(path), problems)
    values = {entry.key: plain_value(entry.node) for entry in entries}
    # Edits replace whole lines, those of JSON end with commas, and those of sections are indented.
    if values and ((text or "").lstrip().startswith("{") or legacy_files.flatten_sections(values) != values):
        is_rewritten, text = True, _dump(legacy_files.flatten_sections(values))
        entries = read_entries(text, str(path), problems)
    lines = (text or "").splitlines()
    # Edits replace whole lines, so each key must begin its own.
    for entry in entries:
        line, column = _position(entry)
        if lines[line][:column].strip():
            problems.append(
                Problem(entry.where, f"`{entry.key}` does not begin its line", "write one `key: value` a line")
            )
    if problems or text is None:
        raise ConfigError(*problems)
    method = legacy_files.infer_method(names, {entry.key: plain_value(entry.node) for entry in entries}, recipe)
    rewriter = _Rewriter(load_table(method.recipe), text, entries, path)
    rewriter.drop_ignored()
    rewriter.drop_overruled()
    rewriter.convert_values()
    for entry in entries:
        rewriter.rewrite(entry)
    rewriter.complete(method)
    rewriter.remark_on_meaning()
    why = "as --recipe says" if recipe else method.why or "nothing in the file says another"
    changes = [Change(0, f"the recipe is {method.recipe}: {why}"), *rewriter.changes]
    if launcher.count(" ") > 1:
        changes.append(Change(0, f"`{launcher}` is the launcher: see `recipes launch --hardware`", by_hand=True))
    if is_rewritten:
        # Line numbers refer to the generated YAML, not to the file.
        changes = [replace(change, line=0) for change in changes]
    new_text = rewriter.apply()
    left = [Problem("", method.doubt, "write the `--recipe` of the file's own method")] if method.doubt else []
    try:
        check_text(method.recipe, new_text, path)
    except ConfigError as error:
        left += error.problems
    changes += [Change(0, f"{problem.found}: {problem.remedy}", by_hand=True) for problem in left]
    return Migration(new_text, changes, method.recipe, is_ready=not left)


class _Rewriter:
    def __init__(self, table: KeyTable, text: str, entries: Sequence[Entry], path: Path) -> None:
        self.table, self.entries, self.path, self.lines = table, entries, path, text.splitlines()
        self.values = {entry.key: plain_value(entry.node) for entry in entries}
        self.taken, self.added, self.overruled = {*self.values}, dict[str, Any](), set[str]()
        self.changes, self.edits = list[Change](), dict[int, tuple[int, list[str]]]()

    def drop_ignored(self) -> None:
        """Drop current keys that upstream ignored because of an old key in the same file."""
        entries, values = {entry.key: entry for entry in self.entries}, self.values
        if values.get("warmup_ratio") is not None and values.get("warmup_steps", 1) in (0, None):
            self._give_way(entries["warmup_steps"], "warmup_ratio")
        if values.get("assistant_only_loss") is True and values.get("completion_only_loss", True) is False:
            self._give_way(entries["completion_only_loss"], "assistant_only_loss")
        if values.get("lora_target_linear") is True and values.get("lora_target_modules"):
            self._give_way(entries["lora_target_modules"], "lora_target_linear")
        recipe = self.table.recipe
        if {"batch_size", "micro_batch_size"} <= entries.keys():
            # The global batch, as in axolotl and OpenRLHF.
            total = read_known(recipe)["global_batch_size"]
            self._comment_out(entries["batch_size"], f"`batch_size` {total.found}; {total.remedy}")
            self.values["batch_size"] = None
        if recipe in ("ppo", "rloo") and values.get("sft_model_path") and values.get("model_name_or_path"):
            # TRL's PPO loaded the policy from `sft_model_path`, and only the tokenizer from `model_name_or_path`.
            model = entries["model_name_or_path"]
            if values["model_name_or_path"] == values["sft_model_path"] or _TOKENIZER_KEYS & self.taken:
                self._give_way(model, "sft_model_path")
            else:
                self._rename(model, "tokenizer_name_or_path")
                self.taken = self.taken - {model.key} | {"tokenizer_name_or_path"}

    def drop_overruled(self) -> None:
        """Drop keys without effect because of another key (``DECISIONS``), which upstream ignored silently."""
        known = read_known(self.table.recipe)
        keys = [entry.key for entry in self.entries]
        names = {key: known[key].new if key in known else read_synonyms().get(key, key) for key in keys}
        values = {new: self.values[old] for old, new in names.items() if new}
        settings = Settings(self.table, str(self.path), {}, values)
        for row in DECISIONS:
            decider = values.get(row["decider"])
            # An invalid number of steps is reported when the result is validated.
            is_invalid = row["decider"] == "max_steps" and not isinstance(decider, int | float)
            if decider is None or is_invalid or not is_overruled(row, settings):
                continue
            self.overruled |= {row["key"]}
            for entry in self.entries:
                is_default = "becomes" in row and self.values[entry.key] == row["becomes"]
                if names[entry.key] == row["key"] and not is_default and _position(entry)[0] not in self.edits:
                    self._give_way(entry, row["decider"])

    def convert_values(self) -> None:
        """Convert keys of other programs whose successor follows from several keys, or from parts of their value."""
        for entry in self.entries:
            new = legacy_files.convert_value(entry.key, self.values, self.table.recipe)
            if new is None or not new.keys() <= self.table.keys.keys() - self.taken:
                continue
            became = f"became {', '.join(f'`{key}: {value}`' for key, value in new.items())}" if new else "was deleted"
            by_hand = entry.key == "dataset"
            reads = "; other columns, such as `system`, are read too: see `recipes preview`" * by_hand
            what = f"`{entry.key}: {self.values[entry.key]}` {became}{reads}"
            self._replace(entry, new, what, by_hand=by_hand)
            self.taken |= set(new)

    def rewrite(self, entry: Entry) -> None:
        """Convert one key of the old file that has not been edited yet."""
        key, value = entry.key, self.values[entry.key]
        is_template = key == "chat_template" and isinstance(value, str) and "{" in value
        if _position(entry)[0] in self.edits:
            return
        if key in legacy_files.LEGACY_KEYS and not (key == "dataset_mixture" and isinstance(value, list)):
            self._rewrite_datasets(entry)
        elif key in legacy_files.COMPANIONS and self.taken & {"dataset_mixer", "dataset_mixer_list"}:
            self._replace(entry, {}, f"`{key}` was merged into the datasets")
        elif key in self.table.keys:
            self._rewrite_value(entry, value)
        elif is_template and "chat_template_path" not in self.taken:
            self._move_template(entry, value)
        elif key in read_known(self.table.recipe):
            self._rewrite_retired(entry, value)
        elif is_secret_key(key):
            self._replace(entry, {}, f"deleted `{key}`: secrets come from the environment", by_hand=True)
        elif (new := read_synonyms().get(key)) and self._takes(new, entry):
            # Implementations of Muon scale the learning rate in different ways.
            self._rename(entry, new, by_hand=key not in _SAME_MEANINGS or value == "muon")
            self.taken |= {new}
        else:
            self._rewrite_unknown(entry, value)

    def complete(self, method: legacy_files.Method) -> None:
        """Add keys that the old file left to the script or to upstream's defaults."""
        if method.loss_type:
            self.added["loss_type"] = method.loss_type
            self.changes.append(Change(0, f"added `loss_type: {method.loss_type}`: {method.why}"))
        if method.loss_type == "orpo":
            what = "ORPO's NLL term covers the chosen answer only, as in the paper; TRL's also covers the prompt"
            self.changes.append(Change(0, what, by_hand=True))
        rank, has_scale = self.values.get("lora_rank", 8), self.taken & {"lora_alpha", "adapter_name_or_path"}
        is_factory = self.values.get("finetuning_type") == "lora" and "lora_alpha" in self.table.keys
        if is_factory and not has_scale and isinstance(rank, int):
            self.added |= {"lora_r": rank} if "lora_rank" not in self.values else {}
            self.added["lora_alpha"] = 2 * rank
            self.changes.append(Change(0, f"added `lora_alpha: {2 * rank}`, LLaMA-Factory's default"))
        if "output_dir" not in self.taken:
            self.added["output_dir"] = "trainer_output"
            self.changes.append(Change(0, "added `output_dir: trainer_output`, upstream's default"))
        names = self.table.keys.keys() - self.taken - self.overruled
        left_out = [self.table.keys[name] for name in _LEARNING_KEYS if name in names]
        if absent := [f"`{key.name}` ({key.default}, {key.upstream_default})" for key in left_out if key.reason]:
            what = f"the file has no {', '.join(absent)}: in parentheses are the defaults, here and upstream"
            self.changes.append(Change(0, what, by_hand=True))

    def remark_on_meaning(self) -> None:
        """Report keys whose meaning differs from upstream's."""
        self.changes += [
            Change(0, str(meaning), by_hand=True)
            for meaning in read_renames().meanings
            if meaning.concerns(self.taken, self.table.keys.keys())
        ]

    def apply(self) -> str:
        """Return the text with all edits applied."""
        lines = list(self.lines)
        # From the last line to the first, so that the indices of remaining edits stay valid.
        for first in sorted(self.edits, reverse=True):
            last, replacement = self.edits[first]
            lines[first : last + 1] = replacement
        lines += _dump(self.added).splitlines() if self.added else []
        return "\n".join(lines) + "\n"

    def _give_way(self, entry: Entry, stronger: str) -> None:
        self._replace(entry, {}, f"deleted `{entry.key}`: upstream used `{stronger}`")
        self.taken = self.taken - {entry.key}

    def _rewrite_value(self, entry: Entry, value: Any) -> None:
        key = entry.key
        successor = read_renames().values.get((key, "null" if value is None else str(value)))
        # TRL's `disable_dropout` (on by default) sets every dropout of the model to 0, including the adapter's.
        is_off = self.table.recipe in ("dpo", "reward") and self.values.get("disable_dropout") in (None, True)
        is_pinned = COMMIT.fullmatch(str(self.values.get("model_revision")))
        if successor and (successor != "null" or self.table.keys[key].accepts("null")):
            self._replace(entry, {key: yaml.safe_load(successor)}, f"`{key}: {value}` became {successor}")
        elif entry.node.value == "" or (value in (None, "None", "auto") and not self.table.keys[key].accepts("null")):
            self._replace(entry, {}, f"deleted `{key}: {value}`: the default applies")
        elif value == "None":
            self._replace(entry, {key: None}, f"`{key}: None` became null")
        elif key == "lora_dropout" and value and is_off:
            self._replace(entry, {key: 0}, f"`{key}: {value}` became 0, as by TRL's `disable_dropout`")
        elif key == "trust_remote_code" and value is True and not is_pinned:
            # Most models are in transformers and do not need the key.
            what = "would run unpinned code from the Hub; if the model is not in transformers, restore it and set"
            self._comment_out(entry, f"`{key}` {what} `model_revision:` to a commit")
        elif key == "reward_funcs":
            self._rewrite_rewards(entry, value)

    def _rewrite_rewards(self, entry: Entry, value: Any) -> None:
        functions = [_name_reward(name) for name in (value if isinstance(value, list) else [value])]
        if functions == value:
            return
        self._replace(entry, {entry.key: functions}, f"`{entry.key}` became {functions}")
        numbers = self.values.get("reward_weights")
        if self.values.get("reward_model_name_or_path") and isinstance(numbers, list):
            # TRL's scripts, whose spelling the functions had, put the reward model first.
            weights = next(other for other in self.entries if other.key == "reward_weights")
            moved = numbers[1:] + numbers[:1]
            self._replace(weights, {weights.key: moved}, f"`{weights.key}` became {moved}: the reward model is last")

    def _rewrite_unknown(self, entry: Entry, value: Any) -> None:
        """Delete a key that sets nothing, or has no effect or need in this recipe; else comment it out."""
        known, new = read_known(self.table.recipe), read_synonyms().get(entry.key, "")
        if new in known and known[new].rewrite(value) == {}:
            self._replace(entry, {}, f"deleted `{entry.key}`: `{new}` {known[new].found}")
        elif value is None or (value == 0 and new == "test_split_size"):
            clips_nothing = new == "max_grad_norm" and new not in self.taken
            what = "became `max_grad_norm: 0`" if clips_nothing else "sets nothing, and was deleted"
            self._replace(entry, {"max_grad_norm": 0} if clips_nothing else {}, f"`{entry.key}: {value}` {what}")
        else:
            problem = explain_unknown(entry, self.table, self.taken)
            self._comment_out(entry, f"{problem.found}; {problem.remedy}")

    def _takes(self, key: str, entry: Entry) -> bool:
        """Return whether ``key`` is not set yet, in the file by one synonym only, and accepts its value."""
        rivals = [name for name, value in self.values.items() if value is not None and read_synonyms().get(name) == key]
        if key not in self.table.keys or key in self.taken or rivals not in ([], [entry.key]):
            return False
        schema = self.table.keys[key].schema
        # Texts often have other values elsewhere, such as names of templates and datasets.
        if {"string", "array", "object"} & {*schema["type"]} and key not in _SAME_TEXTS:
            return False
        return Reader(entry.locate, []).read(key, entry.node, schema) is not INVALID

    def _move_template(self, entry: Entry, template: str) -> None:
        path = self.path.with_name(f"{self.path.stem}_chat_template.jinja")
        try:
            if not path.exists():
                path.write_text(template, encoding="utf-8")
            elif path.read_text(encoding="utf-8") != template:
                raise ConfigError(
                    Problem(str(path), "exists, with content other than the chat template of the file", "move it away")
                )
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                Problem(str(path), f"the chat template cannot be written: {error}", "migrate a copy elsewhere")
            ) from None
        self._replace(entry, {"chat_template_path": str(path)}, f"`{entry.key}` was written to {path}")
        self.taken |= {"chat_template_path"}

    def _rewrite_retired(self, entry: Entry, value: Any) -> None:
        retired = read_known(self.table.recipe)[entry.key]
        new = retired.rewrite(value)
        # null meant the default, which is here the key left out.
        keys = self.table.keys
        if value in (None, "None") and new and all(key in keys and not keys[key].accepts("null") for key in new):
            new = {}
        if new is None:
            self._comment_out(entry, f"`{entry.key}` {retired.found}; {retired.remedy}")
            return
        # Without a maximum length nothing is too long, and `overlong` would be an error.
        if "overlong" in new and not self.taken & {"max_length", "max_seq_length"}:
            new = {}
        # Successors that the file has too are kept.
        present = [key for key in new if key in self.taken]
        new = {key: new[key] for key in new if key not in self.taken}
        if present and not new:
            self._replace(entry, {}, f"deleted `{entry.key}`: `{present[0]}` is set as well", by_hand=True)
        elif not new:
            self._replace(entry, {}, f"deleted `{entry.key}`, which {retired.found}")
        elif new == {retired.new: value}:
            self._rename(entry, str(retired.new))
        else:
            spelled = ", ".join(f"`{key}: {value}`" for key, value in new.items())
            self._replace(entry, new, f"`{entry.key}: {value}` became {spelled}")
        self.taken |= set(new)

    def _rewrite_datasets(self, entry: Entry) -> None:
        legacy = {
            other.key: plain_value(other.node)
            for other in self.entries
            if other.key in legacy_files.LEGACY_KEYS + legacy_files.COMPANIONS
        }
        new, remark = legacy_files.convert_datasets(legacy)
        new = new and {key: value for key, value in new.items() if key not in self.taken or key == entry.key}
        if not new:
            what = f"`{entry.key}` could not be rewritten; {remark or 'write `dataset_name` or `dataset_mixture`'}"
            self._comment_out(entry, what)
            return
        self._replace(entry, new, f"`{entry.key}` became {', '.join(f'`{key}`' for key in new)}")
        if remark:
            self.changes.append(Change(_position(entry)[0] + 1, remark, by_hand=True))
        self.taken |= set(new)

    def _rename(self, entry: Entry, new: str, *, by_hand: bool = False) -> None:
        line, column = _position(entry)
        rest = self.lines[line][column:]
        # The old name, including any quotes, ends at the first colon.
        self.edits[line] = (line, [self.lines[line][:column] + new + rest[rest.index(":") :]])
        what = f"`{entry.key}` became `{new}`" + ": check that it has the same meaning" * by_hand
        self.changes.append(Change(line + 1, what, by_hand))

    def _replace(self, entry: Entry, new: Mapping[str, Any], what: str, *, by_hand: bool = False) -> None:
        line, column = _position(entry)
        dumped = _dump(new).splitlines() if new else []
        self.edits[line] = (_last_line(entry.node, line), [" " * column + part for part in dumped])
        self.changes.append(Change(line + 1, what, by_hand))

    def _comment_out(self, entry: Entry, what: str) -> None:
        line, _ = _position(entry)
        last = _last_line(entry.node, line)
        self.edits[line] = (last, [f"# {what}", *(f"# {part}" for part in self.lines[line : last + 1])])
        self.changes.append(Change(line + 1, what, by_hand=True))


def _dump(values: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True, width=1000)


def _name_reward(name: Any) -> Any:
    """Return the import path ``module:function`` of a reward function in TRL's spelling: dotted, or a short name."""
    if not isinstance(name, str):
        return name
    if name in _REWARDS_OF_TRL:
        return f"trl.rewards:{_REWARDS_OF_TRL[name]}"
    return ":".join(name.rsplit(".", 1)) if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", name) else name


def _position(entry: Entry) -> tuple[int, int]:
    """Return line and column of a key, both from 0."""
    assert entry.key_node is not None
    return entry.key_node.start_mark.line, entry.key_node.start_mark.column


def _last_line(node: yaml.Node, first: int) -> int:
    """Return the last line of a value, from 0: PyYAML's end mark of a block is after the comments that follow it."""
    if isinstance(node, yaml.ScalarNode):
        # The end mark of a block scalar, and any end mark at column 0, is on the line after the value.
        inside = node.style in ("|", ">") or node.end_mark.column == 0
        return max(first, node.end_mark.line - inside)
    assert isinstance(node, yaml.CollectionNode)
    if node.flow_style:
        return max(first, node.end_mark.line)
    children = node.value if isinstance(node, yaml.SequenceNode) else [part for pair in node.value for part in pair]
    return max([first, *(_last_line(child, first) for child in children)])
