"""What the answers to a state mean: each a vote for an action, counted by what the actions do.

context       what the messages before a state had shown
consensus     an answer as a vote for an action; votes over classes of equal ones, and what more can change
worth_asking  whether another teacher is worth asking
"""
