"""Check whether a run can work, before training and during it.

memory_plan      how much memory a step takes, whether it fits, and what to change if it does not
collapse_alarm   warns when a run collapses, keeps the best checkpoint, can stop the run
diagnosis        explains from its metrics why a run cannot learn
"""
