"""Runs: buckets, static graphs, targets, and the operators that models are written in."""
