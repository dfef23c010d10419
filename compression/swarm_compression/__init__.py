"""Codecs between model weights and bytes: pure functions, no I/O, no clock, no network."""
