"""Attributes and methods that a pipeline shares with diffusers' pipelines."""
