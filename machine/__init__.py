"""This machine: its devices, its disk, and whether they suit."""
