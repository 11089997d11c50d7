"""HTML pages that are one self-contained file: tables, images side by side, and the facts of a machine."""
