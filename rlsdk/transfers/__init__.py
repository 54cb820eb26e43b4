"""Built-in weight transfers: ways of the weights from the learner to the engines."""
