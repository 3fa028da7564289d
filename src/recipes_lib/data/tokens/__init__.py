"""Pretraining corpora: token shards, data order, mixture weights."""
