"""Generation engines of RL: transformers' generate, continuous batching, vLLM server."""
