"""Devices, checkpoints and settings of this machine."""
