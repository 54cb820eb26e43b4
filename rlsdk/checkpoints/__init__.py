"""Write, read and export checkpoints."""
