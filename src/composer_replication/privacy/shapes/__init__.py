"""Secrets known by what they look like.

exact         values known beforehand
vendors       formats of vendors
entropy       strings that look random
runs          runs of key characters, and which are known to be clean
surroundings  what says that a random string is public
human         passwords that people make
"""
