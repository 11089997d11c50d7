"""Conversion to reduced precision."""
