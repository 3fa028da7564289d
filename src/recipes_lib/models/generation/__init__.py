"""Text generation: sampling, KV cache, stop tokens."""
