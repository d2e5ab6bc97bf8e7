"""The data pipeline, from text to batches."""
