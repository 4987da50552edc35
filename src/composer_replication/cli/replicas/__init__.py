"""Replicas of a training on rented machines that share a bucket: what `crf diloco` does.

launches      a launch, and what the bucket shows of it: its number, and a notice for whoever looks
launch_file   a launch as the operator's own machine holds it: what was asked, which replicas were begun, who they are
round_keys    what --round takes
asking        what a launch asks of its replicas
bucket_files  files of a run into the bucket and out of it
replica       what every replica runs: the run's files, the training, what came of it
starting      start replicas, each noted before it is asked for, and end all of them
checking      what a launch refuses before anything is sent or started
looking       how a launch is doing at one moment
tending       look after all of them, and start dead ones again
collecting    the trained weights and the logs
"""
