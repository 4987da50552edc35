"""Secrets that are written differently.

encoded    behind an encoding
views      a text without its escapes
fragments  names that a line end cuts in two
wraps      values over several lines
crossing   what of that counts
streams    values that a stream tells piece by piece
"""
