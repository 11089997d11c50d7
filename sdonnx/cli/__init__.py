"""The command lines, one module for each."""
