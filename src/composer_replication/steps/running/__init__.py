"""What `crf run` asks before it begins: what it is told, whether there is anything to learn, how long it may take.

options    checked before anything heavy is loaded, and remembered in the run
learnable  enough to learn from, and enough to judge by
durations  the parts of a run in seconds, and what each guess is based on
"""
