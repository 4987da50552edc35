"""Check whether a run can work, before training and during it.

memory_plan      estimates a step's memory, and advises what to change if the step does not fit
collapse_alarm   warns when a run collapses, keeps the best checkpoint, and can stop the run
diagnosis        explains from a run's metrics why it cannot learn
"""
