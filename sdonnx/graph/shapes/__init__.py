"""Symbolic shape inference."""
