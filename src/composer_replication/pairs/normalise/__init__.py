"""Which pairs are worth training on: data-juicer's four default operators in plain Python, read from its recipes."""
