"""Secrets that people tell: `said` behind a name, `speech` in many languages, `nearby` on the lines around, `lists`."""
