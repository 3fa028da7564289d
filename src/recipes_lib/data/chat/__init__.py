"""Chat rows to token ids and loss mask: templates, trained spans, verification."""
