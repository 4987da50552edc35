"""What is done with a run beside its steps, a file a verb.

judge    every call judged before it ran, against what happened
inspect  a site as the tokens that a training makes of it
export   conversations -> ATIF documents for other tools
forget   a session out of all of it
world    sessions of scripted agents, as logs
replica  a training as one replica of several
"""
