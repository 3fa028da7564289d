"""Generation engines of RL: transformers' generate and continuous batching, vLLM colocated and as a server."""
