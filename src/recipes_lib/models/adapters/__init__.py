"""LoRA adapters: creation, loading, target modules, merged weights."""
