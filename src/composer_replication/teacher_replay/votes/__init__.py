"""What the answers to a state mean: each a vote for an action, counted by what the actions do.

context       what the messages before a state had shown
answers       one teacher's answer as the action it votes for
consensus     votes over classes of equal actions, and what those still to come can change
worth_asking  whether another teacher is worth asking
"""
