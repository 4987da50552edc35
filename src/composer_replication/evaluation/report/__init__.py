"""A run directory as pages to look at: no torch, nothing fetched, the same bytes for the same files.

records      what a run holds, and what it lacks
count_words  what the counts of a training mean
plots        figures as inline SVG
figures      the evaluation: verdict, intervals, sampled actions
decisions    what training did to single decisions
training     curves of the channels, and what was paid
findings     sites in tables, the hint proof, and those to look at first
sessions     the list of sessions, and their conversations one after the other
shown_texts  what a turn or a pair says, cut where it is long
credit       a session turn by turn, with what became of each failure
account      pairs, drops, files and config
pages        templates to bytes
build        all of it, written
"""
