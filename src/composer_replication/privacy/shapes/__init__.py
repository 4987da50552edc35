"""Secrets known by what they look like: `exact` values, formats of `vendors`, `entropy`, and `human` passwords."""
