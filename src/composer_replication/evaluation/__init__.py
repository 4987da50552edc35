"""Before against after, on held-out sessions: rows, figures with intervals over sessions, and a verdict.

statistics   a mean over sites with an interval over sessions
held_out     the sessions that nothing was learnt from, without near-duplicates of what was
arms         the weights that are compared, loaded one after the other
decisions    what is scored at a site: the error, the right call in its place, good calls of the session
forced       log-probs of these under each set of weights, kept as they come
figures      rows to figures
verdict      the primary figure as a word and two sentences
evaluate     all of it in order, and what is written
"""
