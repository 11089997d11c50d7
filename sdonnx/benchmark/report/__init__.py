"""The results of a comparison as tables and charts: on a terminal, and as a page."""
