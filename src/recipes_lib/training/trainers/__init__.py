"""One trainer per recipe over transformers' Trainer, and their arguments."""
