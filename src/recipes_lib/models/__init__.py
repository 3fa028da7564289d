"""Loading models and tokenizers, choosing the attention kernel, and the loss head."""
