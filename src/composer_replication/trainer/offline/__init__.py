"""Parts of the offline trainer.

checks   what cannot run, said before the first step and after the last
batch    what the data loader hands over
steps    the callback by which the trainer hears of its own run
figures  what the channels did since the last log
"""
