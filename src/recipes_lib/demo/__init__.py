"""The demo: texts and chats from the Python standard library, a tokenizer, and the pipeline of all recipes."""
