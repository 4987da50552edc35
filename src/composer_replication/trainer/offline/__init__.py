"""Parts of the offline trainer.

checks   what cannot run, said before the first step and after the last
figures  what the channels did since the last log
"""
