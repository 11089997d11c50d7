"""Model families: the components of each, with their inputs, outputs and sizes."""
