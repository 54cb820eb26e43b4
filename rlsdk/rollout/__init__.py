"""From tasks to scored rollouts: codec, chat, the way to the engines, the producer."""
