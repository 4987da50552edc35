"""What is read again and what is taken over: the rows of the last ingest are the cache of this one.

There is no second copy: what is scrubbed, forgotten or left out in a run is so for the next ingest too.

    session_sources  the account of each family of files: names, sizes, times, what it gave
    content_marks    what is known of a row without reading it again: hashes of its content, its tools
    last_ingest      what the last ingest left, and what must stay forgotten
    planning         which families are new or changed
    family_reading   those, as finished lines, in one process or several
    gather           new and old lines together
    drop_copies      which of them stay: no copies, nothing forgotten, no two equal ids
    summary          what the ingest did, for a table
"""
