"""What an assistant turn does, as records and as text, in every shape that a model or a log writes it."""
