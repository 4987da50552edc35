"""Secrets that are written differently: `encoded` text, `views` without escapes, and values over several lines, by
`fragments` of names, `wraps` that join them, and `crossing`, which says what of that counts.
"""
