"""Decides: plain integers and numpy. Requests, blocks, tables, plans, staging."""
