"""Built-in renderers: turn conversations into tokens, and answers into messages."""
