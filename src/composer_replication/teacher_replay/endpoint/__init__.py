"""One request to an endpoint that speaks the chat-completions API, whatever comes back.

outcome    what an answer is: a reply, or a failure that says whether to try again and who pays
unpacking  the bytes of an answer, unpacked within bounds
client     connections, and one attempt at a time
giving_up  whether an endpoint is any use, found out by a few requests
"""
