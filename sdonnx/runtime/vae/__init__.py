"""The autoencoder of a pipeline: slices of the batch and tiles of the image."""
