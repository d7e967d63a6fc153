"""Ties the rooms together and serves: Engine, sampling, text, command line, benchmark."""
