"""Helpers that all packages use."""
