"""Chat rows to token ids and loss mask: templates, target spans, verification."""
