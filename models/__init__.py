"""Computes: one file a model family, written in graph.ops, and the checkpoint loader."""
