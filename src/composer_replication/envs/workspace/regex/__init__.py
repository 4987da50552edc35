"""Regular expressions for Grep in bounded time, as ripgrep has them: no look-around, no references to groups.

Every state is visited at most once a character, so that no pattern can hang; a budget of visits bounds the whole
search, and what it cuts off is the same on every machine.

program  a pattern as steps, or what is wrong with it
search   whether they match a line
"""
