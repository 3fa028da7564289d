"""What ``make demo`` starts from: texts and chats of the Python standard library, a tokenizer, a random model."""
