"""The Monarch recipe: the plain work of its actors anywhere, the actors themselves where Monarch is installed.

world          episodes of the workspace and its reward, as a run names them
small_run      three batches in it, as a program
recorded       the record of twenty steps as numbered batches
tiny_policies  a policy and batches for the bookkeeping
"""
