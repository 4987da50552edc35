"""What was answered and paid for, kept through kills and shared by processes: one SQLite file.

tables      the tables, what they say, and the check of a whole store
lock_files  which processes that reserved money, or hold a run, are still alive
ledger      the store: replies, and money that is reserved before a request and settled after it
forget      sessions out of the store, and out of the tools they were asked with
"""
