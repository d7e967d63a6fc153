"""Latency side by side: our engine, our eager baselines and other engines, in turns, in one run.

Every contender lives in a process of its own and sees the same token ids, lengths, threads and precision. The package
knows how to measure and to report; what an engine is like inside, only its adapter file knows.
"""
