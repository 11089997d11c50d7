"""Fusion rules, and the table that orders them."""
