"""What ``make demo`` trains on and starts from: texts and chats of the Python standard library, a tokenizer, a small model."""
