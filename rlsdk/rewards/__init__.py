"""Built-in rewards, one small module each; heavy libraries are imported only when a reward scores."""
