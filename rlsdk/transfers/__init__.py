"""Built-in weight transfers, which send weights from the learner to the engines."""
