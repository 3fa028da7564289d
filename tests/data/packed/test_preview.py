"""The preview of masked tokens in the terminal and as HTML, with markup escaped."""

from __future__ import annotations

import html
import json
import re
from html.parser import HTMLParser

import pytest
from tests import tiny
from tokenizers import AddedToken

from recipes_lib.commands import prepare
from recipes_lib.config.loader import load_config
from recipes_lib.data.chat.encoder import RowEncoder
from recipes_lib.data.packed.preview import Piece, PreviewRow, build_preview, compute_pieces, render_text
from recipes_lib.data.sources.mixtures import load_train_data
from recipes_lib.errors import ConfigError, DataError
from recipes_lib.report.html_pages import write_page

TEXTS = ["The capital is Paris.", " two  spaces\nand\ta tab", "naïve café", "<script>alert(1)</script> & \"x\" 'y'"]


def row_of(tokenizer, text: str, targets: slice = slice(1, None)) -> PreviewRow:
    ids = tokenizer(text)["input_ids"]
    chosen = range(len(ids))[targets]
    return PreviewRow("train.jsonl:1", compute_pieces(tokenizer, ids, [at in chosen for at in range(len(ids))]))


class Spans(HTMLParser):
    """Parser that collects tags, and text and attributes of the spans inside ``pre``."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.spans: list[tuple[dict[str, str | None], str]] = []
        self._inside = False

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self._inside = self._inside or tag == "pre"
        if self._inside and tag == "span":
            self.spans.append((dict(attributes), ""))

    def handle_endtag(self, tag):
        self._inside = self._inside and tag != "pre"

    def handle_data(self, data):
        if self._inside and self.spans:
            attributes, text = self.spans[-1]
            self.spans[-1] = (attributes, text + data)


def test_markup_in_token_is_escaped(tmp_path):
    text = '<script src="x">&</script>'
    rows = [PreviewRow("a", [Piece(text, 1, False, True)])]
    page = write_page(tmp_path / "x", "preview", title="a", rows=rows).read_text()
    parser = Spans()
    parser.feed(page)
    assert [shown for _, shown in parser.spans] == [text]
    assert "script" not in parser.tags


@pytest.mark.parametrize("text", [*TEXTS, "\ufffd?", "cut \ufffd", "größer: 東京 \N{GRINNING FACE}\N{GRINNING FACE}."])
def test_pieces_join_to_text_with_visible_whitespace(tiny_tokenizer, text):
    joined = "".join(piece.text for piece in row_of(tiny_tokenizer, text).pieces)
    assert joined == text.replace(" ", "·").replace("\n", "↵\n").replace("\t", "⇥")


def test_character_is_shown_with_the_last_of_its_tokens(tiny_tokenizer):
    pieces = row_of(tiny_tokenizer, "x\N{GRINNING FACE}y").pieces
    assert len(pieces) > 3
    assert [piece.text for piece in pieces] == ["x", *[""] * (len(pieces) - 3), "\N{GRINNING FACE}", "y"]


def test_special_tokens_are_marked():
    tokenizer = tiny.build_tokenizer()
    tokenizer.add_tokens([AddedToken("<|tool|>", special=True), AddedToken("<word>", special=False)])
    assert "<|tool|>" not in tokenizer.all_special_tokens
    pieces = row_of(tokenizer, "<|im_start|>user<|tool|><word>").pieces
    assert [piece.text for piece in pieces if piece.is_special] == ["<|im_start|>", "<|tool|>"]


@pytest.fixture
def show(build_config, tiny_tokenizer, tmp_path, monkeypatch):
    config = build_config()
    monkeypatch.setattr(prepare, "_load_tokenizer", lambda config: tiny_tokenizer)

    def run(*flags):
        keys = {"model_name_or_path": config.model.model_name_or_path, "dataset_name": config.data.dataset_name}
        argv = [*flags, *(f"--{key}={value}" for key, value in keys.items()), f"--output_dir={tmp_path / 'out'}"]
        prepare.preview(argv)

    return run


def test_preview_page_creates_folder_or_reports_path(show, tmp_path):
    show("--html", str(tmp_path / "new" / "folder" / "page.html"))
    assert (tmp_path / "new" / "folder" / "page.html").read_text().startswith("<!doctype html>")
    for place in (tmp_path / "new", tmp_path / "train.jsonl" / "page.html"):
        with pytest.raises(ConfigError, match="cannot be written") as caught:
            show("--html", str(place))
        assert caught.value.problems[0].where == str(place)


def test_preview_equals_encoder_output(build_config, tiny_tokenizer):
    config = build_config()
    (row,) = build_preview(config, tiny_tokenizer, 1)
    (encoded,) = RowEncoder(tiny_tokenizer).encode(list(load_train_data(config.data).rows())[:1])
    assert [piece.token_id for piece in row.pieces] == encoded.input_ids.tolist()
    assert [piece.is_target for piece in row.pieces] == encoded.loss_mask.tolist()


@pytest.mark.parametrize("character", ["\x1b", "\u202e", "\u200b", "\x07", "\u2028"])
def test_control_and_invisible_characters_are_escaped(tmp_path, tiny_tokenizer, character):
    row = row_of(tiny_tokenizer, f"a{character}b")
    assert character not in render_text(row).plain
    assert character not in write_page(tmp_path / "x", "preview", title="x", rows=[row]).read_text()


def test_terminal_text_styles_every_piece(tiny_tokenizer):
    row = row_of(tiny_tokenizer, TEXTS[0], slice(3, None))
    text = render_text(row)
    assert text.plain == row.title + "\n" + "".join(piece.text for piece in row.pieces)
    assert row.title == f"train.jsonl:1: {len(row.pieces)} tokens, {len(row.pieces) - 3} trained on"
    spans = text.spans[-len(row.pieces) :]
    assert ["green" in str(span.style) for span in spans] == [piece.is_target for piece in row.pieces]


def test_targets_are_in_brackets_without_colors(tiny_tokenizer):
    row = row_of(tiny_tokenizer, TEXTS[0], slice(3, None))
    read, scored = ("".join(piece.text for piece in part) for part in (row.pieces[:3], row.pieces[3:]))
    assert render_text(row, has_colors=False).plain == f"{row.title}, in ⟦ ⟧\n{read}⟦{scored}⟧"


def test_page_has_every_token_and_no_external_resource(tmp_path, tiny_tokenizer):
    rows = [row_of(tiny_tokenizer, text, slice(2, None)) for text in TEXTS]
    page = write_page(tmp_path / "x", "preview", title="gold & <b>", rows=rows).read_text()
    parser = Spans()
    parser.feed(page)
    pieces = [piece for row in rows for piece in row.pieces]
    assert [text for _, text in parser.spans] == [piece.text for piece in pieces]
    assert [attributes["title"] for attributes, _ in parser.spans] == [str(piece.token_id) for piece in pieces]
    assert ["target" in (attributes["class"] or "").split() for attributes, _ in parser.spans] == [
        piece.is_target for piece in pieces
    ]
    assert not parser.tags & {"script", "img", "link", "iframe", "b"}
    assert not re.search(r"https?://|url\(|@import", page)
    assert html.escape("gold & <b>") in page


@pytest.mark.parametrize("recipe", ["reward", "dpo"])
def test_preview_shows_both_answers_of_pair(tmp_path, tiny_tokenizer, tiny_tokenizer_dir, recipe):
    data = tmp_path / "pairs.jsonl"
    data.write_text(json.dumps({"prompt": "2 and 2?", "chosen": " 4", "rejected": " 22"}) + "\n")
    config = load_config(
        recipe,
        [f"--model_name_or_path={tiny_tokenizer_dir}", f"--dataset_name={data}", f"--output_dir={tmp_path / 'out'}"],
    )
    chosen, rejected = build_preview(config, tiny_tokenizer, 3)
    assert [row.where.rpartition(", ")[2] for row in (chosen, rejected)] == ["chosen", "rejected"]
    for row, answer in ((chosen, "·4"), (rejected, "·22")):
        read = "".join(piece.text for piece in row.pieces if not piece.is_target)
        scored = "".join(piece.text for piece in row.pieces if piece.is_target)
        assert (read, scored) == ("2·and·2?", f"{answer}<|endoftext|>")


@pytest.mark.parametrize("recipe", ["sft", "dpo"])
def test_preview_leaves_out_rows_that_training_drops(tmp_path, tiny_tokenizer, tiny_tokenizer_dir, recipe):
    data = tmp_path / "pairs.jsonl"
    rows = [{"prompt": "a", "chosen": f" b{end}", "rejected": " c"} for end in ("", "<|endoftext|> d", " e", " f")]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {"model_name_or_path": tiny_tokenizer_dir, "dataset_name": data, "output_dir": tmp_path / "out"}
    argv = [f"--{key}={value}" for key, value in keys.items()]
    dropping = load_config(recipe, [*argv, "--broken_rows=drop", "--max_broken_fraction=0.5"])
    shown = build_preview(dropping, tiny_tokenizer, 2)
    assert {row.where.partition(",")[0] for row in shown} == {f"{data}:1", f"{data}:3"}
    with pytest.raises(DataError, match="spells the end token"):
        build_preview(load_config(recipe, argv), tiny_tokenizer, 2)


def test_preview_of_pretraining_shows_whole_documents(build_config, tiny_tokenizer, tmp_path):
    (tmp_path / "book.txt").write_text("one\n\ntwo\n")
    keys = {"dataset_name": str(tmp_path / "book.txt"), "text_documents": "file", "loss_on": "assistant"}
    (row,) = build_preview(build_config(recipe="pretrain", **keys), tiny_tokenizer, 5)
    assert "".join(piece.text for piece in row.pieces) == "one↵\n↵\ntwo↵\n<|endoftext|>"
    # No token predicts the first one.
    assert [piece.is_target for piece in row.pieces] == [False] + [True] * (len(row.pieces) - 1)
