"""Secrets known by what they look like.

exact         values known beforehand
vendors       formats of vendors
entropy       strings that look random
surroundings  what says that a random string is public
human         passwords that people make
"""
