"""The operators that models are written in: one protocol, several implementations."""
