"""Replicas of a training on rented machines that share a bucket: what `crf diloco` does.

launches      a launch as the bucket holds it: its number, what is asked of the replicas, who they are
asking        what a launch asks of its replicas
bucket_files  files of a run into the bucket and out of it
replica       what every replica runs: the run's files, the training, what came of it
tending       start replicas, start dead ones again, say how all of them are doing, end them
collecting    the trained weights and the logs
"""
