"""What a new experiment edits: what the model reads, which model it is, what it learns, by which optimizer."""
