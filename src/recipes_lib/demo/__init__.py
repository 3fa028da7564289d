"""Data of ``make demo``: texts and chats of the Python standard library, a tokenizer, a random model."""
