"""The files that a new experiment edits: its data, model, objective, optimizer and evaluation tasks."""
