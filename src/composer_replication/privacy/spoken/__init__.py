"""Secrets that people tell.

said    in a sentence behind a name
speech  in many languages
nearby  on the lines around a word for one
lists   recovery codes, seed words, passphrases
"""
