"""Secrets that are written differently: `encoded` text, `views` without escapes, values over several lines in `wraps`
and `fragments`.
"""
