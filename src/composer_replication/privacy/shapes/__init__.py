"""Secrets known by what they look like: `exact` values, formats of `vendors`, `entropy` and the `surroundings` that say
that a random string is public, and `human` passwords.
"""
