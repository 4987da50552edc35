"""Render a conversation to token ids with exact spans. What a chat template can express is tested, never assumed.

templates        a tokenizer's chat template as a function from messages to text, run in a process of its own
template_server  the program of that process, which limits memory and time
dialect          determine from test renderings what a template can express; rules for thinking; escaping
messages         write turns as chat messages
pieces           find the edges of each turn in a rendering, cut there, and verify every cut
renderer         `Renderer.render`, and the encoding of pieces of text as token ids
decision         find the tokens that decide a call
"""
