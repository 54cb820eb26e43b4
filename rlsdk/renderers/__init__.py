"""Built-in renderers: conversations as tokens, and answers as messages."""
