"""What verbs show at length.

progress      bars and lines while something goes on
step_words    what came of each step of a run, and of all of it
token_canvas  lines of tokens, with marks that stay readable without colour
site_page     what the student and the teacher see of a site, row by row
launch_table  replicas and their rounds
"""
