"""Sample pipelines: published architectures with seeded random weights."""
